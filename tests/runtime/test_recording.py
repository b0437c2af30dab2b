"""Tokens are scored as answers are made; exact costs nothing, another model what its logits say."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.runtime import Engine, EngineOptions, Sampling
from speculoe_local.runtime import recording as spool
from speculoe_local.runtime.errors import BackendError, ContextError
from speculoe_local.runtime.recording import record, score, windows
from tests.models.fixtures import TinyModel
from tests.models.tiny import build

OPTIONS = EngineOptions(expert_budget="50%", threads=1, ctx=128)
TEXT = " ".join(f"word {n * 7919 % 1009} and then" for n in range(200))


def scored(engine: Engine, prompt: int = 4) -> list[list[int]]:
    tokens = engine.vocab.tokenize(TEXT)[:40]
    return windows(tokens, bos=[], window=16, prompt=prompt, scored=20)


def test_given_tokens_are_run_as_an_answer_of_the_same_tokens_is(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=OPTIONS) as engine:
        prompt = engine.vocab.tokenize("The quick brown fox")
        steps = list(
            engine.generate(
                prompt, sampling=Sampling(temp=0), max_tokens=12, ignore_end=True, logits_hash=True
            )
        )
        answer = [step.token for step in steps]
        rows = [row.copy() for row in engine.score([*prompt, *answer[:-1]], prompt=len(prompt))]
        engine.forget()
        again = list(
            engine.generate(
                prompt, sampling=Sampling(temp=0), max_tokens=12, ignore_end=True, logits_hash=True
            )
        )

    assert answer == [int(row.argmax()) for row in rows]
    digest = hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()
    assert digest == steps[-1].stats.logits_sha256 == again[-1].stats.logits_sha256


@pytest.mark.parametrize("family", ["qwen3moe", "qwen35moe"])  # the second cannot take tokens back
def test_scoring_does_not_depend_on_what_was_run_before(family: str, tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model(family), options=OPTIONS) as engine:
        tokens = engine.vocab.tokenize(TEXT)[:12]
        first = [row.copy() for row in engine.score(tokens, prompt=3)]
        list(engine.generate(tokens[:5], max_tokens=4))
        second = [row.copy() for row in engine.score(tokens, prompt=3)]

    assert 10 == len(first)
    np.testing.assert_array_equal(first, second)


def test_what_cannot_be_scored_is_refused(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=OPTIONS) as engine:
        for tokens, prompt in (([1, 2], 0), ([1, 2], 3), ([], 1)):
            with pytest.raises(ContextError, match="give 1 to all"):
                engine.score(tokens, prompt=prompt)
        with pytest.raises(ContextError, match="holds"):
            engine.score([1] * (engine.info.n_ctx + 1))


def test_an_interrupted_run_is_no_measurement(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=OPTIONS) as engine:
        count = iter(range(100))
        with pytest.raises(BackendError, match="interrupted after 3"):
            record(engine, scored(engine), 4, lambda: next(count) == 2 and engine.interrupt())


def test_exact_against_exact_is_zero_at_every_budget(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    with Engine.open(path, options=OPTIONS) as engine:
        recording = record(engine, scored(engine), 4)
    for budget in ("33%", "100%"):
        with Engine.open(path, options=replace(OPTIONS, expert_budget=budget)) as engine:
            positions = score(engine, recording)

        assert 20 == len(positions)
        assert {(0.0, True)} == {(position.kl, position.agree) for position in positions}
    recording.close()


def test_another_model_costs_what_the_logits_of_both_say(tmp_path: Path) -> None:
    one, other = (build("qwen3moe", tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2))
    rows = {}
    with Engine.open(one, options=OPTIONS) as engine:
        chunks = scored(engine)
        recording = record(engine, chunks, 4)
        rows[one] = [row for chunk in chunks for row in _copied(engine, chunk)]
    with recording, Engine.open(other, options=OPTIONS) as engine:
        found = score(engine, recording)
        rows[other] = [row for chunk in chunks for row in _copied(engine, chunk)]

    shares = {
        path: [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in of]
        for path, of in rows.items()
    }
    targets = [token for chunk in chunks for token in chunk[5:]]
    expected = [
        (float((p * np.log(p / q)).sum()), -np.log(p[t]), -np.log(q[t]))
        for p, q, t in zip(shares[one], shares[other], targets, strict=True)
    ]
    assert min(kl for kl, _, _ in expected) > 0.01
    np.testing.assert_allclose(
        expected, [(at.kl, at.nll_exact, at.nll) for at in found], rtol=1e-6, atol=1e-9
    )
    assert [p.argmax() == q.argmax() for p, q in zip(*shares.values(), strict=True)] == [
        position.agree for position in found
    ]


def _copied(engine: Engine, chunk: list[int]) -> list[np.ndarray]:
    """Float64 logits of the decode steps of a chunk whose last token is a target only."""
    return [row.astype(np.float64) for row in engine.score(chunk[:-1], prompt=4)][1:]


def test_windows_have_as_many_scored_positions_as_wanted() -> None:
    found = windows(range(100, 200), bos=[7], window=20, prompt=4, scored=40)

    assert [20, 20, 15] == [len(window) for window in found]
    assert 40 == sum(len(window) - 1 - 4 for window in found)
    assert {7} == {window[0] for window in found}
    assert [*range(100, 152)] == [token for window in found for token in window[1:]]


def test_windows_end_with_the_text() -> None:
    assert [[1, 2, 3, 4], [5, 6, 7]] == windows(range(1, 8), bos=[], window=4, prompt=1, scored=99)
    assert [] == windows([1, 2, 3], bos=[], window=9, prompt=2, scored=5)


def test_too_little_room_for_logits_is_said_before_anything_runs(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = spool.shutil.disk_usage("/")
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda _: usage._replace(free=10))
    with (
        Engine.open(tiny_model("qwen3moe"), options=OPTIONS) as engine,
        pytest.raises(BackendError, match="has 10; use fewer --tokens, or set TMPDIR"),
    ):
        record(engine, scored(engine), 4)
