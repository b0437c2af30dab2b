"""Which sequence a prompt continues from."""

from __future__ import annotations

import random

import pytest

from speculoe_local.server.batching.prefix import Held, Plan, common, plan


def held(number: int, tokens: list[int], *, busy: bool = False, used: int = 0) -> Held:
    return Held(number, tokens, busy, used)


def test_the_common_prefix_is_what_a_simple_loop_finds() -> None:
    draw = random.Random(3)
    for _ in range(300):
        a = [draw.randrange(2) for _ in range(draw.randrange(700))]
        b = a[: draw.randrange(len(a) + 1)] + [draw.randrange(2) for _ in range(draw.randrange(9))]
        expected = 0
        while expected < min(len(a), len(b)) and a[expected] == b[expected]:
            expected += 1

        assert expected == common(a, b)


def test_a_prompt_that_nobody_knows_takes_an_empty_sequence_before_a_used_one() -> None:
    found = plan([held(0, [9], used=1), held(1, [])], [1, 2, 3], whole_only=False)

    assert Plan(1, 0, None, 0) == found


def test_the_next_turn_takes_its_own_conversation_over() -> None:
    turn = list(range(100))
    found = plan([held(0, turn, used=5), held(1, [])], [*turn, 7, 8], whole_only=False)

    assert Plan(0, 100, None, 0) == found


def test_the_last_token_of_a_known_prompt_is_run_again() -> None:
    found = plan([held(0, [1, 2, 3]), held(1, [])], [1, 2, 3], whole_only=False)

    assert Plan(0, 2, None, 1) == found


def test_a_shared_preamble_is_copied_and_the_other_conversation_lives_on() -> None:
    preamble, rest = list(range(200)), [5] * 300
    sequences = [held(0, preamble + rest, used=9), held(1, [8, 8], used=2), held(2, [4], used=1)]

    found = plan(sequences, [*preamble, 1, 1], whole_only=False)

    assert Plan(2, 200, 0, 1) == found


def test_what_runs_is_copied_from_and_never_taken() -> None:
    sequences = [held(0, [1, 2, 3, 4], busy=True), held(1, [])]

    assert Plan(1, 3, 0, 0) == plan(sequences, [1, 2, 3, 9], whole_only=False)


def test_a_recurrent_state_is_used_whole_or_not_at_all() -> None:
    sequences = [held(0, [1, 2, 3]), held(1, [])]

    assert Plan(0, 3, None, 0) == plan(sequences, [1, 2, 3, 4], whole_only=True)
    assert Plan(1, 0, None, 0) == plan(sequences, [1, 2, 9, 4], whole_only=True)


def test_without_a_sequence_that_rests_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match="free one"):
        plan([held(0, [1], busy=True)], [1, 2], whole_only=False)
