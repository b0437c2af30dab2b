"""What each layer's experts are doing, for the page: uploads and stalls per layer, over the last moments.

Made of the engine's spans, which it keeps from the first look on, as many as fit: whoever stops looking
costs one comparison per upload. Knows no HTTP.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass

from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.placement import Placement
from speculoe_local.runtime.slots import ExpertSlots
from speculoe_local.server.jobs import LayerView

__all__ = ["LayerWatch"]

_CAPACITY = 1 << 16  # spans of a second or so, at 40 bytes each
_MEMORY_S = 20.0  # what happened that long ago counts a third
_FORGET_S = 10.0  # a look after a longer pause begins anew
_STALL, _DEMAND, _PREDICTED = 1, 2, 3  # spo_span_kind


@dataclass(slots=True)
class _Tally:
    demand: float = 0.0
    predicted: float = 0.0
    stall_ns: float = 0.0


class LayerWatch:
    """Looks at one engine. `read` may be called from any thread while the engine lives."""

    def __init__(self, slots: ExpertSlots, model: ModelMap, placed: Placement) -> None:
        self._slots = slots
        self._layers = {layer.index: layer for layer in model.layers}
        self._used = sum(layer.n_expert_used for layer in model.layers)
        # Pools are shared by their layers: each is shown with its equal part.
        self._shares = {
            index: pool.slots / len(pool.layers) for pool in placed.pools for index in pool.layers
        }
        self._lock = threading.Lock()
        self._tallies = {index: _Tally() for index in self._layers}
        self._requests = 0.0
        self._seen = 0
        self._looked = -math.inf

    def read(self) -> tuple[LayerView, ...]:
        """Per layer, since about `_MEMORY_S` ago. Starts to count at the first call."""
        with self._lock:
            now = time.monotonic()
            total = self._slots.stats().requests
            if now - self._looked > _FORGET_S:
                self._slots.start_trace(_CAPACITY)
                self._tallies = {index: _Tally() for index in self._layers}
                self._requests = 0.0
            else:
                self._fade(math.exp((self._looked - now) / _MEMORY_S))
                self._requests += total - self._seen
                self._add()
            self._seen, self._looked = total, now
            return tuple(self._view(block, tally) for block, tally in self._tallies.items())

    def _fade(self, factor: float) -> None:
        self._requests *= factor
        for tally in self._tallies.values():
            tally.demand *= factor
            tally.predicted *= factor
            tally.stall_ns *= factor

    def _add(self) -> None:
        for span in self._slots.take_trace(_CAPACITY):
            tally = self._tallies.get(span.block)
            if tally is None:
                continue
            # Experts are copied matrix by matrix.
            if span.kind == _DEMAND:
                tally.demand += 1 / len(self._layers[span.block].matrices)
            elif span.kind == _PREDICTED:
                tally.predicted += 1 / len(self._layers[span.block].matrices)
            elif span.kind == _STALL:
                tally.stall_ns += span.end_ns - span.begin_ns

    def _view(self, block: int, tally: _Tally) -> LayerView:
        layer = self._layers[block]
        requests = self._requests * layer.n_expert_used / self._used
        hit_rate = max(0.0, 1 - tally.demand / requests) if requests else None
        return LayerView(
            block=block,
            n_expert=layer.n_expert,
            slots=self._shares.get(block, float(layer.n_expert)),
            demand=tally.demand,
            predicted=tally.predicted,
            stall_ms=tally.stall_ns / 1e6,
            hit_rate=hit_rate,
        )
