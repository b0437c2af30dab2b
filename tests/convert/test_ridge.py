"""Ridge regression from sums finds what made the data, and penalises what did not."""

from __future__ import annotations

import numpy as np
import pytest

from speculoe_local.convert.ridge import Normal, normal, solve


def sums(
    x: np.ndarray, y: np.ndarray, pieces: int = 3, weights: np.ndarray | None = None
) -> Normal:
    found = normal(x.shape[1], y.shape[1])
    weights = np.ones(len(x)) if weights is None else weights
    for rows in np.array_split(np.arange(len(x)), pieces):
        parts = (array[rows].astype(np.float32) for array in (x, y, weights))
        found.add(*parts)
    return found


def test_a_linear_map_with_intercept_is_recovered() -> None:
    rng = np.random.default_rng(0)
    weights, intercept = rng.normal(size=(5, 12)), rng.normal(size=5) * 10
    x = rng.normal(size=(400, 12)) * rng.uniform(0.1, 3, 12) + 1
    y = x @ weights.T + intercept

    found = solve(sums(x[:300], y[:300]), sums(x[300:], y[300:]))

    assert found is not None
    np.testing.assert_allclose(found[0], weights, atol=0.02)
    np.testing.assert_allclose(found[1], intercept, atol=0.05)
    assert 1e-4 == found[2]


def test_noise_without_a_signal_gets_a_large_penalty_and_small_weights() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(60, 40)), rng.normal(size=(60, 3))

    found = solve(sums(x[:45], y[:45]), sums(x[45:], y[45:]))

    assert found is not None
    assert found[2] >= 1
    assert np.abs(found[0]).max() < 0.2


def test_fewer_rows_than_features_and_no_rows_to_check_still_solve() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(4, 20)), rng.normal(size=(4, 2))

    found = solve(sums(x, y, 1), normal(20, 2))

    assert found is not None
    assert np.isfinite(found[0]).all()
    assert 10.0 == found[2]


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_sums_that_are_empty_or_not_finite_have_no_solution(value: float) -> None:
    assert solve(normal(3, 2), normal(3, 2)) is None
    broken = normal(3, 2)
    broken.gram[3, 3] = 1
    broken.cross[0, 0] = value

    assert solve(broken, normal(3, 2)) is None


def test_the_last_fit_is_on_both_parts() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(50, 4)), rng.normal(size=(50, 2))

    found = solve(sums(x[:30], y[:30]), sums(x[30:], y[30:]), penalties=[0.1])
    whole = solve(sums(x, y), normal(4, 2), penalties=[0.1])

    assert found is not None
    assert whole is not None
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-5)


def test_pieces_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(64, 6)), rng.normal(size=(64, 2))

    one, many = sums(x, y, 1), sums(x, y, 16)

    assert 64 == one.gram[-1, -1] == many.gram[-1, -1]
    np.testing.assert_allclose(one.gram, many.gram, rtol=1e-5, atol=1e-4)


def test_a_row_of_weight_two_counts_as_four_of_weight_one() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=(9, 2))
    weights = np.where(np.arange(9) == 4, 2.0, 1.0)
    again = [*range(9), 4, 4, 4]

    weighed = solve(sums(x, y, weights=weights), normal(3, 2))
    repeated = solve(sums(x[again], y[again]), normal(3, 2))

    assert weighed is not None
    assert repeated is not None
    np.testing.assert_allclose(weighed[0], repeated[0], atol=1e-6)
