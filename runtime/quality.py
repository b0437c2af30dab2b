"""How far one way of running a model is from another, from the logits of both at the same positions.

Pure arithmetic in float64 on rows of logits. Knows nothing of engines, modes or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.errors import BackendError, OptionError

__all__ = [
    "Comparison",
    "Estimate",
    "Position",
    "common_prefix",
    "compare",
    "estimate",
    "log_softmax",
    "mcnemar",
    "summarize",
]

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Position:
    """One position of a text. `kl` is KL(exact || other) in nats over the whole vocabulary; `agree`:
    both have the same most likely token; `nll_exact` and `nll`: what the token that really follows
    costs each, in nats."""

    kl: float
    agree: bool
    nll_exact: float
    nll: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """`tokens` positions in all. KL in nats; `kl_p999` is exceeded by one position in a thousand;
    `top1` is a share, 0 to 1; `ppl` and `ppl_exact` are perplexities of the two on the same tokens,
    `ppl_ratio` the first over the second (its error is that of the paired difference, far below that
    of either)."""

    tokens: int
    kl: Estimate
    kl_p999: float
    kl_max: float
    top1: Estimate
    ppl: Estimate
    ppl_exact: Estimate
    ppl_ratio: Estimate

    def to_json(self) -> dict[str, Any]:
        """Flat, six significant digits; standard errors under `se`. What is not finite becomes None."""
        means = {
            "kl_mean": self.kl,
            "top1": self.top1,
            "ppl": self.ppl,
            "ppl_exact": self.ppl_exact,
            "ppl_ratio": self.ppl_ratio,
        }
        return {
            **{name: _rounded(found.value) for name, found in means.items()},
            "kl_p999": _rounded(self.kl_p999),
            "kl_max": _rounded(self.kl_max),
            "tokens": self.tokens,
            "se": {name: _rounded(found.error) for name, found in means.items()},
        }


def compare(exact: Floats, other: Floats, target: int) -> Position:
    """Compare two rows of logits [n_vocab]; `target` is the id of the token that follows.

    Equal rows give a KL of 0.0, not of almost 0. A logit of -inf rules a token out. Raises
    BackendError when a row holds a NaN or nothing finite: there is no distribution to compare.
    """
    p, q = log_softmax(exact), log_softmax(other)
    possible = p > -np.inf
    kl = float(np.sum(np.exp(p[possible]) * (p[possible] - q[possible])))
    return Position(
        kl=max(0.0, kl),  # rounding may leave -1e-17
        agree=int(exact.argmax()) == int(other.argmax()),
        nll_exact=-float(p[target]),
        nll=-float(q[target]),
    )


def summarize(positions: Sequence[Position]) -> Comparison:
    """Means over consecutive positions of a text. Raises OptionError without any."""
    if not positions:
        raise OptionError("no position was scored; give a longer text or more --tokens")
    kl = np.array([position.kl for position in positions])
    agree = np.array([float(position.agree) for position in positions])
    exact = np.array([position.nll_exact for position in positions])
    other = np.array([position.nll for position in positions])
    return Comparison(
        tokens=len(positions),
        kl=estimate(kl),
        kl_p999=float(np.quantile(kl, 0.999)),
        kl_max=float(kl.max()),
        top1=estimate(agree),
        ppl=_exponential(estimate(other)),
        ppl_exact=_exponential(estimate(exact)),
        ppl_ratio=_exponential(estimate(other - exact)),
    )


def estimate(values: Doubles) -> Estimate:
    """Mean of a series and its standard error, by batch means.

    Neighbouring tokens share their context, so they are not independent and the textbook error would be
    too small: means of sqrt(n) consecutive blocks are taken for independent instead (Flegal and Jones,
    "Batch means and spectral variance estimators in Markov chain Monte Carlo", 2010). The error of
    fewer than four values is unknown: NaN.
    """
    n = len(values)
    mean = float(values.mean())
    if n < 4:
        return Estimate(mean, math.nan)
    blocks = math.isqrt(n)
    means = np.array([block.mean() for block in np.array_split(values, blocks)])
    with np.errstate(invalid="ignore"):  # a token that one run rules out costs infinitely much
        return Estimate(mean, float(means.std(ddof=1)) / math.sqrt(blocks))


def mcnemar(lost: int, won: int) -> float:
    """Two-sided p of McNemar's exact test: `lost` items only the first got right, `won` only the second.

    The probability of a split at least as uneven, were both equally likely to be right.
    """
    n = lost + won
    tail = sum(math.comb(n, k) for k in range(min(lost, won) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences share from their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def log_softmax(logits: Floats) -> Doubles:
    """ln of the probabilities [n_vocab] that logits stand for; BackendError where they stand for none."""
    values = logits.astype(np.float64)
    peak = values.max()
    if not math.isfinite(peak):
        raise BackendError(f"a row of logits has {peak} as its maximum; the model file is damaged")
    values -= peak
    result: Doubles = values - math.log(np.exp(values).sum())
    return result


def _exponential(log: Estimate) -> Estimate:
    value = float(np.exp(min(log.value, 700.0)))  # beyond, float64 ends
    return Estimate(value, value * log.error)


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
