"""Rank scores as ggml does, ties included: the order its CPU backend leaves them in.

`ggml_argsort_top_k` there is `std::sort` with `>` on the scores, which keeps the order of equals up
to 16 of them and not beyond. Written after GCC's library (bits/stl_algo.h), the one our builds use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["top_k"]

_SMALL = 16  # up to here std::sort is an insertion sort

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


def top_k(scores: Floats, k: int) -> Ids:
    """Ids of the `k` highest `scores` [..., n] per row, best first: int32 [..., k]. No NaN."""
    rows = scores.reshape(-1, scores.shape[-1])
    order = np.argsort(-rows, axis=1, kind="stable")
    if rows.shape[1] > _SMALL:
        best = np.take_along_axis(rows, order[:, : k + 1], axis=1)
        for tied in np.flatnonzero((best[:, 1:] == best[:, :-1]).any(axis=1)):
            order[tied] = _sorted(rows[tied].tolist())
    return order[:, :k].astype(np.int32).reshape(*scores.shape[:-1], k)


def _sorted(scores: list[float]) -> list[int]:
    """All ids, best first: quicksort down to runs of 16, then insertion sort over the whole.

    std::sort turns to heapsort at a depth that only a sequence made for it reaches; not here.
    """
    ids = list(range(len(scores)))

    def above(a: int, b: int) -> bool:
        return scores[ids[a]] > scores[ids[b]]

    def swap(a: int, b: int) -> None:
        ids[a], ids[b] = ids[b], ids[a]

    def median_to(first: int, a: int, b: int, c: int) -> None:
        if above(a, b):
            swap(first, b if above(b, c) else c if above(a, c) else a)
        else:
            swap(first, a if above(a, c) else c if above(b, c) else b)

    def partition(first: int, low: int, high: int) -> int:
        while True:
            while above(low, first):
                low += 1
            high -= 1
            while above(first, high):
                high -= 1
            if low >= high:
                return low
            swap(low, high)
            low += 1

    def loop(first: int, last: int) -> None:
        while last - first > _SMALL:
            median_to(first, first + 1, first + (last - first) // 2, last - 1)
            cut = partition(first, first + 1, last)
            loop(cut, last)
            last = cut

    loop(0, len(ids))
    return sorted(ids, key=lambda i: -scores[i])  # stable, as insertion is
