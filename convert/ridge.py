"""Ridge regression from sums alone: rows stream by and are not kept.

Pure arithmetic; knows nothing of models. The intercept is not penalised. The penalty is chosen among
`PENALTIES` by the squared error on sums of other rows, which is exact without those rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["PENALTIES", "Normal", "normal", "solve"]

# As a share of the mean diagonal of `gram` without the intercept.
PENALTIES: Final = (1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 10.0)

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Normal:
    """Normal equations of y [n, m] on x [n, d] and 1: `gram` float64 [d + 1, d + 1], `cross`
    float64 [d + 1, m]. The last row and column are the intercept's."""

    gram: Doubles
    cross: Doubles

    @property
    def is_empty(self) -> bool:
        return bool(self.gram[-1, -1] == 0)

    def add(
        self,
        x: npt.NDArray[np.float32],
        y: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32],
    ) -> None:
        """Add rows x float32 [n, d] and y float32 [n, m], whose errors are multiplied by `weights` [n].

        Sums within a call are float32, over calls float64.
        """
        ones = np.concatenate([x, np.ones((len(x), 1), np.float32)], axis=1) * weights[:, None]
        self.gram[...] += ones.T @ ones
        self.cross[...] += ones.T @ (y * weights[:, None])


def normal(d: int, m: int) -> Normal:
    """Empty sums for `d` features and `m` targets."""
    return Normal(np.zeros((d + 1, d + 1)), np.zeros((d + 1, m)))


def solve(
    fit: Normal, check: Normal, penalties: Iterable[float] = PENALTIES
) -> tuple[Doubles, Doubles, float] | None:
    """Weights [m, d], intercepts [m] and the penalty whose fit on `fit` errs least on `check`.

    The weights are of a last fit on both. With an empty `check` the largest penalty is taken; None
    when `fit` is empty or what it holds is not finite.
    """
    both = Normal(fit.gram + check.gram, fit.cross + check.cross)
    if fit.is_empty or not (np.isfinite(both.gram).all() and np.isfinite(both.cross).all()):
        return None
    best = max(penalties)
    if not check.is_empty:
        best = min(penalties, key=lambda penalty: _error(_solve(fit, penalty), check))
    solution = _solve(both, best)
    return solution[:-1].T, solution[-1], best


def _solve(sums: Normal, penalty: float) -> Doubles:
    d = len(sums.gram) - 1
    scale = np.trace(sums.gram[:d, :d]) / max(d, 1) or 1.0
    damped = sums.gram.copy()
    damped[np.arange(d), np.arange(d)] += penalty * scale
    solution: Any = np.linalg.solve(damped, sums.cross)
    return np.asarray(solution, np.float64)


def _error(solution: Doubles, sums: Normal) -> float:
    """Squared error of `solution` over the rows in `sums`, less what no solution changes."""
    return float(np.sum(solution * (sums.gram @ solution - 2 * sums.cross)))
