"""Calibration finds what is there, for every family; interrupted it goes on to the same bytes."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert import calibrate as calibration
from speculoe_local.convert.calibrate import calibrate, links, partial_path
from speculoe_local.convert.passes import groups
from speculoe_local.runtime.capture import Capture, LayerRecord
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.gating import Gate, load_gates
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import PREDICTORS, Sidecar
from tests.models import tiny
from tests.models.fixtures import TinyModel
from tests.runtime import router_models

TEXTS = [
    " ".join(f"{word} {number * 7919 % 1009}" for number in range(60))
    for word in ("quick", "brown", "lazy", "sleeping", "fox", "dog", "sun", "and", "then", "jumps")
]
TOKENS, HELD_OUT = 512, 128
_NORMED_SUM = "it norms the sum of its experts"


def run(path: Path, out: Path, **more: object) -> Sidecar:
    options = {"texts": TEXTS, "tokens": TOKENS, "held_out": HELD_OUT, "threads": 1}
    return calibrate(path, out, **(options | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*tiny.MOE_FAMILIES, "grovemoe", "granitemoe", "arctic"])
def test_every_family_is_calibrated(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    known = name in router_models.VARIANTS
    path = router_models.build(name, tmp_path) if known else tiny_model(name)
    out = tmp_path / "out.speculoe.gguf"

    made = run(path, out)

    model = ModelMap.read(path)
    found = Sidecar.read(out, model)
    assert (TOKENS, HELD_OUT) == (found.tokens, found.held_out)
    assert [layer.index for layer in model.layers] == [layer.block for layer in found.layers]
    for layer, shape in zip(found.layers, model.layers, strict=True):
        assert TOKENS * shape.n_expert_used == layer.counts.sum()
        assert shape.has_shared == (layer.shared_mean is not None)
        assert shape.n_expert_used / shape.n_expert == pytest.approx(layer.recall["chance"])
        assert 0 <= layer.recall["previous-token"] <= 1
        assert np.abs(layer.default_vectors[layer.seen].astype(np.float32)).max(axis=1).min() > 0
    first, *rest = found.layers
    assert not first.predictable
    for layer in rest:
        if name in ("gemma4", "arctic"):
            assert not layer.predictable
            assert layer.reason.startswith(f"{name}: ")
            assert layer.delta_w is None
            continue
        assert layer.predictable, layer.reason
        assert set(PREDICTORS) == layer.recall.keys()
        assert layer.delta_w is not None
        if layer.strategy != "none":
            assert layer.recall[layer.strategy] == max(
                layer.recall[who] for who in ("quasi-hidden", "ridge")
            )
            assert layer.recall[layer.strategy] > layer.recall["chance"]
    assert [tmp_path / "out.speculoe.gguf"] == [p for p in tmp_path.iterdir() if "out" in p.name]
    assert made.fingerprint == found.fingerprint


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sidecar]:
    """An uninterrupted calibration of bailingmoe: its file and what it returned."""
    out = tmp_path_factory.mktemp("whole") / "out.speculoe.gguf"
    return out, run(tiny_model("bailingmoe"), out)


def records(path: Path, windows: np.ndarray) -> list[list[LayerRecord]]:
    """What each MoE layer did with each window, one list of records per window."""
    model_map = ModelMap.read(path)
    blocks = [layer.index for layer in model_map.layers]
    found: list[list[LayerRecord]] = []
    with closing(Model(path, lazy_experts=False, repack=False)) as model:
        capture = Capture(blocks, lambda one: found[-1].append(one), outputs=blocks)
        shape = Shape(windows.shape[1], windows.shape[1], windows.shape[1], 1)
        with closing(Context(model, shape, watch=capture)) as context:
            for window in windows:
                found.append([])
                capture.run(context, window.tolist())
    return found


@pytest.mark.parametrize("name", ["bailingmoe", "gpt-oss", "llama4"])
def test_numbers_are_those_of_a_direct_computation(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model(name)
    found = run(path, tmp_path / "out.gguf")
    with closing(Model(path, lazy_experts=False, repack=False)) as model:
        learn, measure = calibration._windows(model, TEXTS, TOKENS, HELD_OUT, TOKENS // 8)
    learned, measured = records(path, learn), records(path, measure)
    gates = load_gates(ModelMap.read(path))

    for number, layer in enumerate(found.layers):
        _means_agree(layer.default_vectors, layer.counts, [w[number] for w in learned], name)
        if layer.shared_mean is not None:
            rows = np.concatenate([w[number].shared for w in learned])
            np.testing.assert_allclose(rows.mean(axis=0), layer.shared_mean, atol=1e-5)
        truth = [w[number] for w in measured]
        previous = np.mean([_hits(r.ids[:-1], r.ids[1:]) for r in truth])
        assert previous == pytest.approx(layer.recall["previous-token"], abs=1e-6)
        if not layer.predictable:
            continue
        gate, source = gates[layer.block], found.layers[number - 1]
        assert isinstance(gate, Gate)
        estimator = layer.estimator(gate)
        assert estimator is not None
        recalls: dict[str, list[float]] = {"residual": [], "quasi-hidden": [], "ridge": []}
        tops: list[float] = []
        for window, true in zip(measured, truth, strict=True):
            before = window[number - 1]
            assert before.residual is not None
            q = before.residual + source.mean_output(before.ids, before.weights)
            q = q if before.shared is None else q + before.shared
            r = gate.route(gate.normed(before.residual)).ids
            recalls["residual"].append(_hits(r, true.ids))
            recalls["quasi-hidden"].append(_hits(gate.route(gate.normed(q)).ids, true.ids))
            guess = estimator.route(gate.normed(q)).ids
            recalls["ridge"].append(_hits(guess, true.ids))
            tops.append(_hits(guess[:, :1], true.ids) * true.ids.shape[1])
        for who, values in recalls.items():
            assert np.mean(values) == pytest.approx(layer.recall[who], abs=1e-6), who
        assert np.mean(tops) == pytest.approx(layer.precision_top1["ridge"], abs=1e-6)


def _means_agree(
    vectors: np.ndarray, counts: np.ndarray, truth: list[LayerRecord], name: str
) -> None:
    for expert in range(len(vectors)):
        outputs, weights = [], []
        for one in truth:
            assert one.outputs is not None
            rows, ranks = np.nonzero(one.ids == expert)
            outputs += list(one.outputs[rows, ranks].astype(np.float64))
            weights += list(one.weights[rows, ranks])
        assert len(outputs) == counts[expert]
        mass = np.sum(weights) if name == "llama4" else len(outputs)
        mean = np.sum(outputs, axis=0) / mass if outputs else np.zeros(vectors.shape[1])
        np.testing.assert_allclose(mean, vectors[expert], rtol=2e-3, atol=1e-5)


def _hits(guess: np.ndarray, truth: np.ndarray) -> float:
    shares = [
        len(set(a.tolist()) & set(b.tolist())) / len(b) for a, b in zip(guess, truth, strict=True)
    ]
    return float(np.mean(shares))


def test_ridge_beats_the_router_on_text_like_that_it_learned(
    whole: tuple[Path, Sidecar],
) -> None:
    _, found = whole
    ridge, router = found.mean("recall", "ridge"), found.mean("recall", "residual")
    chance = found.mean("recall", "chance")

    assert ridge is not None
    assert router is not None
    assert chance is not None
    assert ridge > router > chance


def test_experts_never_seen_are_marked(tmp_path: Path) -> None:
    path = tiny.build("qwen3moe", tmp_path / "many.gguf", n_expert=64, n_used=1, n_layer=2)

    found = run(path, tmp_path / "out.gguf", texts=["a" * 700], tokens=256, held_out=64)

    for layer in found.layers:
        assert 0 < layer.seen.sum() < 64
        assert not layer.default_vectors[~layer.seen].any()
        assert layer.default_vectors[layer.seen].any(axis=1).all()


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 5, 8, 9])
def test_interrupted_anywhere_it_goes_on_to_the_same_bytes(
    after: int, whole: tuple[Path, Sidecar], tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, out = tiny_model("bailingmoe"), tmp_path / "out.speculoe.gguf"
    shares: list[float] = []

    def stop(share: float) -> None:
        shares.append(share)
        if len(shares) == after:
            raise Stop

    with pytest.raises(Stop):
        run(path, out, progress=stop, save_seconds=0)
    assert not out.exists()
    assert partial_path(out).exists()
    rest: list[float] = []
    run(path, out, progress=rest.append)

    assert whole[0].read_bytes() == out.read_bytes()
    assert not partial_path(out).exists()
    assert 10 == len(shares) + len(rest)  # 8 windows to learn from and 2 to measure on, each once
    assert 1.0 == rest[-1]


@pytest.mark.parametrize("change", ["text", "tokens", "model", "damage"])
def test_the_partial_file_of_something_else_is_not_used(
    change: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, out = tiny_model("bailingmoe"), tmp_path / "out.speculoe.gguf"
    more: dict[str, object] = {"texts": TEXTS[::-1]} if change == "text" else {}
    more |= {"tokens": 256} if change == "tokens" else {}
    if change == "model":
        path = tiny.build("bailingmoe", tmp_path / "finetune.gguf", seed=3)
    expected = tmp_path / "expected.speculoe.gguf"
    run(path, expected, **more)

    def stop(share: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        run(tiny_model("bailingmoe"), out, progress=stop, save_seconds=0)
    if change == "damage":
        raw = partial_path(out).read_bytes()
        partial_path(out).write_bytes(raw[: len(raw) // 2])
    run(path, out, **more)

    assert expected.read_bytes() == out.read_bytes()


def test_little_memory_means_more_passes_and_the_same_default_vectors(
    whole: tuple[Path, Sidecar], tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("bailingmoe")
    model = ModelMap.read(path)
    assert [[0], [1], [2], [3]] == groups(model, links(model), 1)
    assert [[0, 1, 2, 3]] == groups(model, links(model), 1 << 30)
    shares: list[float] = []

    found = run(path, tmp_path / "out.gguf", memory_bytes=1, progress=shares.append)

    assert 4 * 8 + 2 == len(shares)
    for ours, theirs in zip(whole[1].layers, found.layers, strict=True):
        np.testing.assert_array_equal(ours.default_vectors, theirs.default_vectors)
        assert ours.recall == pytest.approx(theirs.recall, abs=0.02)


def test_the_sidecar_names_the_text(whole: tuple[Path, Sidecar]) -> None:
    _, found = whole

    assert hashlib.sha256("\0".join(TEXTS).encode()).hexdigest() == found.text_sha256
    assert sum(len(text) for text in TEXTS) == found.text_bytes


def test_windows_to_measure_on_are_of_other_text(tiny_model: TinyModel) -> None:
    text = "".join(chr(97 + letter) for letter in np.random.default_rng(0).integers(0, 26, 4000))
    with closing(Model(tiny_model("qwen3moe"), lazy_experts=False, repack=False)) as model:
        tokens = model.vocab.tokenize(text + "\n\n", add_bos=False)
        learn, measure = calibration._windows(model, [text], 512, 128, 64)

    size = 64
    places = {tuple(tokens[i : i + size][1:]): i for i in range(0, len(tokens) - size + 1, size)}
    learned = [places[tuple(window[1:].tolist())] for window in learn]
    measured = [places[tuple(window[1:].tolist())] for window in measure]
    assert (8, 2) == (len(set(learned)), len(set(measured)))
    assert max(learned) < min(measured)


def test_too_little_text_shrinks_both_shares(tiny_model: TinyModel, tmp_path: Path) -> None:
    found = run(tiny_model("qwen3moe"), tmp_path / "out.gguf", texts=TEXTS[:1], tokens=1024)

    assert 0 < found.held_out < HELD_OUT + 1
    assert found.held_out < found.tokens < 1024


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"texts": []}, "texts have 0 tokens"),
        ({"texts": ["short"]}, "one window of 64 to learn from"),
        ({"tokens": 4}, "4 tokens; 16 or more"),
    ],
)
def test_what_cannot_be_calibrated_with_is_refused_in_one_line(
    more: dict[str, object], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        run(tiny_model("qwen3moe"), tmp_path / "out.gguf", **more)

    assert "\n" not in str(raised.value)
    assert [] == list(tmp_path.iterdir())


def test_a_dense_model_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no experts to calibrate"):
        run(tiny_model("llama"), tmp_path / "out.gguf")


def test_architectures_that_are_not_summed_are_ones_that_have_a_rule() -> None:
    from speculoe_local.runtime.routers import RULES

    assert calibration.NOT_SUMMED.keys() <= RULES.keys()
