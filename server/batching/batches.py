"""How many tokens of whom make the next batch. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.placement import Placement

__all__ = ["decode_width", "output_rows", "share"]

_OUTPUT_BYTES = 64 << 20  # of logits that one batch of a scored prompt may fill


def share(waiting: Sequence[int], room: int) -> list[int]:
    """Divide `room` tokens among prompts of which `waiting` tokens are left: equal parts, and what a
    short one leaves goes to the others, so that short prompts are not held up by long ones."""
    given = [0] * len(waiting)
    left = room
    for done, i in enumerate(sorted(range(len(waiting)), key=lambda i: waiting[i])):
        given[i] = min(waiting[i], left // (len(waiting) - done))
        left -= given[i]
    return given


def decode_width(model: ModelMap, placed: Placement, parallel: int) -> int:
    """How many sequences one decode step may take so that all their experts fit into slots at once.

    A wider step would stream whole layers, as prompts do.
    """
    width = parallel
    if placed.kind != "slotted":
        return width
    for pool in placed.pools:
        for block in pool.layers:
            layer = model.layer(block)
            if pool.slots < layer.n_expert:
                width = min(width, pool.slots // layer.n_expert_used)
    return max(1, width)


def output_rows(n_vocab: int) -> int:
    """How many rows of logits one batch may ask for."""
    return max(1, _OUTPUT_BYTES // (4 * n_vocab))
