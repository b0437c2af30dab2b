"""The hit curves are those of the engine's own policy on a real routing trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speculoe_local.runtime.hits import DEFAULT, of_trace

TRACE = Path(__file__).parent.parent / "data" / "gpt-oss-20b-excerpt.npz"


def test_the_built_in_curve_is_what_a_replay_of_the_trace_gives(tmp_path):
    with np.load(TRACE) as arrays:
        np.savez(tmp_path / "start.npz", ids=arrays["ids"][:1200], meta=arrays["meta"])
    replayed = of_trace(tmp_path / "start.npz")

    assert (4 / 32, DEFAULT.residencies) == (replayed.used, replayed.residencies)
    assert DEFAULT.learned == pytest.approx(replayed.learned, abs=0.03)
    assert DEFAULT.lru == pytest.approx(replayed.lru, abs=0.07)  # it depends more on the text
    assert "1200 tokens of start.npz" in replayed.origin


def test_both_curves_grow_from_nothing_to_everything():
    grid = [step / 50 for step in range(51)]
    slots = [DEFAULT.slots(r) for r in grid]
    pages = [DEFAULT.pages(r, 8 / 128) for r in grid]

    assert (0, 1) == (slots[0], slots[-1])
    assert (0, 1) == (pages[0], pages[-1])
    assert sorted(slots) == slots
    assert sorted(pages) == pages


@pytest.mark.parametrize("used", [4 / 128, 8 / 128, 4 / 32, 2 / 8])
def test_a_page_cache_never_beats_slots_and_finds_nothing_below_one_token(used):
    assert 0 == DEFAULT.pages(used * 0.99, used)
    for step in range(1, 51):
        assert DEFAULT.pages(step / 50, used) <= DEFAULT.slots(step / 50)
