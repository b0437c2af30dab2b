"""Which sequence a new prompt continues from. Pure: sequences are values, nothing is copied or run here.

A context holds more sequences than run at a time; those that rest keep their tokens' KV. A prompt takes
over the resting sequence that it continues, or gets a copy of the part that it shares with any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Held", "Plan", "common", "plan"]

_STRIDE = 256
_LITTLE = 32  # tokens that are not worth a copy


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence of the context and what its KV stands for. `used` grows with each use."""

    id: int
    tokens: Sequence[int]
    busy: bool
    used: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Run the prompt in sequence `target`, from token `keep` on.

    `source` is what the first `keep` tokens are copied from, None where `target` holds them already; what
    else `target` holds goes. `lost` of its tokens are then held by none.
    """

    target: int
    keep: int
    source: int | None
    lost: int


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    at = 0
    while at < n and a[at : at + _STRIDE] == b[at : at + _STRIDE]:
        at += _STRIDE
    at = min(at, n)
    while at < n and a[at] == b[at]:
        at += 1
    return at


def plan(
    held: Sequence[Held], prompt: Sequence[int], *, whole_only: bool, worth_copying: int = 1
) -> Plan:
    """Where `prompt` runs. At least its last token is run again: its logits are what follows from.

    `whole_only`: a sequence cannot be shortened (recurrent state), so all of it is used or none. Fewer
    than `worth_copying` tokens are run again rather than copied. One of `held` must rest.
    """
    resting = [h for h in held if not h.busy]
    if not resting:
        raise ValueError("no sequence rests; free one first")
    shared = {h.id: _shared(h, prompt, whole_only) for h in held}
    best = max(held, key=lambda h: (shared[h.id], not h.busy, -len(h.tokens), h.used))
    keep = shared[best.id]
    oldest = min(resting, key=lambda h: (bool(h.tokens), h.used))
    if keep == 0:
        return Plan(oldest.id, 0, None, len(oldest.tokens))
    tail = len(best.tokens) - keep
    others = [h for h in resting if h.id != best.id]
    spare = min(others, key=lambda h: (bool(h.tokens), h.used), default=None)
    if not best.busy:
        little = tail <= max(_LITTLE, keep // 8)
        if little or spare is None or keep < worth_copying or len(spare.tokens) > tail:
            return Plan(best.id, keep, None, tail)
    if spare is None or keep < worth_copying:
        return _own(resting, shared, oldest)
    return Plan(spare.id, keep, best.id, len(spare.tokens))


def _own(resting: Sequence[Held], shared: dict[int, int], oldest: Held) -> Plan:
    """What a resting sequence can do without a copy, if it is little it costs."""
    best = max(resting, key=lambda h: (shared[h.id], -len(h.tokens), h.used))
    keep = shared[best.id]
    if keep and len(best.tokens) - keep <= max(_LITTLE, keep // 8):
        return Plan(best.id, keep, None, len(best.tokens) - keep)
    return Plan(oldest.id, 0, None, len(oldest.tokens))


def _shared(held: Held, prompt: Sequence[int], whole_only: bool) -> int:
    n = min(common(held.tokens, prompt), len(prompt) - 1)
    return 0 if whole_only and n < len(held.tokens) else n
