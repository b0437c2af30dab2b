"""How often an expert is resident when it is asked for, by the share of experts that are: two curves.

`slots` for the engine's own policy, `pages` for a page cache, which drops what was used longest ago. Both
are interpolated between replays of a recorded routing trace. Knows no model and no machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["DEFAULT", "HitModel", "of_trace"]

_RESIDENCIES = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.40, 0.50, 0.60, 0.75, 0.90)
# `replay` of 72,443 tokens of gpt-oss-20b (148 prompts; 24 layers, 4 of 32 experts), one pool, the second
# half counted. tests/runtime/test_hits.py replays an excerpt.
_LEARNED = (0.253, 0.441, 0.574, 0.670, 0.748, 0.807, 0.891, 0.942, 0.972, 0.993, 0.999)
_LRU = (0.0, 0.0, 0.443, 0.505, 0.615, 0.705, 0.837, 0.917, 0.964, 0.992, 0.999)


@dataclass(frozen=True, slots=True)
class HitModel:
    """`learned` and `lru`: hit rates measured at `residencies`, all 0 to 1, of a model that uses the share
    `used` (k / E) of its experts per token. `origin` says where from."""

    residencies: tuple[float, ...]
    learned: tuple[float, ...]
    lru: tuple[float, ...]
    used: float
    origin: str

    def slots(self, residency: float) -> float:
        """Hit rate of the engine's policy with slots for this share of all experts."""
        return _between(residency, (0.0, *self.residencies, 1.0), (0.0, *self.learned, 1.0))

    def pages(self, residency: float, used: float) -> float:
        """Hit rate of a page cache that holds this share of the experts of a model with k / E = `used`.

        What is least recently used is dropped, so below the experts of one token (a share of `used`)
        nothing is ever found; above, the share of `slots` that it reaches depends on how many times that
        it holds (on Qwen3-30B-A3B with its finer experts it does within 8 points).
        """
        if residency >= 1:
            return 1.0
        found = [
            (held / self.used, lru / learned)
            for held, learned, lru in zip(self.residencies, self.learned, self.lru, strict=True)
            if held > self.used and learned > 0
        ]
        times = (1.0, *(x for x, _ in found))
        shares = (0.0, *(share for _, share in found))
        return self.slots(residency) * _between(residency / used, times, shares)


DEFAULT = HitModel(
    _RESIDENCIES,
    _LEARNED,
    _LRU,
    4 / 32,
    "a replay of 72,443 tokens of gpt-oss-20b, 4 of 32 experts",
)


def of_trace(path: Path) -> HitModel:
    """The curves of a recorded routing trace, see `replay.load_trace`; raises ModelError as that does."""
    from speculoe_local.runtime.replay import load_trace, replay

    trace = load_trace(path)
    tokens, layers, used = trace.ids.shape
    residencies = tuple(r for r in _RESIDENCIES if int(r * layers * trace.n_expert) >= used)
    rows = replay(trace, residencies=residencies, policies=("learned", "lru")).rows
    rates = {(row.policy, row.residency): row.hit_rate for row in rows if row.pool == "shared"}
    return HitModel(
        residencies,
        tuple(rates["learned", r] for r in residencies),
        tuple(rates["lru", r] for r in residencies),
        used / trace.n_expert,
        f"a replay of the {tokens} tokens of {trace.name}, {used} of {trace.n_expert} experts",
    )


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    return float(np.interp(x, xs, ys))
