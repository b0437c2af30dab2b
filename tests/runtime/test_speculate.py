"""Lossy modes execute what was predicted, weigh it as asked, leave prompts alone, and say what they are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert.calibrate import calibrate
from speculoe_local.runtime import Engine, EngineOptions, Sampling, placement
from speculoe_local.runtime.engine import Step
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.gating import Gate, NativeGate, load_gates
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.predict import Floats, Ids, QuasiHidden, Tap
from speculoe_local.runtime.sidecar import Sidecar
from speculoe_local.runtime.slots import TapRoom
from tests.models.fixtures import TinyModel
from tests.models.tiny import MOE_FAMILIES

PROMPT = "The quick brown fox jumps over the lazy dog."
TEXT = (
    "Every layer asks its router which experts a token needs, and waits until they are there. " * 40
)
PREDICTED = ("bailingmoe", "deepseek2", "gpt-oss", "qwen3moe")
Calibrated = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def calibrated(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    """Model and sidecar of a family."""
    folder = tmp_path_factory.mktemp("sidecars")

    def get(family: str) -> tuple[Path, Path]:
        out = folder / f"{family}.speculoe.gguf"
        if not out.exists():
            calibrate(tiny_model(family), out, texts=[TEXT], tokens=256, held_out=64, threads=1)
        return tiny_model(family), out

    return get


def options(sidecar: Path | None, **more: object) -> EngineOptions:
    chosen: dict[str, object] = {
        "expert_budget": "60%",
        "mode": "speculate",
        "unmeasured": True,
        "threads": 1,
        "ctx": 256,
        "sidecar": sidecar,
    }
    return EngineOptions(**(chosen | more))  # type: ignore[arg-type]


def answer(engine: Engine, prompt: str | list[int] = PROMPT, tokens: int = 24) -> Step:
    *_, last = engine.generate(
        prompt, sampling=Sampling(temp=0), max_tokens=tokens, logits_hash=True, ignore_end=True
    )
    engine.check()
    return last


def hashed(path: Path, chosen: EngineOptions) -> str | None:
    with Engine.open(path, options=chosen) as engine:
        return answer(engine).stats.logits_sha256


@pytest.mark.parametrize("weights", ["predicted", "true"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_a_lossy_answer_depends_neither_on_budget_nor_on_timing(
    family: str, weights: str, calibrated: Calibrated
) -> None:
    path, sidecar = calibrated(family)
    smallest = placement.plan(ModelMap.read(path), placement.parse_budget("100%")).smallest_bytes
    if not any(layer.predictable for layer in Sidecar.read(sidecar, ModelMap.read(path)).layers):
        with pytest.raises(OptionError, match="no layer of"):
            Engine.open(path, options=options(sidecar, weights=weights))
        return

    expected = hashed(path, options(sidecar, weights=weights))
    assert expected != hashed(path, options(sidecar, mode="exact"))
    for more in (
        {"expert_budget": str(smallest)},
        {"expert_budget": "97%"},
        {"link": "50MB/s,5us", "upload_threads": 1},
        {"buffers": "two-layer"},
    ):
        assert expected == hashed(path, options(sidecar, weights=weights, **more)), more


class Watcher(threading.Thread):
    """Copies every tap of an engine that it is quick enough for."""

    def __init__(self, engine: Engine, n_embd: int) -> None:
        super().__init__()
        assert engine.slots is not None
        self._slots = engine.slots
        self._room = TapRoom(n_embd, 8)
        self.taps: list[Tap] = []
        self._slots.open_taps(n_embd)

    def run(self) -> None:
        room = self._room
        while (block := self._slots.next_tap(room, 1000)) != -2:
            if block >= 0:
                arrays = (
                    room.residual,
                    room.shared,
                    room.ids[: room.n_used],
                    room.weights[: room.n_used],
                )
                self.taps.append(Tap(block, *(a.copy() for a in arrays)))  # type: ignore[arg-type]

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._slots.close_taps()
        self.join()


def routed(gate: NativeGate, state: Floats) -> tuple[Ids, Floats]:
    found = gate.route(state[None])
    return found.ids[0], found.weights[0]


@pytest.mark.parametrize("weights", ["predicted", "true"])
@pytest.mark.parametrize("family", PREDICTED)
def test_layers_execute_what_the_layer_before_them_predicted(
    family: str, weights: str, calibrated: Calibrated
) -> None:
    path, sidecar = calibrated(family)
    model = ModelMap.read(path)
    # Each layer waits for its link long enough for the watcher to see every tap.
    slow = options(sidecar, weights=weights, buffers="two-layer", link="1GB/s,4ms")
    with Engine.open(path, options=slow) as engine, Watcher(engine, model.n_embd) as watcher:
        answer(engine, tokens=12)
    predictor = QuasiHidden.of(model, Sidecar.read(sidecar, model), "quasi-hidden")
    routers = {b: NativeGate(g) for b, g in load_gates(model).items() if isinstance(g, Gate)}

    compared = 0
    for before, now in zip(watcher.taps, watcher.taps[1:], strict=False):
        if predictor.source.get(now.block) != before.block:
            continue
        compared += 1
        add = before.shared + before.weights @ predictor.default_vectors[before.block][before.ids]
        ids, by_prediction = routed(predictor.gates[now.block], before.residual + add)
        assert ids[: len(now.ids)].tolist() == now.ids.tolist()
        if weights == "predicted":
            np.testing.assert_allclose(by_prediction, now.weights, rtol=1e-4)
        else:
            router = routers[now.block]
            own_ids, own = routed(router, now.residual)
            true = dict(zip(own_ids.tolist(), own.tolist(), strict=False))
            shared = [e for e in now.ids.tolist() if e in true]
            if len(shared) == len(
                own
            ):  # the router would have chosen the same: its weights, to the bit's noise
                np.testing.assert_allclose(
                    [true[e] for e in now.ids.tolist()], now.weights, rtol=2e-2
                )
    assert compared >= 8


@pytest.mark.parametrize("mode", ["speculate", "estimate", "hybrid"])
def test_prompts_take_the_true_router_even_when_they_are_one_token(
    mode: str, calibrated: Calibrated
) -> None:
    path, sidecar = calibrated("bailingmoe")
    with Engine.open(path, options=options(None, mode="exact", predict="none")) as exact:
        prompt = exact.vocab.tokenize(PROMPT)
        alone = answer(exact, prompt[:1], tokens=1).stats.logits_sha256
        exact.forget()
        whole = answer(exact, prompt, tokens=1).stats.logits_sha256
    with Engine.open(path, options=options(sidecar, mode=mode)) as lossy:
        answer(lossy, prompt, tokens=8)  # from here on decode steps execute predictions
        lossy.forget()

        assert alone == answer(lossy, prompt[:1], tokens=1).stats.logits_sha256
        lossy.forget()
        assert whole == answer(lossy, prompt, tokens=1).stats.logits_sha256
        assert whole == answer(lossy, prompt, tokens=1).stats.logits_sha256  # its last token alone


def test_a_lossy_run_says_so(calibrated: Calibrated) -> None:
    path, sidecar = calibrated("qwen3moe")
    with Engine.open(path, options=options(sidecar)) as engine:
        last = answer(engine, tokens=4)
        assert "speculate" == engine.info.mode
    experts = last.stats.to_json("", "length")["experts"]

    assert ("speculate", "lossy", None) == (experts["mode"], experts["exactness"], experts["kl"])
    assert "lossy (speculate, never measured)" in last.stats.line()


def test_with_all_experts_resident_a_lossy_mode_is_exact(calibrated: Calibrated) -> None:
    path, sidecar = calibrated("qwen3moe")
    with Engine.open(path, options=options(sidecar, expert_budget="100%")) as engine:
        assert "exact" == engine.info.mode
        assert (
            "exact" == answer(engine, tokens=4).stats.to_json("", "length")["experts"]["exactness"]
        )


def test_a_lossy_mode_without_sidecar_or_figures_is_refused(calibrated: Calibrated) -> None:
    path, sidecar = calibrated("qwen3moe")
    with pytest.raises(OptionError, match="needs a sidecar; run `speculoe-local calibrate"):
        Engine.open(path, options=options(None))
    with pytest.raises(OptionError, match="never measured on this model; run `speculoe-local eval"):
        Engine.open(path, options=options(sidecar, unmeasured=False))
