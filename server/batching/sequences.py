"""The sequences of a context and whose KV they hold: found, copied, shortened and given up here.

For the worker thread alone. Knows tokens, nothing of answers or requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from speculoe_local.server.batching.prefix import Held, Plan, common, plan

__all__ = ["Memory", "Sequences"]


class Memory(Protocol):
    """What is used of runtime.llama.Context."""

    def forget(self, position: int, sequence: int = 0) -> bool: ...
    def copy(self, source: int, target: int) -> None: ...
    def state(self, sequence: int) -> npt.NDArray[np.uint8]: ...
    def restore(self, sequence: int, data: npt.NDArray[np.uint8]) -> bool: ...


@dataclass(slots=True)
class _Sequence:
    id: int
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    used: int = 0
    shared: int = 0  # tokens whose cells came as a copy


class Sequences:
    """`n` sequences, of which those that rest are a cache. `whole_only`: they cannot be shortened.

    `worth_copying`: from how many tokens on a prefix is copied from one to another.
    """

    def __init__(self, memory: Memory, n: int, *, whole_only: bool, worth_copying: int = 1) -> None:
        self._memory = memory
        self._all = [_Sequence(i) for i in range(n)]
        self._whole_only = whole_only
        self._worth_copying = worth_copying
        self._clock = itertools.count(1)

    def place(self, prompt: Sequence[int], *, reuse: bool) -> tuple[int, int, int | None]:
        """A sequence for `prompt`, busy from now on: its number, the tokens of `prompt` it holds already,
        and the sequence that these were copied from, if any. One must rest."""
        if not reuse:
            resting = [s for s in self._all if not s.busy]
            chosen = min(resting, key=lambda s: (bool(s.tokens), s.used))
            self._shorten(chosen, 0)
            return self._take(chosen), 0, None
        found = self._plan(prompt)
        target = self._all[found.target]
        if found.source is None:
            self._shorten(target, found.keep)
        else:
            source = self._all[found.source]
            source.used = next(self._clock)
            self._shorten(target, 0)
            self._memory.copy(source.id, target.id)
            target.tokens = list(source.tokens)
            self._shorten(target, found.keep)
            target.shared = len(target.tokens)
        return self._take(target), len(target.tokens), found.source

    def known(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` some sequence holds."""
        return max(common(s.tokens, prompt) for s in self._all)

    def tokens(self, number: int) -> list[int]:
        """What the sequence's KV stands for."""
        return self._all[number].tokens

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """`tokens` have been run behind what it holds."""
        self._all[number].tokens += tokens

    def truncate(self, number: int) -> int:
        """Drop what a failed batch may have left behind; how many tokens are held now."""
        sequence = self._all[number]
        self._shorten(sequence, len(sequence.tokens))
        return len(sequence.tokens)

    def drop(self, number: int) -> None:
        """Forget all it holds."""
        self._shorten(self._all[number], 0)

    def release(self, number: int, *, keep: bool) -> None:
        """Its answer is done; with `keep` what it holds stays for the next one."""
        sequence = self._all[number]
        sequence.busy = False
        sequence.used = next(self._clock)
        if not keep:
            self._shorten(sequence, 0)

    def evict(self) -> bool:
        """Give up the resting sequence that was used longest ago. False: none holds anything."""
        resting = [s for s in self._all if not s.busy and s.tokens]
        if not resting:
            return False
        self._shorten(min(resting, key=lambda s: s.used), 0)
        return True

    def state(self, number: int) -> npt.NDArray[np.uint8]:
        """What it holds, as bytes."""
        return self._memory.state(number)

    def restore(self, tokens: Sequence[int], state: npt.NDArray[np.uint8]) -> bool:
        """Let a resting sequence hold `tokens` again. False: there was no room, or no sense in `state`."""
        resting = [s for s in self._all if not s.busy]
        if not resting:
            return False
        target = min(resting, key=lambda s: (bool(s.tokens), s.used))
        self._shorten(target, 0)
        while not self._memory.restore(target.id, state):
            self._memory.forget(0, target.id)
            if not self.evict():
                return False
        target.tokens = list(tokens)
        target.used = next(self._clock)
        return True

    def resting(self) -> list[tuple[int, list[int]]]:
        """Number and tokens of those that rest, last used first."""
        found = [s for s in self._all if not s.busy and s.tokens]
        return [(s.id, s.tokens) for s in sorted(found, key=lambda s: -s.used)]

    @property
    def n_tokens(self) -> int:
        """Tokens held, those that came as a copy counted once."""
        return sum(len(s.tokens) - min(s.shared, len(s.tokens)) for s in self._all)

    def _plan(self, prompt: Sequence[int]) -> Plan:
        held = [Held(s.id, s.tokens, s.busy, s.used) for s in self._all]
        return plan(held, prompt, whole_only=self._whole_only, worth_copying=self._worth_copying)

    def _take(self, sequence: _Sequence) -> int:
        sequence.busy = True
        sequence.used = next(self._clock)
        return sequence.id

    def _shorten(self, sequence: _Sequence, n: int) -> None:
        """Keep the first `n` tokens, or none where that is not possible."""
        if not self._memory.forget(n, sequence.id):
            n = 0
            self._memory.forget(0, sequence.id)
        del sequence.tokens[n:]
        sequence.shared = min(sequence.shared, n)
