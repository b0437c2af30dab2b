"""Trained estimators come back from a sidecar as they went in, and make the gates they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.runtime.errors import SidecarError
from speculoe_local.runtime.estimators import Adapter, Training, rounded
from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.mlp import MATRICES, VECTORS, SharedMlp, shapes
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import LayerCalibration, Sidecar, router_digest
from tests.models.fixtures import TinyModel

E, D, WIDTH, HIDDEN, RANK = 8, 64, 16, 32, 3


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> ModelMap:
    return ModelMap.read(tiny_model("qwen3moe"))


def trained(model: ModelMap) -> Sidecar:
    """Random estimators: layer 1 has all kinds on ridge, layer 2 an adapter on the router and a network
    of its own, layer 3 none."""
    rng = np.random.default_rng(0)

    def halves(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float16)

    def floats(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    shared = {name: floats(*shape) for name, shape in shapes(D, WIDTH, HIDDEN, E).items()}
    shared |= {name: rounded(shared[name]).astype(np.float32) for name in MATRICES}
    layers = [
        LayerCalibration(
            block=block,
            default_vectors=halves(E, D),
            counts=np.ones(E, np.int64),
            source=block - 1 if block else None,
            delta_w=halves(E, D) if block == 1 else None,
            delta_b=floats(E) if block == 1 else None,
            recall={"quasi-hidden": 0.5, "adapter": 0.5625, "mlp": 0.75} if block else {},
            strategy={0: "none", 1: "mlp", 2: "adapter", 3: "quasi-hidden"}[block],
            predictable=block > 0,
            adapter=Adapter(halves(E, RANK), halves(RANK, D), floats(E), base)
            if (base := {1: "ridge", 2: "quasi-hidden"}.get(block))
            else None,
            embedding=floats(WIDTH) if block in (1, 2) else None,
            mlp_scale=0.25 if block in (1, 2) else 1.0,
            mlp_base={1: "ridge", 2: "none"}.get(block, "none"),
        )
        for block in range(4)
    ]
    return Sidecar(
        fingerprint=model.fingerprint,
        routers=router_digest(model),
        text_sha256="ab" * 32,
        text_bytes=1000,
        tokens=100,
        held_out=20,
        layers=tuple(layers),
        mlp=SharedMlp(**shared),
        training=Training("cd" * 32, 90, 10, 20, 7),
    )


def gate() -> Gate:
    rng = np.random.default_rng(1)
    return Gate(
        router=rng.normal(size=(E, D)).astype(np.float32),
        norm=np.ones(D, np.float32),
        n_used=2,
        bias=rng.normal(size=E).astype(np.float32),
    )


def test_what_was_trained_is_read_as_it_was_written(model: ModelMap, tmp_path: Path) -> None:
    given = trained(model)
    given.write(tmp_path / "a.gguf")

    found = Sidecar.read(tmp_path / "a.gguf", model)

    assert given.training == found.training
    assert given.mlp is not None and found.mlp is not None
    for name in (*MATRICES, *VECTORS):
        np.testing.assert_array_equal(getattr(given.mlp, name), getattr(found.mlp, name))
    for ours, theirs in zip(given.layers, found.layers, strict=True):
        for part in ("strategy", "mlp_scale", "mlp_base", "recall"):
            assert getattr(ours, part) == getattr(theirs, part)
        assert (ours.adapter is None, ours.embedding is None) == (
            theirs.adapter is None,
            theirs.embedding is None,
        )
        if ours.adapter is not None and theirs.adapter is not None:
            assert ours.adapter.base == theirs.adapter.base
            for part in ("up", "down", "bias"):
                np.testing.assert_array_equal(
                    getattr(ours.adapter, part), getattr(theirs.adapter, part)
                )
        if ours.embedding is not None and theirs.embedding is not None:
            np.testing.assert_array_equal(ours.embedding, theirs.embedding)
    found.write(tmp_path / "b.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_sidecar_of_before_training_has_none_of_it(model: ModelMap, tmp_path: Path) -> None:
    given = trained(model)
    plain = tuple(
        replace(layer, adapter=None, embedding=None, strategy="none") for layer in given.layers
    )
    replace(given, layers=plain, mlp=None, training=None).write(tmp_path / "old.gguf")

    found = Sidecar.read(tmp_path / "old.gguf", model)

    assert (None, None) == (found.mlp, found.training)
    assert found.gate(1, gate(), "adapter") is None
    assert found.gate(1, gate(), "mlp") is None
    assert found.gate(1, gate(), "estimator") is not None  # ridge


def test_gates_are_the_router_with_what_was_trained(model: ModelMap) -> None:
    sidecar, router = trained(model), gate()
    x = np.random.default_rng(2).normal(size=(5, D)).astype(np.float32)
    ridge = sidecar.gate(1, router, "ridge")
    assert ridge is not None and ridge.bias is not None and router.bias is not None
    for block, base in ((1, ridge), (2, router)):
        layer, made = sidecar.layer(block), sidecar.gate(block, router, "adapter")
        assert layer.adapter is not None and made is not None and base.bias is not None
        up, down = (part.astype(np.float32) for part in (layer.adapter.up, layer.adapter.down))
        expected = base.logits(x) + x @ down.T @ up.T
        np.testing.assert_allclose(expected, made.logits(x), rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(base.bias + layer.adapter.bias, made.bias)
    for block, base in ((1, ridge), (2, None)):
        layer, made = sidecar.layer(block), sidecar.gate(block, router, "mlp")
        assert made is not None and made.mlp is not None
        assert layer.embedding is made.mlp.embedding
        alone = made.mlp.logits(x, E)
        expected = alone if base is None else alone + base.logits(x)
        np.testing.assert_allclose(expected, made.logits(x), rtol=1e-5, atol=1e-5)
        assert (router.bias if base is None else base.bias) is made.bias or base is not None
    assert sidecar.gate(3, router, "adapter") is None
    assert sidecar.gate(3, router, "estimator") is None
    assert router is sidecar.gate(3, router, "quasi-hidden")


def test_the_estimator_is_the_one_with_the_best_recall(model: ModelMap) -> None:
    sidecar, router = trained(model), gate()

    best = sidecar.gate(1, router, "estimator")
    assert best is not None and best.mlp is not None
    worse = replace(sidecar.layer(1), recall={"ridge": 0.8, "mlp": 0.75, "adapter": 0.8})
    changed = replace(sidecar, layers=(sidecar.layers[0], worse, *sidecar.layers[2:]))
    best, ridge = changed.gate(1, router, "estimator"), changed.gate(1, router, "ridge")
    assert best is not None and ridge is not None and best.mlp is None
    np.testing.assert_array_equal(ridge.router, best.router)  # of equals the one that costs least


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda layer: replace(layer, adapter=replace(layer.adapter, base="luck")), "base 'luck'"),
        (lambda layer: replace(layer, mlp_base="luck"), "network of layer 1 has base 'luck'"),
        (
            lambda layer: replace(
                layer, adapter=replace(layer.adapter, down=layer.adapter.down[:, :-1])
            ),
            "tensor blk.1.adapter_down is",
        ),
        (
            lambda layer: replace(layer, embedding=layer.embedding[:-1]),
            "tensor blk.1.mlp_embedding is",
        ),
        (lambda layer: replace(layer, strategy="forest"), "strategy 'forest'"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[[LayerCalibration], LayerCalibration],
    problem: str,
    model: ModelMap,
    tmp_path: Path,
) -> None:
    good = trained(model)
    path = tmp_path / "bad.gguf"
    layers = (good.layers[0], change(good.layers[1]), *good.layers[2:])
    replace(good, layers=layers).write(path)

    with pytest.raises(SidecarError, match=problem) as raised:
        Sidecar.read(path, model)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_network_that_is_not_finite_is_refused_by_name(model: ModelMap, tmp_path: Path) -> None:
    good = trained(model)
    assert good.mlp is not None
    good.mlp.norm[3] = np.nan  # after it was checked
    good.write(tmp_path / "bad.gguf")

    with pytest.raises(SidecarError, match="is damaged: an estimator's norm is not finite"):
        Sidecar.read(tmp_path / "bad.gguf", model)
