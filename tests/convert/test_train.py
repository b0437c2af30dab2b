"""Training puts into the sidecar what predicts best on text that nobody learned from, and says by how much."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert import calibrate as calibration
from speculoe_local.convert.calibrate import calibrate, links
from speculoe_local.convert.passes import quasi_hidden
from speculoe_local.convert.train import estimators
from speculoe_local.convert.train.estimators import best_strategy, predictors, train_estimators
from speculoe_local.convert.train.settings import Settings
from speculoe_local.runtime import Engine, EngineOptions, Sampling
from speculoe_local.runtime.capture import Capture, LayerRecord
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError
from speculoe_local.runtime.gating import Gate, NativeGate, load_gates
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.predict import QuasiHidden
from speculoe_local.runtime.sidecar import Sidecar
from tests.models import tiny
from tests.models.fixtures import TinyModel
from tests.runtime import router_models

TEXTS = [
    " ".join(f"{word} {number * 7919 % 1009}" for number in range(60))
    for word in ("quick", "brown", "lazy", "sleeping", "fox", "dog", "sun", "and", "then", "jumps")
]
PREDICTED = ("quasi-hidden", "ridge", "adapter", "mlp")
QUICK = Settings(epochs=2, rank=3, batch=256)


def calibrated(path: Path, out: Path) -> Sidecar:
    return calibrate(path, out, texts=TEXTS, tokens=512, held_out=128, threads=1)


def run(path: Path, sidecar: Sidecar, out: Path, **more: object) -> Sidecar:
    options: dict[str, object] = {
        "texts": TEXTS,
        "tokens": 512,
        "settings": QUICK,
        "threads": 1,
    }
    return train_estimators(path, sidecar, out, **(options | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Sidecar, Sidecar]:
    """bailingmoe, its sidecar, and that with all kinds of estimators, as it was read."""
    path, out = tiny_model("bailingmoe"), tmp_path_factory.mktemp("trained") / "out.gguf"
    before = calibrated(path, out)
    run(path, before, out)
    return path, before, Sidecar.read(out, ModelMap.read(path))


@pytest.mark.parametrize("name", [*tiny.MOE_FAMILIES, "ernie4_5-moe"])
def test_every_family_is_trained(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    known = name in router_models.VARIANTS
    path = router_models.build(name, tmp_path) if known else tiny_model(name)
    out = tmp_path / "out.speculoe.gguf"
    before = calibrated(path, out)
    if not any(layer.predictable for layer in before.layers):
        with pytest.raises(ModelError, match="no layer that can be predicted"):
            run(path, before, out)
        return
    shares: list[float] = []

    made = run(path, before, out, progress=shares.append)

    found = Sidecar.read(out, ModelMap.read(path))
    assert shares == sorted(shares)
    assert 1.0 == pytest.approx(shares[-1])
    assert made.training == found.training
    assert found.mlp is not None
    for was, layer in zip(before.layers, found.layers, strict=True):
        assert was.predictable == layer.predictable
        np.testing.assert_array_equal(was.default_vectors, layer.default_vectors)
        if not layer.predictable:
            assert (was.strategy, was.reason) == (layer.strategy, layer.reason)
            assert layer.adapter is None and layer.embedding is None
            continue
        assert {*PREDICTED, "residual", "previous-token", "chance"} == layer.recall.keys()
        assert layer.adapter is not None and layer.embedding is not None
        if layer.strategy != "none":
            assert layer.recall[layer.strategy] == max(layer.recall[who] for who in PREDICTED)
            assert layer.recall[layer.strategy] >= layer.recall["quasi-hidden"]
    assert [out] == [file for file in tmp_path.iterdir() if "speculoe" in file.name]


def test_rates_are_those_of_what_the_file_holds(trained: tuple[Path, Sidecar, Sidecar]) -> None:
    path, before, found = trained
    model_map, gates = ModelMap.read(path), load_gates(ModelMap.read(path))
    with closing(Model(path, lazy_experts=False, repack=False)) as model:
        _, _, test = estimators._windows(model, TEXTS, 512, before)
        records: list[list[LayerRecord]] = []
        capture = Capture(
            [layer.index for layer in model_map.layers], lambda r: records[-1].append(r)
        )
        size = test.shape[1]
        with closing(Context(model, Shape(size, size, size, 1), watch=capture)) as context:
            for window in test:
                records.append([])
                capture.run(context, window.tolist())

    assert found.training is not None
    assert test.size == found.training.held_out
    for number, layer in enumerate(found.layers[1:], start=1):
        gate = gates[layer.block]
        assert isinstance(gate, Gate)
        asked = predictors(found, layer.block, gate)
        assert PREDICTED == tuple(asked)
        for who, predictor in asked.items():
            right, top = [], []
            for window in records:
                q = quasi_hidden(window[number - 1], found.layers[number - 1].default_vectors)
                with closing(NativeGate(predictor)) as native:
                    ids = native.route(q).ids
                np.testing.assert_array_equal(predictor.route(gate.normed(q)).ids, ids)
                hit = (ids[:, :, None] == window[number].ids[:, None, :]).any(2)
                right.append(hit.mean())
                top.append(hit[:, 0].mean())
            assert np.mean(right) == pytest.approx(layer.recall[who], abs=1e-6), who
            assert np.mean(top) == pytest.approx(layer.precision_top1[who], abs=1e-6), who


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(
    trained: tuple[Path, Sidecar, Sidecar], tmp_path: Path
) -> None:
    path, before, _ = trained
    files = [tmp_path / name for name in ("one.gguf", "two.gguf", "other.gguf")]
    for file, seed in zip(files, (0, 0, 1), strict=True):
        run(path, before, file, settings=replace(QUICK, seed=seed))
    one, two, other = (Sidecar.read(file, ModelMap.read(path)) for file in files)

    assert files[0].read_bytes() == files[1].read_bytes()
    for ours, same, theirs in zip(one.layers[1:], two.layers[1:], other.layers[1:], strict=True):
        assert ours.adapter is not None and same.adapter is not None and theirs.adapter is not None
        assert ours.adapter.up.any()
        np.testing.assert_array_equal(ours.adapter.up, same.adapter.up)
        assert not np.array_equal(ours.adapter.up, theirs.adapter.up)
    assert one.mlp is not None and other.mlp is not None
    assert one.mlp.contract.any()
    assert not np.array_equal(one.mlp.contract, other.mlp.contract)


def test_more_tokens_than_calibration_had_fit_ridge_anew(
    trained: tuple[Path, Sidecar, Sidecar], tmp_path: Path
) -> None:
    path, before, found = trained
    more = run(path, found, tmp_path / "out.gguf", tokens=1024, kinds=["adapter"])

    assert before.layers[1].delta_w is not None and found.layers[1].delta_w is not None
    np.testing.assert_array_equal(before.layers[1].delta_w, found.layers[1].delta_w)
    assert more.training is not None
    assert before.tokens < more.training.tokens + more.training.validation
    for was, layer in zip(found.layers[1:], more.layers[1:], strict=True):
        assert was.delta_w is not None and layer.delta_w is not None
        assert not np.array_equal(was.delta_w, layer.delta_w)
        # The network was trained for the estimator that went; where it was, so did the network.
        assert ("ridge" == was.mlp_base) == (layer.embedding is None)


def test_what_is_not_trained_again_stays_and_is_measured_again(
    trained: tuple[Path, Sidecar, Sidecar], tmp_path: Path
) -> None:
    path, _, found = trained
    again = run(path, found, tmp_path / "out.gguf", kinds=["mlp"], settings=replace(QUICK, seed=9))

    for was, layer in zip(found.layers[1:], again.layers[1:], strict=True):
        assert was.adapter is layer.adapter
        assert was.recall["adapter"] == layer.recall["adapter"]
        assert was.embedding is not None and layer.embedding is not None
        assert not np.array_equal(was.embedding, layer.embedding)


def test_a_network_can_stand_alone(trained: tuple[Path, Sidecar, Sidecar], tmp_path: Path) -> None:
    path, before, _ = trained
    alone = run(
        path, before, tmp_path / "out.gguf", kinds=["mlp"], settings=replace(QUICK, alone=True)
    )
    read = Sidecar.read(tmp_path / "out.gguf", ModelMap.read(path))

    assert {"none"} == {layer.mlp_base for layer in read.layers}
    gate = load_gates(ModelMap.read(path))[alone.layers[1].block]
    assert isinstance(gate, Gate)
    made = read.gate(alone.layers[1].block, gate, "mlp")
    assert made is not None and made.mlp is not None
    assert not made.mlp.adds
    assert made.bias is gate.bias


def test_windows_to_measure_on_are_none_that_anybody_learned_from(
    tiny_model: TinyModel, trained: tuple[Path, Sidecar, Sidecar]
) -> None:
    rng = np.random.default_rng(0)
    text = "".join(chr(97 + letter) for letter in rng.integers(0, 26, 30000))
    _, before, _ = trained
    with closing(Model(tiny_model("bailingmoe"), lazy_experts=False, repack=False)) as model:
        cut = calibration._windows(model, [text], 512, 128, 64)[0]
        for tokens in (128, 512, 700, 2048):
            learn, check, test = estimators._windows(model, [text], tokens, before)
            seen = [
                set(
                    map(
                        bytes,
                        np.lib.stride_tricks.sliding_window_view(part[:, 1:], 12, 1)
                        .reshape(-1, 12)
                        .astype(np.int32),
                    )
                )
                for part in (learn, check, cut, test)
            ]
            assert all(not seen[3] & other for other in seen[:3]), tokens
            assert not seen[0] & seen[1]
            assert tokens // learn.shape[1] == len(learn) + len(check)
            assert len(check) == max(1, (len(learn) + len(check)) // 8)


def test_the_best_predictor_is_taken_and_of_equals_the_cheapest() -> None:
    rates = {"quasi-hidden": 0.5, "ridge": 0.7, "adapter": 0.7, "mlp": 0.6, "previous-token": 0.9}

    assert "ridge" == best_strategy(rates)
    assert "mlp" == best_strategy(rates | {"mlp": 0.71})
    assert "quasi-hidden" == best_strategy({"quasi-hidden": 0.5})


@pytest.mark.parametrize("who", ["adapter", "mlp"])
def test_an_engine_predicts_with_what_was_trained_and_stays_exact(
    who: str, trained: tuple[Path, Sidecar, Sidecar], tmp_path: Path
) -> None:
    path, _, found = trained
    layers = tuple(
        replace(layer, strategy=who) if layer.predictable else layer for layer in found.layers
    )
    place = tmp_path / "out.speculoe.gguf"
    replace(found, layers=layers).write(place)
    predictor = QuasiHidden.of(
        ModelMap.read(path), Sidecar.read(place, ModelMap.read(path)), "hybrid"
    )
    assert all(bool(gate.params.mlp) == (who == "mlp") for gate in predictor.gates.values())
    predictor.close()
    hashes = set()
    for predict, loop in (("none", "python"), ("hybrid", "python"), ("hybrid", "native")):
        options = EngineOptions(
            expert_budget="60%", predict=predict, loop=loop, sidecar=place, threads=1, ctx=256
        )
        with Engine.open(path, options=options) as engine:
            *_, last = engine.generate(
                "The quick brown fox", sampling=Sampling(temp=0), max_tokens=30,
                logits_hash=True, ignore_end=True,
            )  # fmt: skip
        hashes.add(last.stats.logits_sha256)
        assert (predict == "hybrid") == (last.stats.slots.true_predicted > 0)

    assert 1 == len(hashes)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kinds": ["adapter", "forest"]}, "kinds forest; give one or more of adapter, mlp"),
        ({"kinds": []}, "kinds none; give"),
        ({"texts": []}, "texts have 0 tokens"),
        ({"texts": ["short " * 40]}, "give more text"),
    ],
)
def test_what_cannot_be_trained_with_is_refused_in_one_line(
    more: dict[str, object],
    message: str,
    trained: tuple[Path, Sidecar, Sidecar],
    tmp_path: Path,
) -> None:
    path, before, _ = trained
    with pytest.raises(OptionError, match=message) as raised:
        run(path, before, tmp_path / "out.gguf", **more)

    assert "\n" not in str(raised.value)
    assert [] == list(tmp_path.iterdir())


def test_without_torch_the_extra_is_named_before_anything_is_run(
    trained: tuple[Path, Sidecar, Sidecar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before, _ = trained
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match=r"pip install 'speculoe-local\[train\]'"):
        run(path, before, tmp_path / "out.gguf", progress=pytest.fail)


def test_all_links_of_the_sidecar_are_those_of_the_model(
    trained: tuple[Path, Sidecar, Sidecar],
) -> None:
    path, _, found = trained

    assert [link.target for link in links(ModelMap.read(path)) if link.usable is not None] == [
        layer.block for layer in found.layers if layer.predictable
    ]
