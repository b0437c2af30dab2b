"""The sequences of a context, checked against a memory that knows which tokens it really holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculoe_local.server.batching.prefix import common
from speculoe_local.server.batching.sequences import Sequences


class FakeMemory:
    """Holds tokens where a context holds their KV."""

    def __init__(self, n: int, *, whole_only: bool = False, room: int = 10**9) -> None:
        self.held: list[list[int]] = [[] for _ in range(n)]
        self._whole_only = whole_only
        self._room = room

    def forget(self, position: int, sequence: int = 0) -> bool:
        held = self.held[sequence]
        if self._whole_only and 0 < position < len(held):
            return False
        del held[position:]
        return True

    def copy(self, source: int, target: int) -> None:
        assert not self.held[target]
        self.held[target] = list(self.held[source])

    def state(self, sequence: int) -> np.ndarray:
        return np.asarray(self.held[sequence], np.uint8)

    def restore(self, sequence: int, data: np.ndarray) -> bool:
        assert not self.held[sequence]
        if sum(map(len, self.held)) + len(data) > self._room:
            return False
        self.held[sequence] = data.tolist()
        return True


def test_a_resting_sequence_is_a_cache_until_it_is_needed() -> None:
    memory = FakeMemory(2)
    sequences = Sequences(memory, 2, whole_only=False)
    first, held, _ = sequences.place([1, 2, 3, 4], reuse=True)
    assert 0 == held
    memory.held[first] += [1, 2, 3, 4]
    sequences.extend(first, [1, 2, 3, 4])
    sequences.release(first, keep=True)

    number, held, source = sequences.place([1, 2, 3, 4, 5], reuse=True)

    assert (first, 4, None) == (number, held, source)
    assert 4 == sequences.n_tokens


def test_what_must_not_be_reused_is_not() -> None:
    memory = FakeMemory(1)
    sequences = Sequences(memory, 1, whole_only=False)
    number, _, _ = sequences.place([1, 2], reuse=True)
    memory.held[number] += [1, 2]
    sequences.extend(number, [1, 2])
    sequences.release(number, keep=True)

    assert (0, 0, None) == sequences.place([1, 2, 3], reuse=False)
    assert [[]] == memory.held


def test_a_state_comes_back_and_makes_room_for_itself() -> None:
    memory = FakeMemory(3, room=10)
    sequences = Sequences(memory, 3, whole_only=False)
    number, _, _ = sequences.place([9] * 6, reuse=True)
    memory.held[number] += [9] * 6
    sequences.extend(number, [9] * 6)
    sequences.release(number, keep=True)

    assert sequences.restore([1, 2, 3, 4, 5], np.asarray([1, 2, 3, 4, 5], np.uint8))

    assert [[1, 2, 3, 4, 5]] == [held for held in memory.held if held]
    assert 5 == sequences.known([1, 2, 3, 4, 5, 6])


@given(st.data(), st.booleans(), st.sampled_from([1, 3]))
def test_what_is_said_to_be_held_is_held(
    data: st.DataObject, whole_only: bool, worth_copying: int
) -> None:
    n = 3
    memory = FakeMemory(n, whole_only=whole_only)
    sequences = Sequences(memory, n, whole_only=whole_only, worth_copying=worth_copying)
    busy: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        if len(busy) < n and data.draw(st.booleans()):
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
            number, held, _ = sequences.place(prompt, reuse=data.draw(st.booleans()))
            assert number not in busy
            assert held == common(memory.held[number], prompt) == len(memory.held[number])
            assert held < len(prompt)
            memory.held[number] += prompt[held:]
            sequences.extend(number, prompt[held:])
            busy[number] = prompt
        elif busy:
            number = data.draw(st.sampled_from(sorted(busy)))
            del busy[number]
            sequences.release(number, keep=data.draw(st.booleans()))
        elif data.draw(st.booleans()):
            sequences.evict()
        for i in range(n):
            assert memory.held[i] == sequences.tokens(i)
        for number, prompt in busy.items():
            assert prompt == memory.held[number]


def test_eviction_takes_what_was_used_longest_ago_and_never_what_runs() -> None:
    memory = FakeMemory(3)
    sequences = Sequences(memory, 3, whole_only=False)
    numbers = []
    for value in (1, 2, 3):
        number, _, _ = sequences.place([value] * 3, reuse=True)
        memory.held[number] += [value] * 3
        sequences.extend(number, [value] * 3)
        numbers.append(number)
    sequences.release(numbers[1], keep=True)
    sequences.release(numbers[0], keep=True)

    assert sequences.evict()
    assert [] == memory.held[numbers[1]]
    assert sequences.evict()
    assert not sequences.evict()
    assert [3, 3, 3] == memory.held[numbers[2]]


def test_all_busy_is_an_error_of_the_caller() -> None:
    sequences = Sequences(FakeMemory(1), 1, whole_only=False)
    sequences.place([1], reuse=True)

    with pytest.raises(ValueError, match="rests"):
        sequences.place([2], reuse=True)
