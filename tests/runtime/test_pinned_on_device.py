"""Experts in pinned memory, layers of which all experts have slots, layers that the CPU computes: on a device.

The device is Mesa's software Vulkan; see test_device.py for why ubatches have four rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from speculoe_local.runtime import Engine, EngineOptions, opened
from speculoe_local.runtime.errors import BudgetError, OptionError, SourceError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.opened import open_model
from speculoe_local.runtime.slots import ExpertSlots, SlotStats
from speculoe_local.runtime.stats import Stats
from tests.models.fixtures import TinyModel
from tests.models.tiny import split
from tests.runtime.reference import Logits
from tests.runtime.test_device import LONG, PROMPT, answer, options, resident


def answered(path: Path, chosen: EngineOptions, prompt: Sequence[int] = PROMPT) -> Stats:
    with Engine.open(path, options=chosen) as engine:
        return answer(engine, prompt).stats


@pytest.mark.parametrize("pin", ["100%", "40%", "0"])
def test_what_is_pinned_changes_no_logits(pin: str, tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    routed = ModelMap.read(path).routed_bytes

    stats = answered(path, options(pin=pin), LONG)

    assert resident(path, LONG) == stats.logits_sha256
    share = stats.slots.pinned_bytes / routed
    assert {"100%": share == 1, "40%": 0.2 < share <= 0.4, "0": share == 0}[pin]


def test_a_split_model_is_pinned_from_all_its_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = tiny_model("gpt-oss")
    copy = tmp_path / "model.gguf"
    copy.write_bytes(whole.read_bytes())

    stats = answered(split(copy, 3)[0], options(pin="100%"))

    assert resident(whole) == stats.logits_sha256
    assert ModelMap.read(whole).routed_bytes == stats.slots.pinned_bytes


def test_pinned_experts_are_what_the_cpu_computes_misses_from(tiny_model: TinyModel) -> None:
    """Which experts have landed, and so the bits, is a matter of time: what they come to is not."""
    path = tiny_model("qwen3moe", "F16")

    def first(chosen: EngineOptions) -> tuple[Logits, int]:
        with closing(open_model(path, options=chosen)) as model:
            assert 0 == model.context.decode(PROMPT[:4], 0)
            assert 0 == model.context.decode([9], 4)
            cpu_experts = model.slots.stats().cpu_experts if model.slots else 0
            return model.context.logits().copy(), cpu_experts

    expected, _ = first(options("100%"))
    got, cpu_experts = first(options("45%", misses="cpu", predict="none", pin="100%"))

    assert 0 < cpu_experts
    assert float(np.abs(got - expected).max()) < 0.05 * float(np.abs(expected).max())


def test_a_software_driver_is_given_no_pinned_memory_unasked(tiny_model: TinyModel) -> None:
    assert 0 == answered(tiny_model("qwen3moe"), options()).slots.pinned_bytes


def test_less_pinned_memory_than_asked_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Slots:
        def stats(self) -> SlotStats:
            return SlotStats(pinned_bytes=1000)

    with caplog.at_level(logging.WARNING):
        opened._note_pinned(options(pin="50%"), 5000, cast("ExpertSlots", Slots()))

    assert "--pin 50%: 1000 B are pinned, the driver gives no more" in caplog.text


def test_nothing_is_pinned_without_a_device_and_that_is_said(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        stats = answered(tiny_model("qwen3moe"), options(device="cpu", pin="50%"))

    assert 0 == stats.slots.pinned_bytes
    assert "--pin 50%: no device here reads main memory by itself" in caplog.text


def test_a_file_cut_short_while_it_is_pinned_is_one_clear_error(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("qwen3moe").read_bytes())
    pin = opened._pin_bytes

    def cut_first(*arguments: object) -> int:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size * 2 // 3)
        return pin(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(opened, "_pin_bytes", cut_first)
    with pytest.raises(SourceError, match="the file now ends at"):
        Engine.open(path, options=options(pin="100%"))


@pytest.mark.parametrize("pin_layers", ["0", "0-1", "1,2"])
def test_layers_with_a_slot_for_each_expert_change_no_logits(
    pin_layers: str, tiny_model: TinyModel
) -> None:
    path = tiny_model("qwen3moe")
    layers = ModelMap.read(path).layers

    with Engine.open(path, options=options("75%", pin_layers=pin_layers)) as engine:
        stats = answer(engine).stats

        whole = [
            p for p in engine.info.placement.pools if p.slots == len(p.layers) * layers[0].n_expert
        ]
        assert resident(path) == stats.logits_sha256
        assert len(engine.info.placement.pools) > len(whole) == 1


def test_pinned_layers_need_room_for_all_their_experts(tiny_model: TinyModel) -> None:
    with pytest.raises(BudgetError, match="is below the"):
        Engine.open(tiny_model("qwen3moe"), options=options("30%", pin_layers="0-2"))
    with pytest.raises(OptionError, match="--pin-layers 99: the model has layers 0 to "):
        Engine.open(tiny_model("qwen3moe"), options=options(pin_layers="0,99"))


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "deepseek2"])
def test_layers_left_to_the_cpu_give_the_same_with_and_without_slots_for_the_rest(
    family: str, tiny_model: TinyModel
) -> None:
    path = tiny_model(family)

    rest_resident = answered(path, options("100%", n_cpu_moe=2))
    rest_slotted = answered(path, options("60%", n_cpu_moe=2))

    assert rest_resident.logits_sha256 == rest_slotted.logits_sha256
    assert ("ram-vram", "ram-vram") == (rest_resident.tier, rest_slotted.tier)
    assert 0 == rest_resident.slots.requests < rest_slotted.slots.requests
    assert rest_resident.logits_sha256 != resident(path)  # the CPU rounds otherwise


def test_all_layers_left_to_the_cpu_need_no_slots(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")

    stats = answered(path, options("25%", n_cpu_moe=len(ModelMap.read(path).layers)))

    assert (0, 0) == (stats.n_slots, stats.slots.requests)


def test_layers_are_left_to_the_cpu_only_beside_one_device(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")

    with pytest.raises(OptionError, match="there is no device to spare; leave it out"):
        Engine.open(path, options=options(device="cpu", n_cpu_moe=1))
    with pytest.raises(OptionError, match=r"--n-cpu-moe 99: only \d+ layers have routed experts"):
        Engine.open(path, options=options(n_cpu_moe=99))
    with pytest.raises(OptionError, match="does not go with --rpc"):
        options(n_cpu_moe=1, rpc="127.0.0.1:50052")


@pytest.mark.parametrize("text", ["x", "3-1", "1-", "-2", "99999"])
def test_what_names_no_layers_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not a layer or a range of them"):
        options(pin_layers=text)
