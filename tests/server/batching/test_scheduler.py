"""One model, several answers: what each gets is what it would get alone."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speculoe_local.runtime import Engine, EngineOptions, Sampling
from speculoe_local.runtime.errors import BackendError, SourceError
from speculoe_local.runtime.opened import open_model
from speculoe_local.server.batching.answers import Answer
from speculoe_local.server.batching.diskcache import DiskCache
from speculoe_local.server.batching.runner import Runner, sequences_for
from speculoe_local.server.batching.scheduler import Scheduler
from speculoe_local.server.catalog import entry_of
from speculoe_local.server.errors import BadRequest, ContextOverflow, QueueFull, ShuttingDown
from speculoe_local.server.grammar.gbnf import literal
from speculoe_local.server.jobs import Delta, Job
from tests.models.fixtures import TinyModel

GREEDY = Sampling(temp=0)
WORDS = ("The quick brown fox", "jumps over", "the lazy dog and then it", "rests", "a long while")


def opened(
    path: Path,
    *,
    parallel: int = 4,
    queue: int = 64,
    shared: bool = False,
    disk: DiskCache | None = None,
    **more: object,
) -> Scheduler:
    options = EngineOptions(**({"expert_budget": "60%", "threads": 1, "ctx": 512} | more))  # type: ignore[arg-type]
    model = open_model(
        path,
        options=options,
        n_parallel=parallel,
        n_sequences=sequences_for(parallel, shared=shared),
        shared=shared,
    )
    return Scheduler(
        model, entry_of("tiny", path), parallel=parallel, queue=queue, shared=shared, disk=disk
    )


@pytest.fixture(scope="module")
def backend(tiny_model: TinyModel) -> Iterator[Scheduler]:
    scheduler = opened(tiny_model("qwen3moe"))
    yield scheduler
    assert scheduler.close()


def job(backend: Scheduler, text: str, n: int = 12, **more: object) -> Job:
    tokens = tuple(backend.vocab.tokenize(text))
    return Job(tokens, **({"sampling": GREEDY, "max_tokens": n, "ignore_end": True} | more))  # type: ignore[arg-type]


async def all_of(backend: Scheduler, asked: Job) -> list[Delta]:
    return [delta async for delta in await backend.submit(asked)]


def run(answers: Awaitable[list[Delta]]) -> list[Delta]:
    async def main() -> list[Delta]:
        return await answers

    return asyncio.run(main())


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


@asynccontextmanager
async def closing(backend: Scheduler) -> AsyncIterator[Scheduler]:
    try:
        yield backend
    finally:
        assert await asyncio.to_thread(backend.close)


def test_an_answer_is_what_the_engine_alone_gives(
    tiny_model: TinyModel, backend: Scheduler
) -> None:
    options = EngineOptions(expert_budget="60%", threads=1, ctx=512)
    with Engine.open(tiny_model("qwen3moe"), options=options) as engine:
        steps = engine.generate(WORDS[0], sampling=GREEDY, max_tokens=20, ignore_end=True)
        expected = "".join(step.text for step in steps)

    found = run(all_of(backend, job(backend, WORDS[0], 20)))

    assert expected == text_of(found)
    assert ["length"] == [d.finish for d in found if d.finish]
    assert 20 == found[-1].timings.predicted_n  # type: ignore[union-attr]
    assert "disk-ram" == found[-1].timings.experts["tier"]  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["qwen3moe", "bailingmoe", "qwen35moe", "llama"])
def test_answers_side_by_side_are_those_one_after_the_other(
    family: str, tiny_model: TinyModel
) -> None:
    async def main() -> None:
        async with closing(opened(tiny_model(family), parallel=3)) as scheduler:
            prompts = [word * (1 + 3 * i) for i, word in enumerate(WORDS * 2)]
            jobs = [job(scheduler, p, 10, cache_prompt=False) for p in prompts]
            expected = [tokens_of(await all_of(scheduler, j)) for j in jobs]

            together = await asyncio.gather(*(all_of(scheduler, j) for j in jobs))

            assert expected == [tokens_of(deltas) for deltas in together]

    asyncio.run(main())


def test_rows_of_a_step_rise_by_sequence_so_that_they_run_as_one_graph() -> None:
    """llama.cpp cuts a batch wherever the next sequence is not the neighbour of the one before."""
    runner: Any = Runner.__new__(Runner)
    order: list[int] = []
    runner.opened = SimpleNamespace(speculate=lambda _on: None)
    runner._run = lambda parts, _read: order.extend(part.answer.place.sequence for part in parts)

    runner.run_answers(
        [SimpleNamespace(tokens=[1, 2], place=SimpleNamespace(sequence=n)) for n in (2, 0, 3, 1)]
    )

    assert [0, 1, 2, 3] == order


def test_the_next_turn_runs_only_what_is_new(backend: Scheduler) -> None:
    async def main() -> None:
        first = job(backend, "Once upon a time there was a server. " * 3)
        answer = await all_of(backend, first)
        turn = replace(first, tokens=(*first.tokens, *tokens_of(answer), *first.tokens[:5]))
        fresh = await all_of(backend, replace(turn, cache_prompt=False))

        found = await all_of(backend, turn)

        timings = found[-1].timings
        assert timings is not None
        assert len(first.tokens) + len(tokens_of(answer)) - 1 == timings.cached_n
        assert len(turn.tokens) == timings.cached_n + timings.prompt_n
        assert tokens_of(fresh) == tokens_of(found)

    asyncio.run(main())


def test_choices_of_one_prompt_share_its_kv(backend: Scheduler) -> None:
    async def main() -> None:
        asked = job(backend, "Nothing like this was asked before, " * 4, sampling=Sampling(seed=5))
        choices = await asyncio.gather(
            *(all_of(backend, replace(asked, sampling=Sampling(seed=s))) for s in range(4))
        )

        cached = sorted(c[-1].timings.cached_n for c in choices)  # type: ignore[union-attr]
        assert 4 == len({tuple(tokens_of(c)) for c in choices})
        assert len(asked.tokens) - 1 not in cached[:1]

    asyncio.run(main())


def test_a_seed_makes_an_answer_repeatable(backend: Scheduler) -> None:
    asked = job(backend, WORDS[2], sampling=Sampling(seed=11, temp=1.5))

    assert tokens_of(run(all_of(backend, asked))) == tokens_of(run(all_of(backend, asked)))


def test_a_stop_string_ends_an_answer_and_is_named(backend: Scheduler) -> None:
    whole = text_of(run(all_of(backend, job(backend, WORDS[1], 30))))
    stop = whole[7:10]

    found = run(all_of(backend, job(backend, WORDS[1], 30, stop=(stop,))))

    assert whole[: whole.index(stop)] == text_of(found)
    assert ("stop", stop) == (found[-1].finish, found[-1].stop_hit)


def test_a_grammar_is_obeyed_to_its_end(backend: Scheduler) -> None:
    grammar = 'root ::= "yes " [0-9]{4} "!"'

    found = run(all_of(backend, job(backend, WORDS[1], 60, grammar=grammar, ignore_end=False)))

    text = text_of(found)
    assert "yes " == text[:4] and text[4:8].isdigit() and "!" == text[8:]
    assert "stop" == found[-1].finish


def test_a_grammar_sleeps_until_its_trigger(backend: Scheduler) -> None:
    free = text_of(run(all_of(backend, job(backend, WORDS[3], 40, ignore_end=False))))
    found = re.search("[A-Za-z]", free)
    assert found is not None
    trigger = found[0]
    asked = job(
        backend,
        WORDS[3],
        80,
        grammar=f'root ::= {literal(trigger)} "<" [a-c]{{6}} ">"',
        grammar_triggers=(re.escape(trigger),),
        ignore_end=False,
    )

    text = text_of(run(all_of(backend, asked)))

    before, _, after = text.partition(trigger)
    assert free.partition(trigger)[0] == before
    assert re.fullmatch("<[a-c]{6}>", after)


def test_a_grammar_that_does_not_fit_what_was_written_sleeps_on(backend: Scheduler) -> None:
    free = text_of(run(all_of(backend, job(backend, WORDS[3], 40))))
    asked = job(backend, WORDS[3], 40, grammar='root ::= "not that"', grammar_triggers=(".",))

    assert free == text_of(run(all_of(backend, asked)))


def test_logprobs_are_those_of_the_logits(tiny_model: TinyModel, backend: Scheduler) -> None:
    asked = job(backend, WORDS[0], 3, top_logprobs=4)

    found = [row for delta in run(all_of(backend, asked)) for row in delta.logprobs]

    options = EngineOptions(expert_budget="60%", threads=1, ctx=512)
    tokens = [*asked.tokens, *(row.token for row in found)]
    with Engine.open(tiny_model("qwen3moe"), options=options) as engine:
        for row, logits in zip(found, engine.score(tokens, prompt=len(asked.tokens)), strict=False):
            exact = logits.astype(np.float64)
            exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
            assert exact[row.token] == pytest.approx(row.logprob, abs=1e-4)
            assert list(np.argsort(-exact)[:4]) == [t for t, _, _ in row.top]
    assert 3 == len(found)


def test_an_echo_scores_the_prompt_as_stepping_through_it_does(
    tiny_model: TinyModel, backend: Scheduler
) -> None:
    asked = job(backend, "The end of a prompt is not the end of it all", 0, echo_logprobs=True)

    (*_, last) = run(all_of(backend, asked))

    assert "length" == last.finish
    scores = last.prompt_logprobs
    assert len(asked.tokens) == len(scores)
    assert scores[0] is None
    options = EngineOptions(expert_budget="60%", threads=1, ctx=512)
    with Engine.open(tiny_model("qwen3moe"), options=options) as engine:
        for i, logits in enumerate(engine.score(asked.tokens)):
            if i + 1 == len(scores):
                break
            exact = logits.astype(np.float64)
            exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
            score = scores[i + 1]
            assert score is not None
            assert asked.tokens[i + 1] == score.token
            assert exact[score.token] == pytest.approx(score.logprob, abs=2e-3)


def test_an_embedding_is_of_unit_length_and_depends_on_the_text(backend: Scheduler) -> None:
    async def main() -> list[Delta]:
        texts = ("a first text", "a first text", "something else entirely")
        return [(await all_of(backend, job(backend, t, embeddings=True)))[-1] for t in texts]

    first, again, other = (d.embedding for d in asyncio.run(main()))
    assert first is not None and again is not None and other is not None
    assert 1 == pytest.approx(float(np.linalg.norm(first)), abs=1e-5)
    assert np.array_equal(first, again)
    assert float(first @ other) < 0.999


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_an_embedding_does_not_depend_on_how_the_prompt_is_cut(
    pooling: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculoe_local.server.batching.runner._pooling", lambda _model: pooling)

    async def embed(ubatch: int, *texts: str) -> list[np.ndarray]:
        async with closing(opened(tiny_model("llama"), batch=ubatch, ubatch=ubatch)) as scheduler:
            jobs = [job(scheduler, text, embeddings=True) for text in texts]
            found = [(await all_of(scheduler, j))[-1].embedding for j in jobs]
            return [each for each in found if each is not None]

    text = "a text of some length, " * 4
    whole, other = asyncio.run(embed(256, text, text + "and its end"))
    (pieces,) = asyncio.run(embed(16, text))

    assert 0.999 < float(whole @ pieces)
    assert ("first" == pooling) == (float(whole @ other) > 0.9999)


def test_a_client_that_leaves_frees_its_lane_and_what_waits_gets_it(tiny_model: TinyModel) -> None:
    async def main() -> None:
        async with closing(opened(tiny_model("qwen3moe"), parallel=1)) as scheduler:
            endless = await scheduler.submit(job(scheduler, WORDS[0], 400))
            queued = await scheduler.submit(job(scheduler, WORDS[1], 400))
            waiting = asyncio.ensure_future(all_of(scheduler, job(scheduler, WORDS[2], 4)))
            await anext(aiter(endless))
            queued.cancel()
            assert "cancel" == [d async for d in queued][-1].finish
            endless.cancel()
            assert "cancel" == [d async for d in endless][-1].finish

            assert "length" == (await waiting)[-1].finish
            assert scheduler.idle

    asyncio.run(main())


def test_a_cancelled_prompt_ends_within_one_ubatch(tiny_model: TinyModel) -> None:
    async def main() -> None:
        async with closing(opened(tiny_model("qwen3moe"), batch=16, ubatch=16)) as scheduler:
            ticket = await scheduler.submit(job(scheduler, "word " * 90, 5))
            progress = []
            async for delta in ticket:
                progress.append(delta)
                ticket.cancel()
            assert "cancel" == progress[-1].finish
            assert progress[0].prompt_done < 1
            assert len(progress) < 6

    asyncio.run(main())


def test_prompts_that_do_not_fit_name_both_numbers(backend: Scheduler) -> None:
    with pytest.raises(ContextOverflow, match=r"has 513 tokens, the context holds 512"):
        run(all_of(backend, Job((5,) * 513)))
    with pytest.raises(BadRequest, match="empty"):
        run(all_of(backend, Job(())))
    with pytest.raises(BadRequest, match="token 999999999 is not in"):
        run(all_of(backend, Job((999999999,))))


def test_an_answer_ends_where_the_context_does(backend: Scheduler) -> None:
    found = run(all_of(backend, Job((5,) * 500, GREEDY, ignore_end=True)))

    assert "length" == found[-1].finish
    assert 12 == len(tokens_of(found))


def test_a_full_queue_refuses_and_says_when_to_come_back(tiny_model: TinyModel) -> None:
    async def main() -> None:
        async with closing(opened(tiny_model("qwen3moe"), parallel=1, queue=1)) as scheduler:
            running = await scheduler.submit(job(scheduler, WORDS[0], 300))
            await anext(aiter(running))
            waiting = await scheduler.submit(job(scheduler, WORDS[1], 2))
            with pytest.raises(QueueFull) as caught:
                await scheduler.submit(job(scheduler, WORDS[2], 2))
            assert 1 <= caught.value.retry_after <= 60
            running.cancel()
            assert "length" == [d async for d in waiting][-1].finish

    asyncio.run(main())


def test_answers_that_outgrow_a_shared_context_all_come_to_their_end(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked: list[object] = []
    park = Runner.park

    def watched(self: Runner, answer: Answer) -> None:
        parked.append(answer)
        park(self, answer)

    monkeypatch.setattr(Runner, "park", watched)

    async def main() -> None:
        shared = opened(tiny_model("qwen3moe"), ctx=256, parallel=3, shared=True)
        async with closing(shared) as scheduler:
            jobs = [job(scheduler, word * 3, 120) for word in WORDS[:3]]

            together = await asyncio.gather(*(all_of(scheduler, j) for j in jobs))

            assert [120] * 3 == [len(tokens_of(deltas)) for deltas in together]
            assert parked
            assert 256 == scheduler.snapshot().kv_size

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
def test_a_copied_preamble_gives_what_one_that_was_run_gives(
    shared: bool, tiny_model: TinyModel
) -> None:
    preamble = "All conversations begin with these very words, "

    async def main() -> None:
        async with closing(opened(tiny_model("qwen3moe"), shared=shared)) as scheduler:
            start = job(scheduler, preamble * 6, 0)
            turn = replace(start, tokens=(*start.tokens, 7, 8, 9), max_tokens=12)
            other = replace(start, tokens=(*start.tokens, *[11, 12] * 50), max_tokens=3)
            await all_of(scheduler, start)
            expected = await all_of(scheduler, turn)

        async with closing(opened(tiny_model("qwen3moe"), shared=shared)) as scheduler:
            await all_of(scheduler, other)
            found = await all_of(scheduler, turn)
            again = await all_of(scheduler, replace(other, tokens=(*other.tokens, 5)))

        for deltas in (expected, found):
            assert len(start.tokens) == deltas[-1].timings.cached_n  # type: ignore[union-attr]
        assert tokens_of(expected) == tokens_of(found)
        assert len(other.tokens) == again[-1].timings.cached_n  # type: ignore[union-attr]

    asyncio.run(main())


def test_a_shared_context_shares_a_preamble(tiny_model: TinyModel) -> None:
    async def main() -> None:
        async with closing(opened(tiny_model("qwen3moe"), ctx=256, shared=True)) as scheduler:
            preamble = "the preamble of all requests, " * 4
            jobs = [job(scheduler, preamble + word, 6) for word in WORDS[:4]]
            await all_of(scheduler, jobs[0])

            found = await asyncio.gather(*(all_of(scheduler, j) for j in jobs))

            least = len(scheduler.vocab.tokenize(preamble)) - 2
            assert all(least <= d[-1].timings.cached_n for d in found)  # type: ignore[union-attr]
            assert scheduler.snapshot().kv_tokens < 256

    asyncio.run(main())


def test_a_read_error_ends_the_answers_that_meet_it_and_no_other(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    whole = tiny_model("qwen3moe").read_bytes()
    path.write_bytes(whole)

    async def main() -> None:
        async with closing(opened(path, expert_budget="40%")) as scheduler:
            asked = job(scheduler, WORDS[0], 12)
            expected = tokens_of(await all_of(scheduler, replace(asked, cache_prompt=False)))
            os.truncate(path, len(whole) // 2)
            with pytest.raises(SourceError, match="layer"):
                await all_of(scheduler, job(scheduler, "Other words bring other experts " * 4))
            path.write_bytes(whole)
            again = await all_of(scheduler, replace(asked, cache_prompt=False))
            assert expected == tokens_of(again)
            assert scheduler.snapshot().finished["error"] == 1

    asyncio.run(main())


def test_closing_ends_open_answers_with_an_error(tiny_model: TinyModel) -> None:
    async def main() -> None:
        scheduler = opened(tiny_model("qwen3moe"), parallel=1)
        running = await scheduler.submit(job(scheduler, WORDS[0], 400))
        waiting = await scheduler.submit(job(scheduler, WORDS[1], 400))
        await anext(aiter(running))
        assert await asyncio.to_thread(scheduler.close)
        for ticket in (running, waiting):
            with pytest.raises(ShuttingDown):
                [d async for d in ticket]
        with pytest.raises(ShuttingDown):
            await scheduler.submit(Job((1, 2, 3)))
        with pytest.raises(BackendError, match="closed"):
            scheduler.vocab.tokenize("too late")
        assert scheduler.snapshot().queued == 0

    asyncio.run(main())


def test_a_preamble_outlives_the_server(tiny_model: TinyModel, tmp_path: Path) -> None:
    preamble = "You are an assistant that knows many tools. " * 6

    def disk() -> DiskCache:
        return DiskCache(tmp_path / "cache", "key", max_bytes=1 << 30, min_tokens=32)

    async def first() -> list[int]:
        async with closing(opened(tiny_model("qwen3moe"), disk=disk())) as scheduler:
            await all_of(scheduler, job(scheduler, preamble + "Hello", 8))
            again = await all_of(scheduler, job(scheduler, preamble + "Hello", 8))
            return tokens_of(again)  # from memory: batches of the same shape

    async def second(text: str) -> tuple[list[int], int]:
        async with closing(opened(tiny_model("qwen3moe"), disk=disk())) as scheduler:
            found = await all_of(scheduler, job(scheduler, preamble + text, 8))
            assert found[-1].timings is not None
            return tokens_of(found), found[-1].timings.cached_n

    expected = asyncio.run(first())
    found, cached = asyncio.run(second("Hello"))
    assert expected == found
    assert cached > 100
    for path in (tmp_path / "cache").iterdir():
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)
    assert 0 == asyncio.run(second("Hello"))[1]


def test_the_snapshot_counts_what_was_done(backend: Scheduler) -> None:
    before = backend.snapshot()
    run(all_of(backend, job(backend, "count me", 7)))
    after = backend.snapshot()

    assert 1 == after.accepted - before.accepted
    assert 1 == after.finished["length"] - before.finished["length"]
    assert 7 == after.predicted_tokens - before.predicted_tokens
    assert 0 < after.kv_tokens <= after.kv_size
    assert after.slots.requests > before.slots.requests
    assert all(lane.job is None for lane in after.lanes)
