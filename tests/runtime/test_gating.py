"""Gates pick what llama.cpp's graphs pick, in numpy and natively, for every way to route."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.errors import BackendError, ModelError
from speculoe_local.runtime.gating import (
    Gate,
    Gating,
    NativeGate,
    Routing,
    Selection,
    Unpredictable,
    load_gates,
)
from speculoe_local.runtime.header import TensorInfo
from speculoe_local.runtime.modelmap import ModelMap
from tests.models import probe, tiny
from tests.models.fixtures import TinyModel
from tests.runtime import router_models
from tests.runtime.routed import Routed, record

Floats = npt.NDArray[np.float32]
TEXT = (
    "<|im_start|>user\nThe quick brown fox jumps over the lazy dog, and then "
    "it sleeps in the sun.<|im_end|>\n"
)


@pytest.fixture(scope="module")
def path_of(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("routers")

    def get(name: str) -> Path:
        if name in router_models.VARIANTS:
            return router_models.build(name, directory)
        return tiny_model(name)

    return get


@pytest.mark.parametrize("name", [*tiny.MOE_FAMILIES, *router_models.VARIANTS])
def test_numpy_and_native_pick_what_llama_cpp_picks(
    name: str, path_of: Callable[[str], Path]
) -> None:
    path = path_of(name)
    with probe.loaded(path) as model:
        tokens = probe.tokenize(model, TEXT)
        truth = record(model, tokens)

    gates = load_gates(ModelMap.read(path))

    assert gates.keys() == truth.keys()
    for layer, gate in gates.items():
        assert isinstance(gate, Gate), f"layer {layer}: {gate.reason}"
        _agrees(gate, truth[layer], len(tokens))


def _agrees(gate: Gate, truth: Routed, n_tokens: int) -> None:
    assert truth.r is not None
    assert (n_tokens, gate.n_embd) == truth.r.shape
    np.testing.assert_allclose(gate.normed(truth.r), truth.x, atol=1e-4)
    numpy = gate.route(truth.x, gate.n_expert)
    # Beyond n_used two experts may be closer than two ways to add up floats.
    np.testing.assert_array_equal(truth.order[:, : gate.n_used], numpy.ids[:, : gate.n_used])
    np.testing.assert_allclose(numpy.weights, truth.weights, atol=1e-4)
    with closing(NativeGate(gate)) as native:
        routed = native.route(truth.r)
        half = truth.r * np.float32(0.5)
        halves = native.route(half, half)  # exact: halves of floats add up again
    np.testing.assert_array_equal(numpy.ids[:, : gate.n_used], routed.ids)
    np.testing.assert_allclose(routed.weights, truth.weights, atol=1e-4)
    np.testing.assert_allclose(routed.probs, numpy.probs, atol=1e-5)
    np.testing.assert_array_equal(routed.ids, halves.ids)
    np.testing.assert_array_equal(routed.weights, halves.weights)


def test_the_models_cover_every_gating_and_selection(path_of: Callable[[str], Path]) -> None:
    gates = [
        gate
        for name in (*tiny.MOE_FAMILIES, *router_models.VARIANTS)
        for gate in load_gates(ModelMap.read(path_of(name))).values()
        if isinstance(gate, Gate)
    ]

    assert set(Gating) == {gate.gating for gate in gates}
    assert set(Selection) == {gate.selection for gate in gates}
    assert {True, False} == {gate.norm_weights for gate in gates}
    assert {True, False} == {gate.scale != 1 for gate in gates}
    assert {0, 4, 6} == {gate.groups for gate in gates}
    for name in ("bias", "selection_bias", "norm_bias"):
        assert any(getattr(gate, name) is not None for gate in gates), name


# --- against the definition, written out for one token


def naive_logits(gate: Gate, x: Floats) -> list[float]:
    logits = []
    for e in range(gate.n_expert):
        total = sum(float(gate.router[e, i]) * float(x[i]) for i in range(gate.n_embd))
        logits.append(total + (float(gate.bias[e]) if gate.bias is not None else 0.0))
    return logits


def naive_softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(v - max(logits)) for v in logits]
    return [p / sum(powers) for p in powers]


def naive_probs(gate: Gate, logits: list[float]) -> list[float]:
    if gate.gating is Gating.SIGMOID:
        return [1 / (1 + math.exp(-v)) for v in logits]
    if gate.gating is Gating.SQRT_SOFTPLUS:
        return [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    return naive_softmax(logits)


def naive_scores(gate: Gate, logits: list[float]) -> list[float]:
    if gate.selection is Selection.SIGMOID:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    elif gate.selection is Selection.LOGITS or gate.gating is Gating.SOFTMAX_WEIGHT:
        scores = list(logits)
    else:
        scores = naive_probs(gate, logits)
    if gate.selection is Selection.PROBS and gate.selection_bias is not None:
        scores = [s + float(b) for s, b in zip(scores, gate.selection_bias, strict=True)]
    if gate.groups > 1:
        size = gate.n_expert // gate.groups
        parts = [scores[g * size : (g + 1) * size] for g in range(gate.groups)]
        worth = [sum(sorted(part)[-2:]) for part in parts]
        kept = sorted(range(gate.groups), key=lambda g: -worth[g])[: gate.group_used]
        scores = [s if e // size in kept else -math.inf for e, s in enumerate(scores)]
    return scores


def naive_weights(gate: Gate, logits: list[float], ids: list[int]) -> list[float]:
    if gate.gating is Gating.SOFTMAX_WEIGHT:
        weights = naive_softmax([logits[e] for e in ids])
    else:
        weights = [naive_probs(gate, logits)[e] for e in ids]
    if gate.norm_weights:
        total = max(sum(weights), 2.0**-14)
        weights = [w / total for w in weights]
    return [w * gate.scale for w in weights]


@st.composite
def gates(draw: st.DrawFn) -> tuple[Gate, Floats]:
    """A random gate and residuals [3, n_embd] for it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    groups = draw(st.sampled_from([0, 1, 2, 4]))
    n_expert = draw(st.integers(2, 12)) * max(groups, 1)
    n_embd = draw(st.integers(1, 70))

    def maybe(size: int) -> Floats | None:
        return rng.normal(size=size).astype(np.float32) if draw(st.booleans()) else None

    group_used = draw(st.integers(1, groups - 1)) if groups > 1 else 0
    most = n_expert * group_used // groups if groups > 1 else n_expert
    gate = Gate(
        router=rng.normal(scale=n_embd**-0.5, size=(n_expert, n_embd)).astype(np.float32),
        norm=rng.normal(loc=1, scale=0.1, size=n_embd).astype(np.float32),
        n_used=draw(st.integers(1, most)),
        gating=draw(st.sampled_from(Gating)),
        eps=1e-5,
        bias=maybe(n_expert),
        selection_bias=maybe(n_expert),
        norm_bias=maybe(n_embd),
        selection=draw(st.sampled_from(Selection)),
        groups=groups,
        group_used=group_used,
        norm_weights=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return gate, rng.normal(size=(3, n_embd)).astype(np.float32)


@settings(max_examples=150, deadline=None)
@given(gates())
def test_numpy_and_native_route_as_the_definition_says(case: tuple[Gate, Floats]) -> None:
    gate, r = case
    x = gate.normed(r)
    with closing(NativeGate(gate)) as native:
        answers = (gate.route(x), native.route(r))

    for i in range(len(r)):
        logits = naive_logits(gate, x[i])
        scores = naive_scores(gate, logits)
        best = sorted(scores, reverse=True)[: gate.n_used]
        for answer in answers:
            ids = answer.ids[i].tolist()
            assert len(ids) == len(set(ids))
            # By score, since float32 may order two that are within its rounding either way.
            np.testing.assert_allclose([scores[e] for e in ids], best, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(
                answer.weights[i], naive_weights(gate, logits, ids), rtol=1e-4, atol=1e-5
            )
            np.testing.assert_allclose(
                answer.probs[i], naive_probs(gate, logits), rtol=1e-4, atol=1e-5
            )


@settings(max_examples=100, deadline=None)
@given(gates())
def test_the_norm_is_the_definition(case: tuple[Gate, Floats]) -> None:
    gate, r = case
    expected = r / np.sqrt((r.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + gate.eps)
    expected = expected * gate.norm + (0 if gate.norm_bias is None else gate.norm_bias)

    np.testing.assert_allclose(gate.normed(r), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(-2, 2), min_size=2, max_size=70), st.data())
def test_ties_fall_alike_in_numpy_and_natively(values: list[int], data: st.DataObject) -> None:
    # One input of exactly 1, so that logits are the router's small whole numbers, free of rounding.
    groups = data.draw(
        st.sampled_from([g for g in (0, 2, 4) if not g or 4 <= len(values) >= 2 * g])
    )
    values = values[: len(values) // groups * groups] if groups else values
    gate = Gate(
        router=np.array(values, np.float32)[:, None],
        norm=np.ones(1, np.float32),
        n_used=1,
        gating=Gating.SOFTMAX_WEIGHT,
        eps=0.0,
        groups=groups,
        group_used=groups // 2,
    )
    one = np.ones((1, 1), np.float32)
    with closing(NativeGate(gate, gate.n_expert)) as native:
        assert gate.route(one, gate.n_expert).ids.tolist() == native.route(one).ids.tolist()


# --- what is refused


def small(**changes: Any) -> Gate:
    fields: dict[str, Any] = {
        "router": np.eye(4, 8, dtype=np.float32),
        "norm": np.ones(8, np.float32),
        "n_used": 2,
    }
    return Gate(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_used": 5}, "uses 5 of 4 experts"),
        ({"n_used": 0}, "uses 0 of 4 experts"),
        ({"norm": np.ones(7, np.float32)}, r"norm has shape \(7,\), \(8,\) is needed"),
        ({"bias": np.ones(8, np.float32)}, r"bias has shape \(8,\), \(4,\) is needed"),
        ({"selection_bias": np.full(4, np.nan, np.float32)}, "selection bias is not finite"),
        ({"groups": 3, "group_used": 1}, "uses 1 of 3 groups of 4 experts"),
        ({"groups": 4, "group_used": 1}, "uses 1 of 4 groups of 4 experts"),
        ({"groups": 2, "group_used": 2}, "uses 2 of 2 groups of 4 experts"),
    ],
)
def test_a_gate_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        small(**changes)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_residual_that_is_not_finite_is_refused_and_the_next_one_is_not(bad: float) -> None:
    gate = small()
    good = np.ones((1, 8), np.float32)
    broken = good.copy()
    broken[0, 3] = bad
    with closing(NativeGate(gate)) as native:
        with np.errstate(invalid="ignore"), pytest.raises(ModelError, match="not finite"):
            gate.route(gate.normed(broken))
        with pytest.raises(ModelError, match="row 1 are not finite"):
            native.route(np.concatenate([good, broken]))
        with pytest.raises(ModelError, match="row 0 are not finite"):
            native.route(good, broken)

        assert gate.route(gate.normed(good)).ids.tolist() == native.route(good).ids.tolist()


def test_a_native_gate_refuses_other_shapes_other_counts_and_use_after_close() -> None:
    gate = small()
    with pytest.raises(ValueError, match="5 ids; use 2 to 4"):
        NativeGate(gate, 5)
    with pytest.raises(ValueError, match="1 ids; use 2 to 4"):
        gate.route(np.ones((1, 8), np.float32), 1)
    native = NativeGate(gate, 3)
    with pytest.raises(ValueError, match=r"shape \(8,\); \(n, 8\) is needed"):
        native.route(np.ones(8, np.float32))
    with pytest.raises(ValueError, match="2 rows to add to 1"):
        native.route(np.ones((1, 8), np.float32), np.ones((2, 8), np.float32))
    assert (1, 3) == native.route(np.ones((1, 8), np.float32)).ids.shape
    native.close()
    native.close()
    with pytest.raises(BackendError, match="closed"):
        native.route(np.ones((1, 8), np.float32))


def test_weights_that_are_all_zero_do_not_divide_by_zero() -> None:
    gate = small(bias=np.full(4, -200, np.float32), gating=Gating.SIGMOID, norm_weights=True)
    r = np.zeros((1, 8), np.float32)
    with closing(NativeGate(gate)) as native:
        for answer in (gate.route(gate.normed(r)), native.route(r)):
            assert [[0.0, 0.0]] == answer.weights.tolist()


# --- reading a model


@pytest.fixture
def qwen(tiny_model: TinyModel) -> ModelMap:
    return ModelMap.read(tiny_model("qwen3moe"))


def changed(model: ModelMap, architecture: str, **metadata: Any) -> ModelMap:
    """`model` under another architecture's name, its keys with it; None takes a key away."""
    values = {
        f"{architecture}.{key.removeprefix(f'{model.architecture}.')}": value
        for key, value in model.metadata.items()
        if key.startswith(f"{model.architecture}.")
    }
    values |= {f"{architecture}.{key.replace('__', '.')}": v for key, v in metadata.items()}
    kept = {key: value for key, value in values.items() if value is not None}
    return replace(model, architecture=architecture, metadata=kept)


def reasons(model: ModelMap) -> Iterator[str]:
    for found in load_gates(model).values():
        assert isinstance(found, Unpredictable)
        yield found.reason


@pytest.mark.parametrize(
    ("architecture", "metadata", "reason"),
    [
        ("nosuch", {}, "architecture nosuch is not in the table"),
        ("smallthinker", {}, "smallthinker: its router reads the layer's input before attention"),
        ("dbrx", {}, "dbrx: its router reads a layer norm"),
        ("minimax-m2", {}, "minimax-m2: its file does not say a known expert_gating_func"),
        ("minimax-m2", {"expert_gating_func": 9}, "minimax-m2: its file does not say a known"),
        (
            "cohere2moe",
            {"attention__layer_norm_rms_epsilon": None},
            "cohere2moe: its file has no RMS",
        ),
        ("gpt-oss", {}, "layer 0 has no post_attention_norm.weight"),
    ],
)
def test_a_router_that_cannot_be_asked_says_why(
    architecture: str, metadata: dict[str, Any], reason: str, qwen: ModelMap
) -> None:
    assert next(reasons(changed(qwen, architecture, **metadata))).startswith(reason)


@pytest.mark.parametrize(
    ("architecture", "metadata", "expected"),
    [
        ("qwen3moe", {"expert_weights_scale": 3.0}, (Gating.SOFTMAX, True, 1.0)),  # not read
        ("olmoe", {"expert_weights_norm": True}, (Gating.SOFTMAX, False, 1.0)),  # not read
        ("bailingmoe", {}, (Gating.SOFTMAX, False, 1.0)),
        ("bailingmoe", {"expert_weights_scale": 0.0}, (Gating.SOFTMAX, False, 1.0)),
        ("deepseek2", {"expert_weights_scale": 3.0}, (Gating.SOFTMAX, False, 3.0)),
        ("deepseek2", {"expert_gating_func": 2}, (Gating.SIGMOID, False, 1.0)),
        ("laguna", {"expert_weights_norm": True}, (Gating.SIGMOID, True, 1.0)),
        ("minimax-m2", {"expert_gating_func": 4}, (Gating.SQRT_SOFTPLUS, True, 1.0)),
    ],
)
def test_what_a_file_leaves_out_is_what_llama_cpp_assumes(
    architecture: str, metadata: dict[str, Any], expected: tuple[object, ...], qwen: ModelMap
) -> None:
    gate = load_gates(changed(qwen, architecture, **metadata))[0]

    assert isinstance(gate, Gate)
    assert expected == (gate.gating, gate.norm_weights, gate.scale)


def test_glm_flash_is_known_by_its_size(qwen: ModelMap) -> None:
    model = changed(qwen, "deepseek2")
    for n_layer, expected in ((46, Gating.SOFTMAX), (47, Gating.SIGMOID), (48, Gating.SIGMOID)):
        gate = load_gates(replace(model, n_vocab=154880, n_layer=n_layer))[0]

        assert isinstance(gate, Gate)
        assert expected is gate.gating


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0])
def test_a_router_of_another_type_is_dequantised_from_where_it_lies(
    kind: Type, qwen: ModelMap, tmp_path: Path
) -> None:
    before = load_gates(qwen)[2]
    assert isinstance(before, Gate)
    raw = quants.quantize(before.router, kind)
    path = tmp_path / "weights"
    path.write_bytes(bytes(96) + raw.tobytes() + bytes(32))
    name = "blk.2.ffn_gate_inp.weight"
    tensor = TensorInfo(name, int(kind), qwen.tensors[name].shape, 96, raw.nbytes, path)
    model = replace(qwen, tensors={**qwen.tensors, name: tensor})

    after = load_gates(model)[2]

    assert isinstance(after, Gate)
    np.testing.assert_array_equal(quants.dequantize(raw, kind), after.router)
    np.testing.assert_allclose(before.router, after.router, atol=0.01)
    path.write_bytes(bytes(96))
    with pytest.raises(ModelError, match="got shorter while in use"):
        load_gates(model)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be read: No such file"):
        load_gates(model)


