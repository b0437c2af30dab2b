"""A sidecar comes back as it was written; one that is damaged or another model's is refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.errors import SidecarError
from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import (
    LayerCalibration,
    Sidecar,
    router_digest,
    sidecar_path,
)
from tests.models import tiny
from tests.models.fixtures import TinyModel

N_EXPERT, N_EMBD = 8, 64


def calibration(model: ModelMap) -> Sidecar:
    """One of random numbers, with every optional part present in some layer and absent in another."""
    rng = np.random.default_rng(0)
    layers = []
    for number, layer in enumerate(model.layers):
        matrix = rng.normal(size=(2, layer.n_expert, model.n_embd)).astype(np.float16)
        predicted = number > 0
        layers.append(
            LayerCalibration(
                block=layer.index,
                default_vectors=matrix[0],
                counts=rng.integers(0, 3, layer.n_expert),
                shared_mean=rng.normal(size=model.n_embd).astype(np.float32) if number else None,
                source=model.layers[number - 1].index if predicted else None,
                delta_w=matrix[1] if predicted else None,
                delta_b=rng.normal(size=layer.n_expert).astype(np.float32) if predicted else None,
                recall={"quasi-hidden": 0.5, "ridge": 0.625, "chance": 0.25} if predicted else {},
                precision_top1={"ridge": 0.75} if predicted else {},
                strategy="ridge" if predicted else "none",
                predictable=predicted,
                reason="" if predicted else "no MoE layer comes before it",
            )
        )
    return Sidecar(
        fingerprint=model.fingerprint,
        routers=router_digest(model),
        text_sha256="ab" * 32,
        text_bytes=1 << 33,
        tokens=1000,
        held_out=200,
        layers=tuple(layers),
    )


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> ModelMap:
    return ModelMap.read(tiny_model("qwen3moe"))


@pytest.fixture
def written(model: ModelMap, tmp_path: Path) -> Path:
    path = tmp_path / "model.speculoe.gguf"
    calibration(model).write(path)
    return path


def refused(path: Path, model: ModelMap) -> str:
    with pytest.raises(SidecarError) as raised:
        Sidecar.read(path, model)
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_what_was_written_is_read(model: ModelMap, written: Path) -> None:
    given, found = calibration(model), Sidecar.read(written, model)

    for name in ("fingerprint", "routers", "text_sha256", "text_bytes", "tokens", "held_out"):
        assert getattr(given, name) == getattr(found, name)
    assert len(given.layers) == len(found.layers)
    for ours, theirs in zip(given.layers, found.layers, strict=True):
        for part in ("default_vectors", "counts", "seen", "shared_mean", "delta_w", "delta_b"):
            expected, array = getattr(ours, part), getattr(theirs, part)
            assert (expected is None) == (array is None)
            if expected is not None:
                assert (expected.dtype, expected.shape) == (array.dtype, array.shape)
                np.testing.assert_array_equal(expected, array)
        for part in ("block", "source", "recall", "precision_top1"):
            assert getattr(ours, part) == getattr(theirs, part)
        for part in ("strategy", "predictable", "reason"):
            assert getattr(ours, part) == getattr(theirs, part)


def test_the_same_calibration_has_the_same_bytes(model: ModelMap, written: Path) -> None:
    again = written.with_name("again.gguf")
    calibration(model).write(again)

    assert written.read_bytes() == again.read_bytes()
    assert ["again.gguf", written.name] == sorted(path.name for path in again.parent.iterdir())


def test_another_gguf_reader_sees_the_same(model: ModelMap, written: Path) -> None:
    reader = gguf.GGUFReader(written)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}

    np.testing.assert_array_equal(
        calibration(model).layers[1].default_vectors, tensors["blk.1.default"]
    )
    assert "ridge" == reader.fields["speculoe.block.1.strategy"].contents()


def test_unseen_experts_are_marked(model: ModelMap, written: Path) -> None:
    layer = Sidecar.read(written, model).layers[0]

    assert 0 < int(layer.seen.sum()) < N_EXPERT
    np.testing.assert_array_equal(layer.counts > 0, layer.seen)


def test_the_sidecar_of_another_model_is_refused(
    model: ModelMap, written: Path, tiny_model: TinyModel
) -> None:
    other = ModelMap.read(tiny_model("bailingmoe"))

    assert "is the sidecar of another model (fingerprint" in refused(written, other)


def test_the_sidecar_of_a_finetune_with_an_equal_header_is_refused(
    model: ModelMap, written: Path, tmp_path: Path
) -> None:
    finetune = ModelMap.read(tiny.build("qwen3moe", tmp_path / "finetune.gguf", seed=1))
    assert model.fingerprint == finetune.fingerprint

    assert "is the sidecar of another model (routers" in refused(written, finetune)


def test_a_missing_file_and_a_folder_are_refused(model: ModelMap, tmp_path: Path) -> None:
    assert "does not exist; run `speculoe-local calibrate`" in refused(
        tmp_path / "none.gguf", model
    )
    assert "is a directory" in refused(tmp_path, model)


def test_a_model_is_no_sidecar(model: ModelMap) -> None:
    assert "is a GGUF but no sidecar" in refused(model.files[0], model)


def test_every_truncation_is_refused(model: ModelMap, written: Path) -> None:
    raw = written.read_bytes()
    for size in [*range(0, 200, 7), *range(200, len(raw) - 1, 977), len(raw) - 1]:
        written.write_bytes(raw[:size])
        refused(written, model)


def test_a_changed_bit_anywhere_is_refused(model: ModelMap, tmp_path: Path) -> None:
    path = tmp_path / "flipped.speculoe.gguf"
    calibration(model).write(path)
    raw = path.read_bytes()
    used = used_bytes(path)

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, len(used) - 1), st.integers(0, 7))
    def check(index: int, bit: int) -> None:
        flipped = bytearray(raw)
        flipped[used[index]] ^= 1 << bit
        path.write_bytes(flipped)
        refused(path, model)

    check()


def used_bytes(path: Path) -> list[int]:
    """Offsets in the file that mean something: not the padding between tensors."""
    reader = gguf.GGUFReader(path)
    start = reader.data_offset
    used = list(range(start - 64))
    for tensor in reader.tensors:
        used += range(tensor.data_offset, tensor.data_offset + int(tensor.n_bytes))
    return used


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda layer: replace(layer, delta_b=layer.delta_b[:-1]), "tensor blk.1.delta_b is"),
        (lambda layer: replace(layer, counts=layer.counts.astype(np.float32)), "blk.1.counts is"),
        (lambda layer: replace(layer, strategy="guess"), "has strategy 'guess'"),
        (lambda layer: replace(layer, block=7), "speculoe.block.1.source is 'None'"),
    ],
)
def test_a_sidecar_of_other_shapes_is_refused(
    change: Callable[[LayerCalibration], LayerCalibration],
    problem: str,
    model: ModelMap,
    written: Path,
) -> None:
    good = calibration(model)
    layers = (good.layers[0], change(good.layers[1]), *good.layers[2:])
    replace(good, layers=layers).write(written)

    assert problem in refused(written, model)


def test_a_sidecar_of_another_version_is_refused(
    model: ModelMap, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculoe_local.runtime.sidecar.VERSION", 2)
    calibration(model).write(written)
    monkeypatch.undo()

    assert "is a sidecar of version 2, 1 is read" in refused(written, model)


def test_writing_where_one_may_not_leaves_the_old_one(
    model: ModelMap, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace(calibration(model), tokens=5).write(written)

    assert before == written.read_bytes()
    assert [written.name] == [path.name for path in written.parent.iterdir()]


def test_the_mean_output_is_the_weighted_sum_of_default_vectors(model: ModelMap) -> None:
    layer = calibration(model).layers[0]
    ids, weights = np.array([[3, 0], [7, 7]], np.int32), np.array([[0.5, 2], [1, -1]], np.float32)

    d = layer.mean_output(ids, weights)

    vectors = layer.default_vectors.astype(np.float32)
    np.testing.assert_allclose(d[0], 0.5 * vectors[3] + 2 * vectors[0], rtol=1e-6)
    np.testing.assert_array_equal(np.zeros(N_EMBD, np.float32), d[1])


def test_the_estimator_is_the_gate_with_what_was_fitted_added(model: ModelMap) -> None:
    layers = calibration(model).layers
    rng = np.random.default_rng(1)
    router = rng.normal(size=(N_EXPERT, N_EMBD)).astype(np.float32)
    bias = rng.normal(size=N_EXPERT).astype(np.float32)
    gate = Gate(router=router, norm=np.ones(N_EMBD, np.float32), n_used=2, bias=bias)

    estimator = layers[1].estimator(gate)

    assert layers[0].estimator(gate) is None
    assert estimator is not None
    assert layers[1].delta_w is not None
    assert layers[1].delta_b is not None
    np.testing.assert_array_equal(router + layers[1].delta_w.astype(np.float32), estimator.router)
    np.testing.assert_array_equal(bias + layers[1].delta_b, estimator.bias)
    assert (gate.norm is estimator.norm, gate.n_used) == (True, estimator.n_used)
    plain = layers[1].estimator(replace(gate, bias=None))
    assert plain is not None
    np.testing.assert_array_equal(layers[1].delta_b, plain.bias)


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [
        ("model.gguf", "model.speculoe.gguf"),
        ("a.b-Q4_K.gguf", "a.b-Q4_K.speculoe.gguf"),
        ("big-00001-of-00003.gguf", "big.speculoe.gguf"),
    ],
)
def test_the_sidecar_lies_beside_the_model(model_name: str, expected: str) -> None:
    assert Path("some") / expected == sidecar_path(Path("some") / model_name)


def test_means_are_over_the_predictable_layers_that_have_the_predictor(model: ModelMap) -> None:
    sidecar = calibration(model)
    odd = replace(sidecar.layers[0], recall={"ridge": 0.0, "previous-token": 0.5})
    sidecar = replace(sidecar, layers=(odd, *sidecar.layers[1:]))

    assert 0.625 == sidecar.mean("recall", "ridge")
    assert 0.75 == sidecar.mean("precision_top1", "ridge")
    assert sidecar.mean("recall", "previous-token") is None
