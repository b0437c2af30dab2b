"""One network for all layers that follows their true routers (`runtime.mlp`): trained with torch.

Every batch has a few rows of each layer. Added to a base, it starts at nothing and ends no worse than
that on the rows it does not learn from. Needs the extra `train` (torch). Knows the layers' pairs and
bases; nothing of how bases were found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from speculoe_local.convert.train.descent import Base, Target, descend, seeded, without
from speculoe_local.convert.train.settings import Settings
from speculoe_local.runtime.estimators import rounded
from speculoe_local.runtime.mlp import MATRICES, NORM_EPS, SharedMlp, shapes

__all__ = ["Network", "fit_mlp"]

Floats = npt.NDArray[np.float32]
Rows = Any  # a slice, or int64 row numbers


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """What is shared, as the file will have it, and each layer's embedding [width] and scale."""

    shared: SharedMlp
    embeddings: Mapping[int, Floats]
    scales: Mapping[int, float]


def fit_mlp(
    targets: Mapping[int, Target],
    bases: Mapping[int, Base],
    n_expert: int,
    settings: Settings,
    progress: Callable[[float], None] | None = None,
) -> Network:
    """Train on all `targets`, by block, which have as many rows each; none has more than `n_expert`.
    What it says is added to what `bases` say."""
    blocks = sorted(targets)
    first = targets[blocks[0]]
    d, n_train, n_check = first.pairs.x.shape[1], first.n_train, first.n_check
    alone = all(bases[block].weights is None for block in blocks)
    random = seeded(settings.seed)
    width = max(1, d // settings.narrow)
    expected = shapes(d, width, width * settings.expand, n_expert)
    arrays = {name: _first(name, shape, alone, random) for name, shape in expected.items()}
    embedding = torch.randn(len(blocks), width, generator=random) * 0.02
    parts = [part.requires_grad_() for part in (*arrays.values(), embedding)]
    per_layer = max(1, settings.batch // len(blocks))
    steps = -(-n_train // per_layer)

    def loss(rows: Mapping[int, Rows], dropped: float) -> Tensor:
        pairs = [targets[block].rows(rows[block]) for block in blocks]
        n = len(pairs[0][0])
        xs = torch.cat([x for x, _ in pairs])
        inputs = without(xs, dropped, random)
        guesses = _forward(arrays, inputs, embedding.repeat_interleave(n, 0)).split(n)
        total = torch.zeros(())
        for block, guess, (x, truth) in zip(blocks, guesses, pairs, strict=True):
            target = targets[block]
            change = guess[:, : truth.shape[1]] * target.spread
            total = total + target.loss(truth, bases[block].logits(x) + change)
        return total / len(blocks)

    def epoch() -> Iterator[Tensor]:
        order = {block: torch.randperm(n_train, generator=random) for block in blocks}
        for at in range(0, n_train, per_layer):
            # In the order of the file, which is read from the disk if memory is short.
            rows = {b: order[b][at : at + per_layer].sort().values.numpy() for b in blocks}
            yield loss(rows, settings.dropped)

    def check() -> float:
        total = 0.0
        for at in range(n_train, n_train + n_check, per_layer):
            rows = slice(at, min(at + per_layer, n_train + n_check))
            total += float(loss(dict.fromkeys(blocks, rows), 0.0)) * (rows.stop - rows.start)
        return total / n_check

    descend(parts, epoch, check, settings, steps, progress)
    with torch.no_grad():
        found = {name: array.numpy() for name, array in arrays.items()}
        found |= {name: rounded(found[name]).astype(np.float32) for name in MATRICES}
        return Network(
            shared=SharedMlp(**found),
            embeddings={block: embedding[i].numpy().copy() for i, block in enumerate(blocks)},
            scales={block: float(np.float32(targets[block].spread)) for block in blocks},
        )


def _first(name: str, shape: tuple[int, ...], alone: bool, random: Any) -> Tensor:
    """Where an array starts: matrices so that sizes stay, `contract` at nothing, the norm at one; beside
    a base also the head at nothing."""
    if name == "norm":
        return torch.ones(shape)
    if name == "contract" or len(shape) == 1 or (name == "head" and not alone):
        return torch.zeros(shape)
    return torch.randn(shape, generator=random) / shape[1] ** 0.5


def _forward(net: Mapping[str, Tensor], x: Tensor, embedding: Tensor) -> Tensor:
    """Logits before scale and base [n, n_expert] of inputs [n, n_embd] and their layers' embeddings."""
    h = x @ net["narrow"].T + embedding
    inside = functional.silu(h @ net["expand"].T + net["expand_bias"])
    h = h + inside @ net["contract"].T + net["contract_bias"]
    h = functional.layer_norm(h, h.shape[-1:], net["norm"], net["norm_bias"], NORM_EPS)
    return h @ net["head"].T + net["head_bias"]
