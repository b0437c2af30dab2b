"""Evaluation: exact costs nothing, lossy modes something, and the sidecar learns how much."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert.calibrate import calibrate
from speculoe_local.runtime import EngineOptions
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.evaluate import (
    WEIGHTS,
    Plan,
    Report,
    Setting,
    evaluate,
    held_out_text,
    keep,
)
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import Quality, Sidecar, sidecar_path
from speculoe_local.runtime.tasks import Item
from tests.models.fixtures import TinyModel
from tests.models.tiny import build

OPTIONS = EngineOptions(expert_budget="50%", threads=1, ctx=128)
TEXT = " ".join(f"word {n * 7919 % 1009} and then" for n in range(200))
EXACT = Setting("exact", "true")
LOSSY = tuple(Setting(m, w) for m in ("speculate", "estimate", "hybrid") for w in WEIGHTS)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MoE model with its sidecar beside it."""
    path = build("bailingmoe", tmp_path_factory.mktemp("evaluate") / "moe.gguf")
    calibrate(path, sidecar_path(path), texts=[TEXT], tokens=256, held_out=64, threads=1)
    return path


def plan(path: Path, *settings: Setting, **more: object) -> Plan:
    given = {"text": TEXT, "tokens": 40, "window": 24, "prompt": 4, "generate": 6, **more}
    return Plan(path, OPTIONS, settings, **given)  # type: ignore[arg-type]


def test_every_lossy_mode_costs_something_and_the_same_at_every_budget(calibrated: Path) -> None:
    found = evaluate(plan(calibrated, EXACT, *LOSSY))
    exact, *lossy = found.rows
    other = replace(
        plan(calibrated, Setting("speculate", "true")),
        options=replace(OPTIONS, expert_budget="75%"),
    )
    again = evaluate(other)

    assert exact.text is not None
    assert (0.0, 0.0, 1.0) == (exact.text.kl.value, exact.text.kl_max, exact.text.top1.value)
    assert exact.text.ppl == exact.text.ppl_exact
    assert {6} == set(exact.same_tokens)
    assert [setting.name for setting in LOSSY] == [row.setting.name for row in lossy]
    for row in lossy:
        assert row.text is not None
        assert 40 == row.text.tokens
        assert row.text.kl.value > 0
        assert row.text.ppl_exact == exact.text.ppl_exact
    (same,) = (row for row in lossy if row.setting.name == "speculate/true")
    assert same == again.rows[0]


def test_a_report_is_json_and_names_its_text(calibrated: Path) -> None:
    found = json.loads(json.dumps(evaluate(plan(calibrated, EXACT)).to_json()))

    assert not found["text"]["held_out"]
    assert {
        "mode": "exact",
        "weights": "true",
        "kl_mean": 0.0,
        "kl_p999": 0.0,
        "top1": 1.0,
    }.items() <= (found["rows"][0].items())
    assert Report(Plan(calibrated, OPTIONS, (), held_out_text()), (), ()).to_json()["text"][
        "held_out"
    ]


def test_progress_ends_at_one(calibrated: Path) -> None:
    seen: list[float] = []
    evaluate(plan(calibrated, EXACT, items=(Item("one two", "three"),), max_tokens=2), seen.append)

    assert sorted(seen) == seen
    assert 1.0 == seen[-1]


def test_figures_go_into_the_sidecar_and_better_ones_stay(calibrated: Path) -> None:
    place = sidecar_path(calibrated)
    before = Sidecar.read(place, ModelMap.read(calibrated))
    report = evaluate(plan(calibrated, EXACT, Setting("speculate", "true")))

    assert ("speculate/true",) == keep(report)
    kept = Sidecar.read(place, ModelMap.read(calibrated))
    (_, row) = report.rows
    assert row.text is not None
    expected = Quality(
        float(np.float32(row.text.kl.value)), float(np.float32(row.text.top1.value)), 40
    )
    assert {"speculate/true": expected} == kept.quality
    np.testing.assert_array_equal(before.layers[1].counts, kept.layers[1].counts)

    worse = evaluate(plan(calibrated, Setting("speculate", "true"), tokens=10, generate=0))
    assert () == keep(worse)
    assert 40 == Sidecar.read(place, ModelMap.read(calibrated)).quality["speculate/true"].tokens
    assert ("speculate/true",) == keep(worse, replace_better=True)
    assert 10 == Sidecar.read(place, ModelMap.read(calibrated)).quality["speculate/true"].tokens


def test_lossy_modes_need_a_sidecar_and_experts_that_are_not_resident(
    tiny_model: TinyModel, calibrated: Path
) -> None:
    lossy = Setting("speculate", "true")
    with pytest.raises(OptionError, match="run `speculoe-local calibrate` first"):
        evaluate(plan(tiny_model("qwen3moe"), lossy))
    with pytest.raises(OptionError, match="100% keeps all experts resident"):
        evaluate(replace(plan(calibrated, lossy), options=replace(OPTIONS, expert_budget="100%")))


def test_an_optional_setting_that_a_model_has_not_is_left_out(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(setting: Setting, base: EngineOptions) -> EngineOptions:
        if setting.mode == "estimate":
            raise OptionError("no estimators")
        return replace(base, mode="exact")

    monkeypatch.setattr(Setting, "options", refuse)
    both = (Setting("estimate", "true"), Setting("speculate", "true"))
    found = evaluate(plan(calibrated, *both, optional=True))

    assert ["speculate/true"] == [row.setting.name for row in found.rows]
    assert [("estimate/true", "no estimators")] == [
        (skipped.setting.name, skipped.reason) for skipped in found.skipped
    ]
    with pytest.raises(OptionError, match="no estimators"):
        evaluate(plan(calibrated, *both))
    with pytest.raises(OptionError, match="no estimators"):
        evaluate(plan(calibrated, both[0], optional=True))


@pytest.mark.parametrize(
    ("more", "message"),
    [({"text": "ab"}, "the text has"), ({"window": 5}, "a window of 5 tokens scores none")],
)
def test_a_text_that_scores_nothing_is_refused(
    more: dict[str, object], message: str, calibrated: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        evaluate(plan(calibrated, EXACT, **more))


@pytest.mark.parametrize(("mode", "weights"), [("guess", "true"), ("speculate", "some")])
def test_an_unknown_setting_is_refused(mode: str, weights: str) -> None:
    with pytest.raises(OptionError, match="is not known; use some of"):
        Setting(mode, weights)
