"""Predictions follow from bytes and rates; the fastest mode without loss is picked, plain where plain wins."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import pytest

from speculoe_local.runtime import machine
from speculoe_local.runtime.hits import DEFAULT
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.modes import Card, Host, Rate
from speculoe_local.runtime.needs import HOST_RESERVE_BYTES, needs_of
from speculoe_local.runtime.opened import open_model
from speculoe_local.runtime.options import EngineOptions
from speculoe_local.runtime.plan import device_reserve, make_plan
from tests.models.published import SHAPES, tables, write

GIB = 1 << 30


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return {name: ModelMap.read(write(name, folder)) for name in SHAPES}


@pytest.fixture
def qwen(models):
    return models["Qwen3-30B-A3B-Q4_K_M"]


def host(ram=30, products=45, disk=5):
    return Host(ram * GIB, Rate(products * 1e9, "given"), Rate(disk * 1e9, "given"))


def card(gib, products=350, link=24, **more):
    return Card(
        "a card", gib * GIB, gib * GIB, Rate(products * 1e9, ""), Rate(link * 1e9, ""), **more
    )


def with_card(gib, **more):
    return replace(host(), card=card(gib, **more))


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("Qwen3-30B-A3B-Q4_K_M", 18.56), ("gpt-oss-20b-MXFP4", 12.11), ("gpt-oss-120b-MXFP4", 63.39)],
)
def test_the_headers_are_of_models_of_the_published_size(name, gigabytes, models):
    assert pytest.approx(gigabytes, rel=0.002) == models[name].total_bytes / 1e9


def test_everything_resident_is_picked_where_it_fits(qwen):
    made = make_plan(qwen, with_card(24))
    moved = made.traffic
    seconds = (moved.weights_bytes + moved.experts_bytes + moved.kv_bytes) / 350e9 + 48 * 50e-6

    assert ("resident", "resident") == (made.picked.name, made.placed.kind)
    assert pytest.approx(1 / seconds) == made.picked.tokens_per_s
    assert "a plain placement is best" in made.verdict[1]
    assert made.mode("prefetch").tokens_per_s is None


def test_slots_copy_what_they_miss_and_nothing_else(qwen):
    made = make_plan(qwen, with_card(12))
    missed = 1 - DEFAULT.slots(made.placed.residency)
    cache, prefetch = made.mode("cache"), made.mode("prefetch")

    assert pytest.approx(made.traffic.experts_bytes * missed / 24e9 * 1e3) == cache.copy_ms
    assert pytest.approx(1e3 / (cache.compute_ms + cache.copy_ms)) == cache.tokens_per_s
    assert prefetch.copy_ms == cache.copy_ms
    assert 0 < prefetch.hidden_ms < min(prefetch.copy_ms, prefetch.compute_ms) / 2
    assert made.placed.used_bytes + made.placed.spare_bytes <= made.room_bytes


def test_what_lies_on_the_device_adds_up_to_it(qwen):
    made = make_plan(qwen, with_card(12), ctx=8192)
    needs = made.needs

    assert 12 * GIB == (
        made.reserve_bytes + needs.beside_bytes + needs.context_bytes + made.room_bytes
    )
    assert device_reserve(12 * GIB) == made.reserve_bytes == 12 * GIB // 10
    assert GIB == device_reserve(4 * GIB)


def test_a_fast_processor_beside_a_slow_link_beats_slots_and_is_picked(qwen):
    made = make_plan(qwen, with_card(8, link=3))

    assert ("misses-cpu", "rounded", "--misses cpu") == (
        made.picked.name,
        made.picked.exactness,
        made.picked.options,
    )
    assert made.picked.tokens_per_s > made.mode("cpu-experts").tokens_per_s
    assert made.mode("cpu-experts").tokens_per_s > made.mode("prefetch").tokens_per_s


def test_experts_of_whole_layers_on_the_processor_win_where_slots_hit_little(qwen):
    made = make_plan(qwen, with_card(3, link=1))

    assert "cpu-experts" == made.picked.name
    assert "a plain placement, experts on the processor, beats slots" in made.verdict[1]


def test_slots_are_picked_beside_a_slow_processor(qwen):
    made = make_plan(qwen, replace(with_card(12), products=Rate(8e9, "")))

    assert made.picked.name in ("cache", "prefetch")
    assert made.mode("cpu-experts").tokens_per_s < made.picked.tokens_per_s


def test_a_lossy_mode_is_never_picked_but_named_where_it_is_faster(qwen):
    made = make_plan(qwen, with_card(8))
    lossy = made.mode("speculate")

    assert ("lossy", "exact") == (lossy.exactness, made.picked.exactness)
    assert lossy.tokens_per_s > made.picked.tokens_per_s
    assert any(line.startswith("speculate (lossy) may reach") for line in made.verdict)


def test_prediction_hides_nothing_on_a_device_that_copies_and_computes_in_turn(qwen):
    made = make_plan(qwen, with_card(12, overlaps=False))

    assert 0 == made.mode("prefetch").hidden_ms == made.mode("speculate").hidden_ms
    assert "in turn" in made.mode("prefetch").note
    assert made.picked.name != "prefetch"


def test_what_memory_does_not_hold_comes_from_the_disk(models):
    large = models["gpt-oss-120b-MXFP4"]
    roomy, tight = (
        make_plan(large, replace(with_card(12), ram_bytes=ram * GIB)) for ram in (96, 14)
    )

    assert tight.mode("cache").copy_ms > roomy.mode("cache").copy_ms
    assert tight.mode("cpu-experts").copy_ms > 0 == roomy.mode("cpu-experts").copy_ms
    assert any("comes from disk" in line for line in tight.assumptions)
    assert not any("comes from disk" in line for line in roomy.assumptions)


def test_each_copy_costs_the_links_latency(qwen):
    quick, late = (make_plan(qwen, with_card(12, latency_s=s)) for s in (0.0, 10e-6))
    missed = late.traffic.copies * (1 - DEFAULT.slots(late.placed.residency))

    assert pytest.approx(missed * 10e-3, rel=1e-6) == (
        late.mode("cache").copy_ms - quick.mode("cache").copy_ms
    )


def test_without_a_device_memory_is_the_fast_tier_and_the_disk_the_link(models):
    made = make_plan(models["gpt-oss-120b-MXFP4"], host(ram=14))
    missed = 1 - DEFAULT.slots(made.placed.residency)

    assert "memory" == made.fast
    assert "cpu-experts" not in [mode.name for mode in made.modes]
    assert (
        pytest.approx(made.traffic.experts_bytes * missed / 5e9 * 1e3) == made.mode("cache").copy_ms
    )


@pytest.mark.parametrize("gib", [1, 2])
def test_a_device_too_small_for_the_other_weights_is_said_not_planned_for(gib, models):
    made = make_plan(models["gpt-oss-120b-MXFP4"], with_card(gib))

    assert made.placed is None
    assert made.room_bytes < 0
    assert "of the device" in made.mode("cpu-experts").note
    assert "mapped" == made.picked.name


def test_a_machine_that_is_too_small_gets_a_verdict_and_no_speed(models):
    made = make_plan(models["gpt-oss-120b-MXFP4"], host(ram=1))

    assert made.picked is None
    assert {None} == {mode.tokens_per_s for mode in made.modes}
    assert made.verdict[0].startswith("does not run on this machine: weights besides experts")


def test_more_memory_on_the_device_is_never_slower(models):
    for model in models.values():
        speeds = [
            make_plan(model, with_card(gib)).mode("prefetch").tokens_per_s
            for gib in range(6, 30, 2)
        ]
        known = [speed for speed in speeds if speed is not None]

        assert sorted(known) == known
        assert known


def test_a_dense_model_has_no_slots(tiny_model):
    model = ModelMap.read(tiny_model("llama"))
    made = make_plan(model, host())

    assert ("resident", "the model fits memory") == (made.picked.name, made.picked.note)
    for name in ("cache", "prefetch", "ondemand"):
        assert "the model has no routed experts" == made.mode(name).note
    assert (
        "the model has no routed experts"
        == make_plan(model, with_card(12)).mode("cpu-experts").note
    )


def test_a_device_that_only_costs_time_is_left_out(tiny_model):
    made = make_plan(ModelMap.read(tiny_model("qwen3moe")), with_card(12))

    assert "mapped" == made.picked.name
    assert made.verdict[1].startswith("a plain placement, the processor alone, beats the device")


def test_json_holds_what_text_says(qwen):
    made = make_plan(qwen, with_card(12))
    found = json.loads(json.dumps(made.to_json()))

    assert {"model", "machine", "memory", "traffic", "placement", "modes", "picked", "verdict", "assumptions"} == found.keys()  # fmt: skip
    assert made.picked.name == found["picked"]
    assert list(made.assumptions) == found["assumptions"]
    assert [mode.name for mode in made.modes] == [mode["name"] for mode in found["modes"]]


def test_the_tables_in_the_document_are_what_its_command_prints(repository, tmp_path):
    document = (repository / "docs" / "plan.md").read_text()
    _, _, shown = document.partition("<!-- tables -->\n")

    assert tables(tmp_path) == shown


@pytest.mark.parametrize(("n", "shared"), [(1, False), (3, False), (3, True)])
def test_auto_takes_of_main_memory_what_plan_says_it_will(n, shared, tiny_model, monkeypatch):
    path = tiny_model("qwen3moe")
    model = ModelMap.read(path)
    needs = needs_of(model, 512, 64, sequences=n, shared=shared)
    kept = HOST_RESERVE_BYTES + needs.weights_bytes + needs.context_bytes
    free = kept + model.routed_bytes // 2
    monkeypatch.setattr(machine, "look", lambda: machine.Machine(1, free, free, None))
    chosen = EngineOptions(ctx=512, ubatch=64, batch=64, device="cpu")

    with closing(open_model(path, options=chosen, n_sequences=n, shared=shared)) as opened:
        placed = opened.placed

    assert "slotted" == placed.kind
    assert placed.used_bytes + placed.spare_bytes <= model.routed_bytes // 2
    if n == 1:
        host = Host(free, Rate(1e9, ""), Rate(1e9, ""))
        assert placed == make_plan(model, host, ctx=512, ubatch=64).placed