def test_a_router_of_a_type_or_shape_nobody_reads_is_named(qwen: ModelMap) -> None:
    name = "blk.1.ffn_gate_inp.weight"
    ternary = replace(qwen.tensors[name], ggml_type=int(Type.TQ1_0))
    found = load_gates(replace(qwen, tensors={**qwen.tensors, name: ternary}))

    assert Unpredictable(f"{name} has type TQ1_0, which is not read") == found[1]
    assert isinstance(found[0], Gate)
    narrow = replace(qwen.tensors[name], shape=(64, 7))
    with pytest.raises(ModelError, match=r"shape \(64, 7\), \(64, 8\) is needed"):
        load_gates(replace(qwen, tensors={**qwen.tensors, name: narrow}))


def test_shards_give_the_gates_of_the_whole(tmp_path: Path) -> None:
    whole = tiny.build("deepseek2", tmp_path / "m.gguf")
    expected = load_gates(ModelMap.read(whole))
    shards = tiny.split(whole, 3)
    whole.unlink()

    found = load_gates(ModelMap.read(shards[1]))

    assert expected.keys() == found.keys()
    for layer, gate in expected.items():
        other = found[layer]
        assert isinstance(gate, Gate)
        assert isinstance(other, Gate)
        np.testing.assert_array_equal(gate.router, other.router)
        np.testing.assert_array_equal(gate.norm, other.norm)
        assert gate.selection_bias is not None
        assert other.selection_bias is not None
        np.testing.assert_array_equal(gate.selection_bias, other.selection_bias)


def test_a_dense_model_has_no_gates(tiny_model: TinyModel) -> None:
    assert {} == load_gates(ModelMap.read(tiny_model("llama")))


def test_more_ids_than_are_used_go_on_in_order() -> None:
    gate = small(bias=np.array([0, 3, 1, 2], np.float32), router=np.zeros((4, 8), np.float32))
    r = np.ones((1, 8), np.float32)
    with closing(NativeGate(gate, 4)) as native:
        answers: tuple[Routing, ...] = (gate.route(gate.normed(r), 4), native.route(r))

    for answer in answers:
        assert [[1, 3, 2, 0]] == answer.ids.tolist()
        assert (1, 2) == answer.weights.shape
