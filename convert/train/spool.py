"""Pairs to learn from, on disk: what predicts a layer's router, and what that router then said.

A file of its own per layer, unlinked as soon as it is open: it is gone with the process, however that
ends, and memory holds no more than what the page cache can spare. Knows records of layers; nothing of
text, networks or what is learned.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from speculoe_local.convert.passes import Link, quasi_hidden
from speculoe_local.runtime.capture import LayerRecord
from speculoe_local.runtime.errors import OptionError

__all__ = ["Pairs", "Spool", "spool"]

_HALF_MAX: Final = float(np.finfo(np.float16).max)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Of one layer, row by row in the order of the text: `x` float16 [n, n_embd], the normed
    quasi-hidden state of the layer before, and `logits` float32 [n, n_expert] of the layer's own
    router, before any bias. Both are maps of a file."""

    x: npt.NDArray[np.float16]
    logits: Floats


class Spool:
    """Takes the records of all layers, window by window, and keeps pairs of those that are predicted."""

    def __init__(
        self,
        links: Sequence[Link],
        vectors: Mapping[int, npt.NDArray[Any]],
        pairs: dict[int, Pairs],
    ) -> None:
        """`vectors` [n_expert, n_embd] by block: the default vectors of each layer that predicts."""
        self._links = {link.target: link for link in links}
        self._vectors = vectors
        self._before: LayerRecord | None = None
        self._row = 0
        self.pairs = pairs

    def begin(self, row: int) -> None:
        """What follows is a window whose first token goes to `row`."""
        self._row, self._before = row, None

    def take(self, record: LayerRecord) -> None:
        before, self._before = self._before, record
        pairs, gate = self.pairs.get(record.block), self._links[record.block].usable
        if pairs is None or gate is None or before is None or before.residual is None:
            return
        x = gate.normed(quasi_hidden(before, self._vectors[before.block]))
        rows = slice(self._row, self._row + len(x))
        pairs.x[rows] = np.clip(x, -_HALF_MAX, _HALF_MAX)
        pairs.logits[rows] = record.logits


@contextmanager
def spool(
    links: Sequence[Link],
    vectors: Mapping[int, npt.NDArray[Any]],
    predicted: Sequence[int],
    n_rows: int,
    folder: Path,
) -> Iterator[Spool]:
    """Room for `n_rows` tokens of each layer in `predicted`, on the disk of `folder`, freed on leaving.

    Raises OptionError when that disk has less room.
    """
    gates = {link.target: gate for link in links if (gate := link.usable) is not None}
    chosen = [(block, gates[block]) for block in predicted]
    per_row = sum(2 * gate.n_embd + 4 * gate.n_expert for _, gate in chosen)
    free = shutil.disk_usage(folder).free
    if n_rows * per_row > free:
        raise OptionError(
            f"{n_rows} tokens take {n_rows * per_row} bytes of disk in {str(folder)!r}, {free} are free; "
            f"use --tokens {max(1, free // max(per_row, 1))} or fewer"
        )
    pairs: dict[int, Pairs] = {}
    try:
        for block, gate in chosen:
            with tempfile.TemporaryFile(dir=folder, prefix=".speculoe-train-") as file:
                begin = -(-n_rows * gate.n_embd * 2 // 64) * 64  # whatever the sizes, aligned
                x = np.memmap(file, np.float16, "w+", 0, (n_rows, gate.n_embd))
                logits = np.memmap(file, np.float32, "w+", begin, (n_rows, gate.n_expert))
            pairs[block] = Pairs(x, logits)
        yield Spool(links, vectors, pairs)
    finally:
        pairs.clear()
