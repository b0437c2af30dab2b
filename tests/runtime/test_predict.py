"""Prediction changes speed, never logits: right, wrong on purpose, late on purpose, or broken."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.runtime import Engine, EngineOptions, Sampling
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.predict import Guess, QuasiHidden, Tap
from tests.models.fixtures import TinyModel
from tests.models.tiny import MOE_FAMILIES

PROMPT = "The quick brown fox jumps over the lazy dog."


class Wrong:
    """Random experts of the next layer."""

    def __init__(self, model: ModelMap) -> None:
        self._layers = {layer.index: layer for layer in model.layers}
        self._draw = np.random.default_rng(1)

    def predict(self, tap: Tap) -> Guess | None:
        layer = self._layers.get(tap.block + 1)
        if layer is None:
            return None
        order = self._draw.permutation(layer.n_expert)[: layer.n_expert_used]
        return Guess(layer.index, order.astype(np.int32))

    def close(self) -> None:
        pass


class Late(Wrong):
    """The right experts, when the layer that needs them is long done."""

    def __init__(self, model: ModelMap) -> None:
        super().__init__(model)
        self._right = QuasiHidden.of(model)

    def predict(self, tap: Tap) -> Guess | None:
        time.sleep(0.002)
        return self._right.predict(tap)


class Broken(Wrong):
    def predict(self, tap: Tap) -> Guess | None:
        raise RuntimeError("no idea")


@pytest.fixture(autouse=True)
def own_predictors(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_predictors")
    for predictor in (Wrong, Late, Broken):
        setattr(module, predictor.__name__, predictor)
    monkeypatch.setitem(sys.modules, "own_predictors", module)


def answered(
    path: Path, predict: str, budget: str = "60%", **more: object
) -> tuple[str | None, Engine]:
    options = EngineOptions(expert_budget=budget, predict=predict, threads=1, ctx=256, **more)  # type: ignore[arg-type]
    with Engine.open(path, options=options) as engine:
        *_, last = engine.generate(
            PROMPT, sampling=Sampling(temp=0), max_tokens=40, logits_hash=True, ignore_end=True
        )
        engine.check()
    return last.stats.logits_sha256, engine


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_no_prediction_changes_the_logits_of_any_family(family: str, tiny_model: TinyModel) -> None:
    path = tiny_model(family)
    expected, _ = answered(path, "none", "100%")

    for predict in ("none", "quasi-hidden", "own_predictors:Wrong"):
        assert expected == answered(path, predict)[0], predict


def test_the_native_loop_predicts_as_well_and_changes_no_logits(tiny_model: TinyModel) -> None:
    path = tiny_model("bailingmoe")
    expected, _ = answered(path, "none", "100%")
    recall = {}
    for loop in ("python", "native"):
        options = EngineOptions(expert_budget="60%", threads=1, ctx=256, loop=loop)
        with Engine.open(path, options=options) as engine:
            *_, last = engine.generate(
                PROMPT, sampling=Sampling(temp=0), max_tokens=40, logits_hash=True, ignore_end=True
            )
        assert expected == last.stats.logits_sha256
        assert last.stats.slots.true_experts > 0
        recall[loop] = last.stats.slots.recall

    # Which taps a loop catches depends on timing, so the two are not equal; chance is 2 of 8.
    assert min(recall.values()) > 0.3


@pytest.mark.parametrize("predict", ["quasi-hidden", "own_predictors:Wrong", "own_predictors:Late"])
@pytest.mark.parametrize("buffers", ["slots", "two-layer"])
def test_neither_buffers_nor_a_slow_link_nor_lateness_change_logits(
    predict: str, buffers: str, tiny_model: TinyModel
) -> None:
    path = tiny_model("bailingmoe")
    expected, _ = answered(path, "none", "100%")

    assert (
        expected == answered(path, predict, buffers=buffers, link="50MB/s,5us", upload_threads=1)[0]
    )


def test_a_predictor_that_raises_is_switched_off_and_named(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model("qwen3moe")
    expected, _ = answered(path, "none", "100%")

    assert expected == answered(path, "own_predictors:Broken")[0]
    assert "RuntimeError: no idea" in caplog.text


def test_statistics_tell_right_predictions_from_wrong_ones(tiny_model: TinyModel) -> None:
    def recall(predict: str) -> tuple[float, float]:
        options = EngineOptions(expert_budget="70%", predict=predict, threads=1, ctx=512)
        with Engine.open(tiny_model("bailingmoe"), options=options) as engine:
            for step in engine.generate(PROMPT, max_tokens=200, ignore_end=True):
                last = step
            slots = last.stats.slots
            assert last.stats.to_json("", "length")["experts"]["predictor"] == predict
        return slots.recall, slots.precision_nonresident

    none, wrong, right = (recall(p) for p in ("none", "own_predictors:Wrong", "quasi-hidden"))

    assert (0.0, 0.0) == none
    assert 0.15 < wrong[0] < 0.35  # chance is 2 of 8
    assert right[0] > wrong[0] + 0.1


@pytest.mark.parametrize(
    "name", ["guesswork", "no_such_module:Class", "own_predictors:Absent", ":", "x:"]
)
def test_predictors_that_cannot_be_had_are_refused(name: str, tiny_model: TinyModel) -> None:
    with pytest.raises(OptionError, match="--predict"):
        Engine.open(
            tiny_model("qwen3moe"), options=EngineOptions(expert_budget="60%", predict=name)
        )
