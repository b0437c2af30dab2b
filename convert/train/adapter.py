"""A low-rank change of one layer's router that follows the true router: trained with torch.

It starts at nothing, so the first validation loss is its base's, and it ends no worse than that. Needs
the extra `train` (torch). Knows one layer's pairs; nothing of other layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from speculoe_local.convert.train.descent import Base, Target, descend, seeded, without
from speculoe_local.convert.train.settings import Settings
from speculoe_local.runtime.estimators import Adapter, rounded

__all__ = ["fit_adapter", "loss_of"]

_CHUNK: Final = 4096  # rows looked at together where their order does not matter


def loss_of(target: Target, base: Base) -> float:
    """The loss of `base` on the rows not learned from."""
    total = 0.0
    with torch.no_grad():
        for at in range(target.n_train, len(target.pairs.x), _CHUNK):
            x, truth = target.rows(slice(at, at + _CHUNK))
            total += float(target.loss(truth, base.logits(x))) * len(x)
    return total / target.n_check


def fit_adapter(target: Target, base: Base, settings: Settings, block: int) -> Adapter:
    """Train what is added to `base`, a matrix and a bias."""
    n_rows, n_train = len(target.pairs.x), target.n_train
    n_expert, d = target.pairs.logits.shape[1], target.pairs.x.shape[1]
    random = seeded(settings.seed, block)
    rank = min(settings.rank, n_expert, d)
    up, shift = torch.zeros(n_expert, rank), torch.zeros(n_expert)
    down = torch.randn(rank, d, generator=random) / d**0.5
    parts = [part.requires_grad_() for part in (up, down, shift)]

    x = torch.from_numpy(
        np.array(target.pairs.x)
    )  # float16: half the memory of what is computed with
    start, truth = torch.empty(n_rows, n_expert), torch.empty(n_rows, n_expert)
    squares = 0.0
    for at in range(0, n_rows, _CHUNK):
        rows = slice(at, at + _CHUNK)
        some, truth[rows] = target.rows(rows)
        start[rows] = base.logits(some)
        squares += float(some.double().square().sum())
    size = (squares / x.numel()) ** 0.5 or 1.0  # so that one rate fits every model

    def loss(rows: Tensor | slice, dropped: float) -> Tensor:
        inputs = without(x[rows].float() / size, dropped, random)
        change = inputs @ down.T @ up.T + shift
        return target.loss(truth[rows], start[rows] + change / target.sharpness)

    def epoch() -> Iterator[Tensor]:
        for rows in torch.randperm(n_train, generator=random).split(settings.batch):
            yield loss(rows, settings.dropped)

    steps = -(-n_train // settings.batch)
    descend(parts, epoch, lambda: float(loss(slice(n_train, None), 0.0)), settings, steps)
    with torch.no_grad():
        return Adapter(
            up=rounded((up / target.sharpness).numpy()),
            down=rounded((down / size).numpy()),
            bias=(shift / target.sharpness).numpy(),
            base=base.name,
        )
