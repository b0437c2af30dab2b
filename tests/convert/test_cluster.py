"""Balanced assignment keeps sizes and finds planted groups; a partition separates shared from bursty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from speculoe_local.convert.cluster import Shape, balanced_assignment, partition, top_mask


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 5).flatmap(lambda g: st.lists(st.integers(1, 9), min_size=g, max_size=g)),
    st.integers(0, 1000),
)
def test_every_group_gets_its_size_and_no_swap_would_help(sizes: list[int], seed: int) -> None:
    value = np.random.default_rng(seed).random((sum(sizes), len(sizes)))

    group = balanced_assignment(value, np.array(sizes))

    assert sizes == np.bincount(group, minlength=len(sizes)).tolist()
    rows = np.arange(len(group))
    now = value[rows, group]
    moved = value[:, group]  # [i, j]: value of row i in the group of row j
    gain = moved + moved.T - now[:, None] - now[None, :]
    assert gain.max(initial=0.0) <= 1e-6


def test_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes sum to 3, 4 rows to place"):
        balanced_assignment(np.zeros((4, 2)), np.array([1, 2]))


def planted(shape: Shape, tokens: int = 600) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Inputs and energies where each expert's neurons follow one direction of the input."""
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((tokens, 24)).astype(np.float32)
    energy = np.full((tokens, shape.neurons), 5.0, dtype=np.float32)
    for expert in range(shape.experts):
        active = np.maximum(inputs[:, expert], 0) ** 2
        first = shape.shared + expert * shape.width
        energy[:, first : first + shape.width] = active[:, None]
    energy *= rng.uniform(0.9, 1.1, energy.shape).astype(np.float32)
    return inputs, energy


def test_a_planted_partition_is_found() -> None:
    shape = Shape(shared=12, experts=4, width=6, used=1)
    inputs, energy = planted(shape)

    found = partition(inputs, energy, shape)

    assert (found.group[: shape.shared] == shape.experts).all()
    routed = found.group[shape.shared :].reshape(shape.experts, shape.width)
    assert (routed == routed[:, :1]).all()
    assert set(range(shape.experts)) == set(routed[:, 0].tolist())


def test_the_router_loses_less_than_picking_at_random() -> None:
    shape = Shape(shared=12, experts=4, width=6, used=1)
    inputs, energy = planted(shape)
    routed_share = energy[:, shape.shared :].sum() / energy.sum()

    assert partition(inputs, energy, shape).lost < 0.6 * 0.75 * routed_share


def test_top_mask_marks_the_largest() -> None:
    scores = np.array([[0.1, 0.9, 0.5], [3.0, 1.0, 2.0]])

    assert [[0, 1, 1], [1, 0, 1]] == top_mask(scores, 2).tolist()
