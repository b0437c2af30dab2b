"""The network in a router's place: numpy and native agree with the definition, and with each other."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.gating import Gate, Gating, NativeGate
from speculoe_local.runtime.mlp import Mlp, SharedMlp, shapes

Floats = npt.NDArray[np.float32]


def network(
    rng: np.random.Generator, d: int, w: int, h: int, n_expert: int, adds: bool = False
) -> Mlp:
    """One of random numbers that no layer makes vanish."""
    arrays = {
        name: rng.normal(scale=(shape[-1] if len(shape) > 1 else 1) ** -0.5, size=shape)
        for name, shape in shapes(d, w, h, n_expert).items()
    }
    shared = SharedMlp(**{name: array.astype(np.float32) for name, array in arrays.items()})
    return Mlp(shared, rng.normal(size=w).astype(np.float32), 1.5, adds)


def naive_logits(mlp: Mlp, x: Floats, n_expert: int) -> list[float]:
    """The definition for one token, number by number."""
    net = mlp.shared

    def row(matrix: Floats, index: int, inputs: list[float]) -> float:
        return sum(float(matrix[index, i]) * value for i, value in enumerate(inputs))

    inputs = [float(value) for value in x]
    state = [row(net.narrow, i, inputs) + float(mlp.embedding[i]) for i in range(net.width)]
    inside = [row(net.expand, i, state) + float(net.expand_bias[i]) for i in range(net.hidden)]
    inside = [value / (1 + math.exp(-value)) for value in inside]
    state = [
        state[i] + row(net.contract, i, inside) + float(net.contract_bias[i])
        for i in range(net.width)
    ]
    mean = sum(state) / net.width
    variance = sum((value - mean) ** 2 for value in state) / net.width
    state = [
        (value - mean) / math.sqrt(variance + 1e-5) * float(net.norm[i]) + float(net.norm_bias[i])
        for i, value in enumerate(state)
    ]
    return [1.5 * (row(net.head, e, state) + float(net.head_bias[e])) for e in range(n_expert)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Gate, Floats]:
    """A gate with a random network for at least as many experts, and residuals [3, n_embd]."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_expert, d = draw(st.integers(1, 20)), draw(st.integers(1, 40))
    w, h = draw(st.integers(2, 35)), draw(st.integers(1, 35))
    bias = rng.normal(size=n_expert).astype(np.float32) if draw(st.booleans()) else None
    adds = draw(st.booleans())
    router = rng.normal(size=(n_expert, d)).astype(np.float32)
    gate = Gate(
        router=router if adds else router * np.float32(np.nan),  # or not to be looked at
        norm=rng.normal(loc=1, scale=0.1, size=d).astype(np.float32),
        n_used=draw(st.integers(1, n_expert)),
        gating=draw(st.sampled_from(Gating)),
        bias=bias,
        norm_weights=draw(st.booleans()),
        mlp=network(rng, d, w, h, n_expert + draw(st.integers(0, 3)), adds),
    )
    return gate, rng.normal(size=(3, d)).astype(np.float32)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_numpy_and_native_estimate_what_the_definition_says(case: tuple[Gate, Floats]) -> None:
    gate, r = case
    assert gate.mlp is not None
    x = gate.normed(r)
    found = gate.logits(x)
    with closing(NativeGate(gate)) as native:
        routed, numpy = native.route(r), gate.route(x)

    for i in range(len(r)):
        expected = np.array(naive_logits(gate.mlp, x[i], gate.n_expert))
        if gate.mlp.adds:
            expected += gate.router.astype(np.float64) @ x[i]
        np.testing.assert_allclose(found[i], expected, rtol=1e-3, atol=1e-3)
    # Of two ways to add up floats, two experts may be closer than their rounding.
    scores = found if gate.bias is None else found + gate.bias
    ours = np.take_along_axis(scores, numpy.ids, axis=1)
    theirs = np.take_along_axis(scores, routed.ids, axis=1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(numpy.probs, routed.probs, atol=1e-3)


def test_numpy_and_native_pick_the_same_experts() -> None:
    rng = np.random.default_rng(3)
    gate = Gate(
        router=np.zeros((16, 64), np.float32),
        norm=np.ones(64, np.float32),
        n_used=4,
        mlp=network(rng, 64, 16, 48, 16),
    )
    r = rng.normal(size=(200, 64)).astype(np.float32)
    with closing(NativeGate(gate)) as native:
        routed = native.route(r)

    np.testing.assert_array_equal(gate.route(gate.normed(r)).ids, routed.ids)


def test_what_is_not_finite_is_refused_natively_too() -> None:
    gate = Gate(
        router=np.zeros((4, 8), np.float32),
        norm=np.ones(8, np.float32),
        n_used=2,
        mlp=network(np.random.default_rng(0), 8, 4, 4, 4),
    )
    with closing(NativeGate(gate)) as native, pytest.raises(ModelError, match="row 0"):
        native.route(np.full((1, 8), np.inf, np.float32))


def test_shapes_that_do_not_fit_are_refused() -> None:
    mlp = network(np.random.default_rng(0), 8, 4, 6, 4)
    with pytest.raises(ModelError, match=r"norm_bias has shape \(3,\), \(4,\) is needed"):
        replace(mlp.shared, norm_bias=np.zeros(3, np.float32))
    with pytest.raises(ModelError, match="head is not finite"):
        replace(mlp.shared, head=np.full((4, 4), np.nan, np.float32))
    with pytest.raises(ModelError, match=r"embedding has shape \(8,\), \(4,\) is needed"):
        replace(mlp, embedding=np.zeros(8, np.float32))
    with pytest.raises(ModelError, match="maps 8 inputs to 4 experts, a router 8 to 5"):
        Gate(router=np.zeros((5, 8), np.float32), norm=np.ones(8, np.float32), n_used=2, mlp=mlp)
