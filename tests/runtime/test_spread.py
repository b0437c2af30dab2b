"""Which layers go to other machines."""

from __future__ import annotations

import pytest

from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import BudgetError, OptionError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.options import EngineOptions, Peer, parse_devices, parse_peers
from speculoe_local.runtime.spread import (
    Member,
    deal,
    layer_bytes,
    over,
    part_of,
    split_evenly,
    spread,
)
from tests.models.fixtures import TinyModel

GIB = 1 << 30


def device(name: str = "RPC0", free: int = 100 * GIB) -> Device:
    return Device(
        name=name,
        kind="rpc",
        index=0,
        description="10.0.0.2:50052",
        type="gpu",
        free_bytes=free,
        total_bytes=free,
        overlaps=True,
        pins=False,
        events=True,
        handle=1,
    )


def member(free: int, layers: int | None = None, endpoint: str = "10.0.0.2:50052") -> Member:
    return Member(endpoint, (device(free=free),), layers)


def test_peers_are_read_with_and_without_a_number_of_layers() -> None:
    found = parse_peers("10.0.0.2:50052, box.local:1=12")

    assert (Peer("10.0.0.2", 50052), Peer("box.local", 1, 12)) == found
    assert "box.local:1" == found[1].endpoint


@pytest.mark.parametrize(
    "text",
    ["", "box", "box:", "box:0", "box:65536", "box:1=0", "box:1=x", "a:1,a:1", "[::1]:5", ","],
)
def test_what_is_no_peer_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        EngineOptions(rpc=text)

    assert "--rpc" in str(caught.value)
    assert 1 == len(str(caught.value).splitlines())


def test_a_lossy_mode_does_not_go_with_other_machines() -> None:
    with pytest.raises(OptionError, match="--mode speculate does not go with --rpc"):
        EngineOptions(rpc="box:1", mode="speculate")


def test_a_member_gets_its_share_of_all_free_memory() -> None:
    sizes = [GIB // 10] * 40

    assert [20] == deal(sizes, 100 * GIB, [member(100 * GIB)])
    assert [10, 20] == deal(sizes, 50 * GIB, [member(50 * GIB), member(100 * GIB)])


def test_a_member_gets_no_more_than_fits_beside_its_reserve() -> None:
    sizes = [GIB] * 40

    assert [9] == deal(sizes, 4 * GIB, [member(10 * GIB)])  # 1 GiB stays free


def test_layers_asked_for_are_given_and_the_others_share_the_rest() -> None:
    sizes = [GIB // 10] * 10

    assert [7, 3] == deal(sizes, 1, [member(10 * GIB, 7), member(1000 * GIB)])
    assert [10] == deal(sizes, GIB, [member(GIB, 10)])


def test_more_layers_than_there_are_cannot_be_asked_for() -> None:
    with pytest.raises(
        OptionError, match="asks for 11 layers, the model has 10; ask for at most 10"
    ):
        deal([1] * 10, GIB, [member(GIB, 5), member(GIB, 6)])


def test_a_member_without_room_is_named_with_its_memory_and_a_layers_size() -> None:
    with pytest.raises(
        BudgetError, match=r"10\.0\.0\.2:50052 has 1\.5 GiB free, a layer takes 1\.0 GiB"
    ):
        deal([GIB] * 10, GIB, [member(3 * GIB // 2)])


@pytest.mark.parametrize(
    ("count", "weights", "expected"),
    [
        (10, [1, 1], [5, 5]),
        (10, [2, 1], [7, 3]),
        (1, [1, 3], [0, 1]),
        (3, [0, 0], [2, 1]),
        (0, [5], [0]),
    ],
)
def test_whole_parts_follow_their_weights(
    count: int, weights: list[int], expected: list[int]
) -> None:
    assert expected == split_evenly(count, weights)


def test_the_cpu_keeps_the_first_layers_and_the_output(tiny_model: TinyModel) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))
    found = spread(model, [member(GIB, 1), member(GIB, 2, "b:2")], None, GIB)

    assert (0,) == found.local
    assert found.output_here
    assert (
        1,
        3,
    ) == found.shares  # the output counts as a layer of the last one; an override keeps it
    assert 4 == found.n_offloaded
    assert "layer 0 here, layer 1 on 10.0.0.2:50052, layers 2 to 3 on b:2" == found.describe()


def test_a_local_device_keeps_the_last_layers_with_the_output(tiny_model: TinyModel) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))
    found = spread(model, [member(GIB, 1)], device("Vulkan0"), GIB)

    assert (1, 2, 3) == found.local
    assert not found.output_here
    assert ["RPC0", "Vulkan0"] == [d.name for d in found.devices]
    assert (1, 4) == found.shares
    assert 5 == found.n_offloaded


def test_what_is_here_of_a_model_leaves_out_layers_elsewhere(tiny_model: TinyModel) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))
    here = spread(model, [member(GIB, 3)], None, GIB).of(model)

    assert [0] == [layer.index for layer in here.layers]
    assert model.total_bytes - sum(layer_bytes(model)[1:]) == here.total_bytes
    assert model.other_bytes > here.other_bytes > 0


def test_devices_are_read_one_by_one() -> None:
    assert (("vulkan", 0), ("cuda", 1)) == parse_devices("vulkan, cuda:1")
    assert (("auto", 0),) == parse_devices("auto")


@pytest.mark.parametrize("text", ["vulkan,vulkan:0", "cpu,cuda", "auto,cuda:1", "cuda:0,", ","])
def test_devices_that_do_not_go_together_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(OptionError, match="--device"):
        EngineOptions(device=text)


def test_several_devices_do_not_go_with_other_machines() -> None:
    with pytest.raises(OptionError, match="does not go with --rpc; name one device"):
        EngineOptions(device="cuda:0,cuda:1", rpc="box:1")


def test_several_devices_share_layers_by_what_is_free_beside_a_reserve(
    tiny_model: TinyModel,
) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))  # four layers

    counts, found = over(model, [device("A", 5 * GIB), device("B", 3 * GIB)])
    assert (3, 1) == counts
    assert (3, 2) == found.shares  # the output counts as the last one's
    assert 5 == found.n_offloaded
    assert (1, 3) == over(model, [device("A", GIB), device("B", 9 * GIB)])[0]
    with pytest.raises(OptionError, match="--device names 5 devices, the model has 4 layers"):
        over(model, [device(str(i)) for i in range(5)])


def test_parts_of_a_model_add_up_to_it(tiny_model: TinyModel) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))
    first, last = part_of(model, range(3), rest=False), part_of(model, range(3, 4), rest=True)

    assert model.total_bytes == first.total_bytes + last.total_bytes
    assert model.routed_bytes == first.routed_bytes + last.routed_bytes
    assert model.layers == first.layers + last.layers
    assert set(first.tensors) | set(last.tensors) == set(model.tensors)
    assert "token_embd.weight" in set(last.tensors) - set(first.tensors)
