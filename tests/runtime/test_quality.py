"""Measures of quality are what their definitions say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.errors import BackendError, OptionError
from speculoe_local.runtime.quality import Position, compare, estimate, mcnemar, summarize

rows = st.lists(st.floats(-30, 30, width=32), min_size=5, max_size=5).map(
    lambda values: np.array(values, np.float32)
)


def logits(*shares: float) -> np.ndarray:
    """Logits of a distribution, shifted, since only differences of logits mean something."""
    return (np.log(np.array(shares)) + 3).astype(np.float32)


def test_kl_is_the_mean_of_the_log_ratio_under_the_exact_distribution() -> None:
    found = compare(logits(0.5, 0.25, 0.25), logits(0.25, 0.5, 0.25), target=1)

    assert 0.5 * math.log(2) + 0.25 * math.log(0.5) == pytest.approx(found.kl, rel=1e-5)
    assert -math.log(0.25) == pytest.approx(found.nll_exact, rel=1e-5)
    assert -math.log(0.5) == pytest.approx(found.nll, rel=1e-5)
    assert not found.agree


def test_kl_is_of_the_exact_run_to_the_other_and_not_the_other_way_round() -> None:
    sharp, flat = logits(0.98, 0.01, 0.01), logits(1 / 3, 1 / 3, 1 / 3)

    assert compare(sharp, flat, 0).kl < compare(flat, sharp, 0).kl


@settings(deadline=None)  # a busy machine is no failure
@given(rows)
def test_equal_rows_differ_by_nothing_at_all(row: np.ndarray) -> None:
    found = compare(row, row.copy(), 3)

    assert (0.0, True) == (found.kl, found.agree)
    assert found.nll_exact == found.nll


@settings(deadline=None)
@given(rows, rows, st.floats(-5, 5, width=16))
def test_kl_is_never_negative_and_ignores_a_shift(
    one: np.ndarray, other: np.ndarray, shift: float
) -> None:
    found = compare(one, other, 0)
    shifted = compare(one, other + np.float32(shift), 0)

    assert found.kl >= 0
    assert found.kl == pytest.approx(shifted.kl, abs=1e-4)


def test_a_token_that_is_ruled_out_by_both_costs_nothing() -> None:
    barred = np.array([1, 2, -np.inf], np.float32)
    changed = np.array([2, 1, -np.inf], np.float32)

    assert compare(barred[:2], changed[:2], 0).kl == pytest.approx(compare(barred, changed, 0).kl)


@pytest.mark.parametrize("row", [[1, math.nan], [-math.inf, -math.inf], [math.inf, 0]])
def test_a_row_that_is_no_distribution_is_refused(row: list[float]) -> None:
    with pytest.raises(BackendError, match="row of logits"):
        compare(np.array([0, 1], np.float32), np.array(row, np.float32), 0)


def test_a_summary_has_the_mean_the_tail_and_the_ratio_of_perplexities() -> None:
    positions = [Position(n / 1000, n % 4 > 0, 2.0, 2.0 + math.log(1.5)) for n in range(2001)]
    found = summarize(positions)

    assert 2001 == found.tokens
    assert found.kl.value == pytest.approx(1.0)
    assert (1.998, 2.0) == pytest.approx((found.kl_p999, found.kl_max))
    assert 1500 / 2001 == found.top1.value
    assert math.exp(2) == pytest.approx(found.ppl_exact.value)
    assert 1.5 * math.exp(2) == pytest.approx(found.ppl.value)
    assert found.ppl_ratio.value == pytest.approx(1.5)
    assert found.ppl_ratio.error == pytest.approx(0, abs=1e-9)


def test_json_has_every_mean_with_its_error_and_nothing_that_json_cannot_hold() -> None:
    found = summarize([Position(0.1, True, 1.0, math.inf)] * 3).to_json()

    assert {"kl_mean", "top1", "ppl", "ppl_exact", "ppl_ratio"} == found["se"].keys()
    assert {"kl_mean", "kl_p999", "kl_max", "top1", "ppl", "ppl_exact", "tokens"} < found.keys()
    assert (0.1, 3, None) == (found["kl_mean"], found["tokens"], found["se"]["kl_mean"])


def test_the_error_of_independent_values_is_the_textbook_one() -> None:
    values = np.random.default_rng(1).normal(5, 2, 40_000)

    assert 2 / 200 == pytest.approx(estimate(values).error, rel=0.2)


def test_neighbours_that_go_together_make_the_error_larger() -> None:
    independent = np.random.default_rng(1).normal(size=1000)
    repeated = np.repeat(independent, 10)

    assert estimate(independent).error == pytest.approx(estimate(repeated).error, rel=0.4)
    assert repeated.std() / math.sqrt(len(repeated)) < 0.5 * estimate(repeated).error


def test_nothing_scored_is_refused() -> None:
    with pytest.raises(OptionError, match="--tokens"):
        summarize([])


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 1, 1.0), (0, 5, 2 / 32), (1, 9, 22 / 1024), (9, 1, 22 / 1024)],
)
def test_mcnemar_counts_the_splits_that_are_at_least_as_uneven(
    lost: int, won: int, p: float
) -> None:
    assert p == pytest.approx(mcnemar(lost, won))
