"""Experts that are not resident, computed by the CPU where their bytes lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert.calibrate import calibrate
from speculoe_local.runtime import Engine, EngineOptions, Sampling
from speculoe_local.runtime.bench import Plan, bench
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.opened import Opened, open_model
from speculoe_local.runtime.trace import as_chrome, record
from tests.models.fixtures import TinyModel
from tests.models.tiny import MOE_FAMILIES
from tests.runtime.reference import Logits

WAYS = ("cpu", "split", "auto")
PROMPT = tuple(range(20, 28))
TEXT = "Every layer asks its router which experts a token needs, and waits for them. " * 20


def options(misses: str = "cpu", **more: object) -> EngineOptions:
    """Plain kernels, so that it makes no difference to the bits who computes."""
    chosen: dict[str, object] = {
        "expert_budget": "45%",
        "threads": 2,
        "ctx": 256,
        "device": "cpu",
        "predict": "none",
        "repack": False,
        "misses": misses,
    }
    return EngineOptions(**(chosen | more))  # type: ignore[arg-type]


@contextmanager
def opened(path: Path, chosen: EngineOptions, **more: int) -> Iterator[Opened]:
    with closing(open_model(path, options=chosen, **more)) as model:  # type: ignore[arg-type]
        yield model
        if model.slots is not None:
            model.slots.check()


def decoded(model: Opened, n_steps: int = 16) -> Logits:
    """Logits [n_steps, n_vocab] of a prompt and then always the same tokens."""
    rows = []
    assert 0 == model.context.decode(PROMPT, 0)
    for step in range(n_steps):
        assert 0 == model.context.decode([(7 * step + 3) % 200], len(PROMPT) + step)
        rows.append(model.context.logits().copy())
    return np.stack(rows)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_family_gives_the_resident_bits_whoever_computes(
    family: str, tiny_model: TinyModel
) -> None:
    path = tiny_model(family)
    with opened(path, options("upload", expert_budget="100%")) as model:
        expected = decoded(model)

    for misses in WAYS:
        with opened(path, options(misses)) as model:
            got = decoded(model)

            assert model.slots is not None
            stats = model.slots.stats()
            assert expected.tobytes() == got.tobytes()
            assert 0 < stats.cpu_experts <= stats.requests - stats.hits
            assert 0 < stats.cpu_ns
            assert not model.rounded


@pytest.mark.parametrize("quant", ["F16", "Q8_0", "Q4_K", "MXFP4", "Q4_0"])
def test_every_weight_type_gives_the_resident_bits(quant: str, tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe", quant)
    with opened(path, options("upload", expert_budget="100%")) as model:
        expected = decoded(model)

    with opened(path, options()) as model:
        assert expected.tobytes() == decoded(model).tobytes()


def test_repacked_slots_round_differently_and_say_so(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe", "Q4_K"), options=options(repack=True)) as engine:
        *_, last = engine.generate(PROMPT, sampling=Sampling(temp=0), max_tokens=8, ignore_end=True)

        experts = last.stats.to_json("", "")["experts"]
        assert "rounded" == experts["exactness"]
        assert 0 < experts["cpu_experts"]
        assert "of misses computed by the CPU" in last.stats.line()


def test_sequences_decoded_together_share_what_is_computed(tiny_model: TinyModel) -> None:
    path = tiny_model("gpt-oss")
    rows = [[(3 + 5 * step + 11 * i, step, i) for i in range(3)] for step in range(10)]

    def run(chosen: EngineOptions) -> bytes:
        with opened(path, chosen, n_parallel=3, n_sequences=3) as model:
            found = []
            for row in rows:
                assert 0 == model.context.decode_many(row)
                found += [model.context.logits(i).tobytes() for i in range(3)]
            return b"".join(found)

    expected = run(options("upload", expert_budget="100%"))

    for misses in WAYS:
        assert expected == run(options(misses, expert_budget="75%"))


def test_nothing_waits_for_a_slow_link_and_slots_fill_all_the_same(tiny_model: TinyModel) -> None:
    with opened(tiny_model("qwen3moe"), options(link="3MB/s")) as model:
        assert model.slots is not None
        assert 0 == model.context.decode(PROMPT, 0)
        before = model.slots.stats()
        for step in range(100):
            assert 0 == model.context.decode([(7 * step + 3) % 200], len(PROMPT) + step)

        spent = model.slots.stats().since(before)
        assert 0 == spent.stall_ns
        assert spent.requests - spent.hits == spent.cpu_experts
        assert 0 < spent.hits
        assert 0 < spent.uploads < spent.cpu_experts


def test_where_the_link_is_slow_auto_leaves_most_to_the_cpu(tiny_model: TinyModel) -> None:
    with opened(tiny_model("qwen3moe"), options("auto", link="300KB/s")) as model:
        decoded(model, 40)

        assert model.slots is not None
        stats = model.slots.stats()
        assert 0.6 < stats.cpu_experts / (stats.requests - stats.hits)


def test_a_lossy_answer_is_the_same_whoever_computes(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("bailingmoe")
    sidecar = tmp_path / "model.speculoe.gguf"
    calibrate(path, sidecar, texts=[TEXT], tokens=128, held_out=32, threads=1)
    found = set()
    for misses in ("upload", *WAYS):
        chosen = options(misses, mode="speculate", sidecar=sidecar, unmeasured=True, predict=None)
        with Engine.open(path, options=chosen) as engine:
            *_, last = engine.generate(
                PROMPT, sampling=Sampling(temp=0), max_tokens=12, ignore_end=True, logits_hash=True
            )
            found.add(last.stats.logits_sha256)
            assert (misses != "upload") == (last.stats.slots.cpu_experts > 0)

    assert 1 == len(found)


def test_a_trace_shows_what_the_cpu_computed(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        events = as_chrome(record(engine, "Why?", max_tokens=6))["traceEvents"]

    assert any(e["ph"] == "X" and e["cat"] == "misses on the CPU" for e in events)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--misses 'gpu' is not known; use one of upload, cpu"):
        options("gpu")


def test_bench_compares_the_ways_and_checks_only_exact_runs(tiny_model: TinyModel) -> None:
    plan = Plan(
        tiny_model("qwen3moe", "Q4_K"),
        ("cache", "misses-cpu", "misses-auto"),
        options("upload", repack=True, expert_budget="45%"),
        prompt_tokens=16,
        tokens=6,
        rounds=2,
    )

    report = bench(plan)

    assert {"cache": "exact", "misses-cpu": "rounded", "misses-auto": "rounded"} == {
        run.name: run.exactness for run in report.runs
    }
    assert report.same_tokens
    assert {"misses-cpu/cache", "misses-auto/cache", "misses-auto/misses-cpu"} == set(report.ratios)
