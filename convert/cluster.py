"""Which neurons belong together: a partition into one shared and E routed experts, found by alternation.

Two steps repeat: fit a linear router for the present experts, then give every neuron to the expert that
runs when the neuron matters, under exact sizes. The shared expert takes part as the one that always runs,
so it collects neurons that matter everywhere and leaves the bursty ones to the routed. Works on arrays
of one layer; knows nothing about models, files or torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDS = 5
RIDGE = 1e-2
_PRICE_STEPS = 200


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one layer's partition: `shared` neurons always on, `experts` of `width`, `used` per token."""

    shared: int
    experts: int
    width: int
    used: int

    @property
    def neurons(self) -> int:
        return self.shared + self.experts * self.width


@dataclass(frozen=True, slots=True)
class Partition:
    """`group` int [N]: expert of each neuron, `experts` for shared. `router` float32 [E, D].

    `lost`: share of the energy that sits, over the tokens, in experts the router did not pick.
    """

    group: NDArray[np.int64]
    router: NDArray[np.float32]
    lost: float


def balanced_assignment(
    value: NDArray[np.floating], sizes: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Group of each row of `value` [N, G] so that group g gets `sizes[g]` rows and the sum of values is large.

    Prices per group make demand meet sizes, a greedy pass in order of regret makes it exact, and swaps
    between pairs of groups improve it until none helps.
    """
    n, groups = value.shape
    sizes = np.asarray(sizes, dtype=np.int64)
    if sizes.sum() != n:
        raise ValueError(f"sizes sum to {sizes.sum()}, {n} rows to place")
    spread = float(value.std()) or 1.0
    price = np.zeros(groups)
    for step in range(_PRICE_STEPS):
        demand = np.bincount((value - price).argmax(axis=1), minlength=groups)
        excess = (demand - sizes) / np.maximum(sizes, 1)
        if not excess.any():
            break
        price += 0.3 * spread * np.clip(excess, -1, 1) / (1 + step / 10)
    net = value - price
    ranked = np.sort(net, axis=1)
    group = np.empty(n, dtype=np.int64)
    room = sizes.copy()
    for row in np.argsort(ranked[:, -2] - ranked[:, -1] if groups > 1 else ranked[:, -1]):
        group[row] = np.where(room > 0, net[row], -np.inf).argmax()
        room[group[row]] -= 1
    while _swap_round(value, group):
        pass
    return group


def _swap_round(value: NDArray[np.floating], group: NDArray[np.int64]) -> bool:
    changed = False
    groups = value.shape[1]
    # Gains below this are rounding, and would let two equal rows trade places for ever.
    least = 1e-9 * (float(np.abs(value).max()) or 1.0)
    for a in range(groups):
        for b in range(a + 1, groups):
            in_a, in_b = np.flatnonzero(group == a), np.flatnonzero(group == b)
            gain_a = value[in_a, b] - value[in_a, a]
            gain_b = value[in_b, a] - value[in_b, b]
            best_a, best_b = np.argsort(-gain_a), np.argsort(-gain_b)
            pairs = min(len(in_a), len(in_b))
            count = int((gain_a[best_a[:pairs]] + gain_b[best_b[:pairs]] > least).sum())
            group[in_a[best_a[:count]]] = b
            group[in_b[best_b[:count]]] = a
            changed = changed or count > 0
    return changed


def top_mask(scores: NDArray[np.floating], used: int) -> NDArray[np.float32]:
    """1 where a token's score [T, E] is among its `used` largest, else 0."""
    picked = np.argpartition(scores, -used, axis=1)[:, -used:]
    mask = np.zeros(scores.shape, dtype=np.float32)
    np.put_along_axis(mask, picked, 1.0, axis=1)
    return mask


def fit_router(inputs: NDArray[np.float32], target: NDArray[np.float32]) -> NDArray[np.float32]:
    """Ridge regression [E, D] from `inputs` [T, D] to `target` [T, E]."""
    gram = inputs.T @ inputs
    gram[np.diag_indices_from(gram)] += RIDGE * np.trace(gram) / len(gram)
    solved: NDArray[np.float32] = np.linalg.solve(gram, inputs.T @ target).T.astype(np.float32)
    return solved


def partition(
    inputs: NDArray[np.float32], energy: NDArray[np.float32], shape: Shape, seed: int = 0
) -> Partition:
    """Find the experts of one layer.

    inputs: float32 [T, D], the normed FFN inputs. energy: float32 [T, N], how much each neuron matters
    for each token. The best of ROUNDS alternations is returned; `seed` draws the first centres.
    """
    total = energy.sum(axis=0)
    sizes = np.array([shape.width] * shape.experts + [shape.shared])
    group = _first_groups(energy, shape, np.random.default_rng(seed))
    best: Partition | None = None
    for _ in range(ROUNDS + 1):
        per_expert = energy @ _membership(group, shape.experts)
        router = fit_router(inputs, np.sqrt(per_expert))
        mask = top_mask(inputs @ router.T, shape.used)
        lost = float(((1 - mask) * per_expert).sum() / total.sum())
        if best is None or lost < best.lost:
            best = Partition(group, router, lost)
        value = np.concatenate([energy.T @ mask, total[:, None]], axis=1)
        group = balanced_assignment(value, sizes)
    assert best is not None
    return best


def _membership(group: NDArray[np.int64], experts: int) -> NDArray[np.float32]:
    member: NDArray[np.bool_] = group[:, None] == np.arange(experts)
    return member.astype(np.float32)


def _first_groups(
    energy: NDArray[np.float32], shape: Shape, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The most important neurons shared, the rest by balanced k-means on when they are active."""
    group = np.full(shape.neurons, shape.experts, dtype=np.int64)
    rest = np.argsort(-energy.sum(axis=0), kind="stable")[shape.shared :]
    points = np.sqrt(energy[:, rest]).T
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    points -= points.mean(axis=0)
    centres = points[rng.permutation(len(rest))[: shape.experts]]
    sizes = np.full(shape.experts, shape.width)
    chosen = np.zeros(len(rest), dtype=np.int64)
    for _ in range(8):
        chosen = balanced_assignment(points @ centres.T, sizes)
        centres = _membership(chosen, shape.experts).T @ points
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    group[rest] = chosen
    return group
