"""Ranking leaves equals in the order in which ggml's own argsort leaves them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp import llama_cpp as _low

from speculoe_local.runtime.ranking import Floats, Ids, top_k


def function(name: str, result: Any, *arguments: Any) -> Any:
    found = _low._lib[name]  # a fresh object: prototypes set here do not reach other users
    found.restype, found.argtypes = result, arguments
    return found


class InitParams(ctypes.Structure):
    """struct ggml_init_params"""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


POINTER, LONG, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
DESCENDING = 1


def ggml_argsort(scores: Floats) -> Ids:
    """All ids per row, best first, by the CPU backend; float32 [rows, n]."""
    rows, n = scores.shape
    context = function("ggml_init", POINTER, InitParams)(InitParams(16 << 20, None, False))
    get_data = function("ggml_get_data", POINTER, POINTER)
    try:
        given = function("ggml_new_tensor_2d", POINTER, POINTER, INT, LONG, LONG)(
            context, 0, n, rows
        )
        ctypes.memmove(get_data(given), scores.ctypes.data, scores.nbytes)
        ranked = function("ggml_argsort", POINTER, POINTER, POINTER, INT)(
            context, given, DESCENDING
        )
        graph = function("ggml_new_graph", POINTER, POINTER)(context)
        function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, ranked)
        assert 0 == function("ggml_graph_compute_with_ctx", INT, POINTER, POINTER, INT)(
            context, graph, 1
        )
        ids = np.empty((rows, n), np.int32)
        ctypes.memmove(ids.ctypes.data, get_data(ranked), ids.nbytes)
        return ids
    finally:
        function("ggml_free", None, POINTER)(context)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 60, 64, 128, 256, 512])
@pytest.mark.parametrize("values", [1, 2, 3, 10, 1000])
def test_equal_scores_come_in_the_order_of_ggml(n: int, values: int) -> None:
    rng = np.random.default_rng(n * 1000 + values)
    scores = rng.integers(values, size=(40, n)).astype(np.float32)

    np.testing.assert_array_equal(ggml_argsort(scores), top_k(scores, n))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=70), st.data())
def test_the_best_few_are_the_first_of_all(values: list[int], data: st.DataObject) -> None:
    scores = np.array([values], np.float32)
    k = data.draw(st.integers(1, len(values)))

    np.testing.assert_array_equal(ggml_argsort(scores)[:, :k], top_k(scores, k))


def test_experts_ruled_out_come_last() -> None:
    scores = np.full((1, 64), -np.inf, np.float32)
    scores[0, [40, 3]] = 0.5, 0.25

    np.testing.assert_array_equal(ggml_argsort(scores), top_k(scores, 64))
    assert [40, 3] == top_k(scores, 2)[0].tolist()


def test_leading_dimensions_are_kept() -> None:
    scores = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    assert [[[3, 2]] * 3] * 2 == top_k(scores, 2).tolist()
