"""How many tokens of whom make the next batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculoe_local.runtime import placement
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.server.batching.batches import decode_width, output_rows, share
from tests.models.fixtures import TinyModel


@given(st.lists(st.integers(1, 900), max_size=9), st.integers(1, 700))
def test_room_is_used_up_and_never_overdrawn(waiting: list[int], room: int) -> None:
    given_ = share(waiting, room)

    assert min(room, sum(waiting)) >= sum(given_)
    assert all(0 <= g <= w for g, w in zip(given_, waiting, strict=True))
    if waiting:
        assert min(room, sum(waiting)) - sum(given_) < len(waiting)


def test_a_short_prompt_is_not_held_up_by_a_long_one() -> None:
    assert [256, 20] == share([5000, 20], 276)
    assert [100, 100, 100] == share([1000, 1000, 1000], 300)
    assert [472, 20, 20] == share([5000, 20, 20], 512)


@pytest.mark.parametrize(("slots", "expected"), [(8, 4), (7, 3), (4, 2), (3, 1), (2, 1)])
def test_a_step_takes_as_many_answers_as_slots_can_serve(
    slots: int, expected: int, tiny_model: TinyModel
) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))  # 2 of 8 experts
    placed = placement.plan(model, placement.parse_budget("60%"))
    own = tuple(placement.Pool((i,), slots, 1) for i in range(4))

    assert expected == decode_width(model, replace(placed, pools=own), 4)
    assert 4 == decode_width(model, replace(placed, kind="resident", pools=()), 4)


def test_scored_prompts_ask_for_a_bounded_number_of_rows() -> None:
    assert 1 == output_rows(1 << 30)
    assert 100 < output_rows(151_936) < 130
