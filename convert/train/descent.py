"""What is minimised, and how: the loss of one layer, and gradient descent that stops early.

The loss is KL(true router || estimator) over the logits that rank experts. It is sharpened where a
router hardly tells its experts apart (weights near 1/k): there the plain one is blind to who is picked.
Needs the extra `train` (torch). Knows pairs of arrays; nothing of models, text or files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from speculoe_local.convert.train.settings import Settings
from speculoe_local.convert.train.spool import Pairs
from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.routers import Gating

__all__ = ["Base", "Target", "descend", "divergence", "seeded", "without"]

SHARPNESS: Final = 1.0  # the least spread of a token's logits in the loss, as a standard deviation
_PATIENCE: Final = 3  # epochs without a better validation loss

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One layer to estimate. Of its `pairs` the first `n_train` rows are to learn from, the others say
    when to stop. `gating` and `bias` [n_expert] are its router's; `spread` is the typical standard
    deviation of a token's logits, `sharpness` what the loss multiplies logits by."""

    pairs: Pairs
    n_train: int
    gating: Gating
    bias: Floats | None
    spread: float
    sharpness: float

    @classmethod
    def of(cls, pairs: Pairs, n_train: int, gating: Gating, bias: Floats | None) -> Target:
        logits = pairs.logits[:n_train] if bias is None else pairs.logits[:n_train] + bias
        spread = float(np.median(logits.std(axis=1))) or 1.0
        return cls(pairs, n_train, gating, bias, spread, max(1.0, SHARPNESS / spread))

    @property
    def n_check(self) -> int:
        return len(self.pairs.x) - self.n_train

    def rows(self, which: slice | npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs float32 [n, n_embd] and true logits with bias [n, n_expert] of some rows."""
        x = torch.from_numpy(np.asarray(self.pairs.x[which], np.float32))
        logits = torch.from_numpy(np.array(self.pairs.logits[which]))
        return x, logits if self.bias is None else logits + torch.from_numpy(np.array(self.bias))

    def loss(self, truth: Tensor, guess: Tensor) -> Tensor:
        # A few tokens spread their logits a hundred times wider than others and would decide alone.
        wider = truth.std(-1, keepdim=True) / self.spread
        return divergence(truth, guess, self.gating, self.sharpness * 2 / (1 + wider))


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """What an estimator is added to: router `weights` [n_expert, n_embd], none for an estimator that
    stands alone, and `bias` [n_expert]. `name` is one of BASES, or "none"."""

    name: str
    weights: Tensor | None
    bias: Tensor

    @classmethod
    def of(cls, name: str, gate: Gate) -> Base:
        """`gate` as a base, under the name "none" its bias alone."""
        bias = np.zeros(gate.n_expert, np.float32) if gate.bias is None else gate.bias
        weights = None if name == "none" else torch.from_numpy(np.array(gate.router))
        return cls(name, weights, torch.from_numpy(np.array(bias)))

    def logits(self, x: Tensor) -> Tensor:
        """Logits of inputs [n, n_embd]: [n, n_expert], or the same [n_expert] for all."""
        return self.bias if self.weights is None else x @ self.weights.T + self.bias


def divergence(truth: Tensor, guess: Tensor, gating: Gating, sharpness: Tensor | float) -> Tensor:
    """Mean KL(truth || guess) in nats over the rows of two arrays of logits [n, n_expert], which
    `sharpness` [n, 1] multiplies.

    Where a gating judges each expert by itself, the sum over experts of the KL of its own yes or no.
    """
    truth, guess = truth * sharpness, guess * sharpness
    if gating in (Gating.SOFTMAX, Gating.SOFTMAX_WEIGHT):
        log_p, log_q = functional.log_softmax(truth, -1), functional.log_softmax(guess, -1)
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    p = torch.sigmoid(truth)
    cross = functional.binary_cross_entropy_with_logits(guess, p, reduction="none")
    entropy = functional.binary_cross_entropy_with_logits(truth, p, reduction="none")
    return (cross - entropy).sum(-1).mean()


def descend(
    parts: Sequence[Tensor],
    epoch: Callable[[], Iterable[Tensor]],
    check: Callable[[], float],
    settings: Settings,
    steps: int,
    progress: Callable[[float], None] | None = None,
) -> float:
    """Train `parts` by Adam on the losses of `epoch`, `steps` of them, until `check` gets no better.

    `parts` are left as they were where `check` was least, the beginning included; returns that. The
    rate falls to nothing along a cosine over all epochs.
    """
    optimiser = torch.optim.Adam(parts, lr=settings.rate, betas=(0.9, 0.99))
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: 0.5 * (1 + math.cos(math.pi * min(1.0, step / (steps * settings.epochs)))),
    )
    with torch.no_grad():
        least, best, waited = check(), [part.clone() for part in parts], 0
    for number in range(settings.epochs):
        for step, loss in enumerate(epoch()):
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            plan.step()
            if progress is not None:
                progress((number + (step + 1) / steps) / settings.epochs)
        with torch.no_grad():
            now = check()
            if now < least:
                least, best, waited = now, [part.clone() for part in parts], 0
            else:
                waited += 1
        if waited == _PATIENCE:
            break
    with torch.no_grad():
        for part, kept in zip(parts, best, strict=True):
            part.copy_(kept)
    return least


def without(x: Tensor, dropped: float, random: Any) -> Tensor:
    """`x` without a share of its numbers, drawn anew each time, and the others larger for it."""
    if not dropped:
        return x
    return x * (torch.rand(x.shape, generator=random) >= dropped) / (1 - dropped)


def seeded(*numbers: int) -> Any:
    """A torch generator that depends on all `numbers`."""
    (seed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed >> np.uint64(1)))
