"""A pass over held-out text: how often each predictor names the experts that a layer then picks.

Knows records of layers and gates; nothing of where the gates come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from speculoe_local.convert.passes import Link, quasi_hidden
from speculoe_local.runtime.capture import LayerRecord
from speculoe_local.runtime.gate import Gate

__all__ = ["Score"]

Ids = npt.NDArray[np.int32]


class Score:
    """Counts by layer and predictor. `gates`, by block and name, are asked with the quasi-hidden state;
    `vectors` [n_expert, n_embd] by block are the default vectors that it is made of."""

    def __init__(
        self,
        links: Sequence[Link],
        vectors: Mapping[int, npt.NDArray[Any]],
        gates: Mapping[int, Mapping[str, Gate]],
    ) -> None:
        self._links = {link.target: link for link in links}
        self._vectors = vectors
        self._gates = gates
        self._before: LayerRecord | None = None
        self._counts: dict[tuple[int, str], npt.NDArray[np.int64]] = {}

    def begin(self) -> None:
        """What follows is another window."""
        self._before = None

    def take(self, record: LayerRecord) -> None:
        before, self._before = self._before, record
        self._count(record.block, "previous-token", record.ids[:-1], record.ids[1:])
        gate = self._links[record.block].usable
        if gate is None or before is None or before.residual is None:
            return
        residual = gate.normed(before.residual)
        self._count(record.block, "residual", gate.route(residual).ids, record.ids)
        x = gate.normed(quasi_hidden(before, self._vectors[before.block]))
        for who, asked in self._gates.get(record.block, {}).items():
            self._count(record.block, who, asked.route(x).ids, record.ids)

    def rates(self, block: int) -> tuple[dict[str, float], dict[str, float]]:
        """Recall, and precision of the single most certain expert, of each predictor."""
        recall, precision = {}, {}
        for (counted, who), (rows, wanted, found, top) in self._counts.items():
            if counted == block and rows:
                recall[who], precision[who] = float(found / wanted), float(top / rows)
        return recall, precision

    def _count(self, block: int, who: str, guess: Ids, truth: Ids) -> None:
        """Add to rows, experts wanted, experts found, and rows whose first guess was wanted."""
        right = (guess[:, :, None] == truth[:, None, :]).any(axis=2)
        counts = (len(truth), truth.size, int(right.sum()), int(right[:, 0].sum()))
        self._counts.setdefault((block, who), np.zeros(4, np.int64))[...] += counts
