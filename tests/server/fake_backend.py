"""A backend without a model: it answers each job with deltas that a test scripts.

    backend = FakeBackend(say("Hello", " world"))
    client = client_of(chat.router(FakeBackends(backend), Settings()))

A script is a function from the job to steps: a Delta is delivered, an exception raised, an
asyncio.Event waited for. `backend.jobs` records what was asked, `ticket.cancelled` who left.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from speculoe_local.runtime.llama import Fim, Vocabulary
from speculoe_local.runtime.slots import SlotStats
from speculoe_local.server.errors import BadRequest, ContextOverflow, UnknownModel
from speculoe_local.server.jobs import (
    Backend,
    BackendInfo,
    Delta,
    Finish,
    Job,
    LaneView,
    ModelEntry,
    Snapshot,
    Timings,
    TokenLogprob,
)

Step = Delta | BaseException | asyncio.Event
Script = Callable[[Job], Iterable[Step]]

SPECIALS = ("<bos>", "<|im_end|>", "<|im_start|>", "<fim_pre>", "<fim_suf>", "<fim_mid>", "<pad>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeVocabulary:
    """A token per byte, then `SPECIALS`; ids 0..255 are the bytes. Fulfils runtime's Vocabulary."""

    size = 256 + len(SPECIALS)
    bos, eos = 256, 257
    adds_bos = False
    handle = None

    def __init__(self, *, fim: bool = True) -> None:
        self.fim = Fim(259, 260, 261, 262, -1, -1) if fim else Fim(-1, -1, -1, -1, -1, -1)

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = True) -> list[int]:
        out = [self.bos] if add_bos and self.adds_bos else []
        while text:
            found = next((s for s in SPECIALS if special and text.startswith(s)), None)
            if found is not None:
                out.append(256 + SPECIALS.index(found))
                text = text[len(found) :]
            else:
                out += text[0].encode("utf-8", "replace")
                text = text[1:]
        return out

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        return SPECIALS[token - 256].encode() if special else b""

    def text_of(self, token: int) -> str:
        return "" if token < 0 else SPECIALS[token - 256] if token >= 256 else chr(token)

    def controls(self) -> tuple[str, ...]:
        return SPECIALS

    def ends(self, token: int) -> bool:
        return token == self.eos


class FakeTicket:
    """Plays its steps; `cancel` ends a wait."""

    def __init__(self, job: Job, steps: Iterable[Step], id_: str) -> None:
        self.job = job
        self.id = id_
        self.cancelled = asyncio.Event()
        self.played = False
        self._steps = iter(steps)

    def cancel(self) -> None:
        self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for step in self._steps:
            await asyncio.sleep(0)
            if isinstance(step, asyncio.Event):
                await self._either(step)
            elif isinstance(step, BaseException):
                raise step
            else:
                yield step
            if self.cancelled.is_set():
                yield Delta(finish="cancel", timings=Timings())
                break
        self.played = True

    async def _either(self, event: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(e.wait()) for e in (event, self.cancelled)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def entry(name: str = "fake", *, template: str | None = CHATML) -> ModelEntry:
    return ModelEntry(
        name=name,
        path=Path(f"/models/{name}.gguf"),
        size_bytes=1000,
        modified=1_700_000_000.0,
        digest="ab" * 32,
        architecture="qwen3moe",
        quantization="Q8_0",
        n_params=123,
        n_ctx_train=32768,
        n_embd=4,
        n_layer=2,
        n_vocab=FakeVocabulary.size,
        n_expert=8,
        n_expert_used=2,
        template=template,
        loaded=True,
    )


class FakeBackend:
    """Answers `submit` with the script; refuses what a real one would: overflow, empty prompts."""

    def __init__(
        self,
        script: Script,
        *,
        name: str = "fake",
        n_ctx: int = 4096,
        template: str | None = CHATML,
        fim: bool = True,
        refuse: Exception | None = None,
    ) -> None:
        self.script = script
        self.refuse = refuse
        self.jobs: list[Job] = []
        self.tickets: list[FakeTicket] = []
        self.vocab = cast(Vocabulary, FakeVocabulary(fim=fim))
        self._ids = itertools.count()
        self.info = BackendInfo(
            entry=entry(name, template=template),
            n_ctx=n_ctx,
            n_parallel=4,
            mode="exact",
            exactness="exact",
            tier="resident",
            residency=1.0,
            budget_bytes=0,
            load_s=0.5,
            loaded_at=1_700_000_000.0,
        )

    async def submit(self, job: Job) -> FakeTicket:
        if self.refuse is not None:
            raise self.refuse
        if not job.tokens:
            raise BadRequest("the prompt is empty; give at least one token", "prompt")
        if len(job.tokens) >= self.info.n_ctx:
            raise ContextOverflow(len(job.tokens), self.info.n_ctx)
        self.jobs.append(job)
        ticket = FakeTicket(job, self.script(job), f"t{next(self._ids)}")
        self.tickets.append(ticket)
        return ticket

    def prompt(self, at: int = -1) -> str:
        """The prompt of a recorded job as text, special tokens written out."""
        pieces = (self.vocab.piece(t, special=True) for t in self.jobs[at].tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def snapshot(self, *, layers: bool = False) -> Snapshot:
        return Snapshot(
            lanes=tuple(LaneView(i) for i in range(4)),
            queued=0,
            n_ctx=self.info.n_ctx,
            kv_tokens=0,
            accepted=len(self.jobs),
            finished={},
            prompt_tokens=0,
            cached_tokens=0,
            predicted_tokens=0,
            prompt_s=0.0,
            predicted_s=0.0,
            slots=SlotStats(),
            residency=1.0,
        )


class FakeBackends:
    """Some backends by name; with one, any name will do."""

    def __init__(self, *backends: FakeBackend, loading: Exception | None = None) -> None:
        self._by_name = {backend.info.name: backend for backend in backends}
        self._loading = loading
        self.strict = len(backends) > 1

    async def get(self, name: str | None) -> Backend:
        if self._loading is not None:
            raise self._loading
        if name in self._by_name:
            return self._by_name[name]
        if self.strict and name:
            raise UnknownModel(name, tuple(self._by_name))
        return next(iter(self._by_name.values()))

    def entries(self) -> tuple[ModelEntry, ...]:
        return tuple(backend.info.entry for backend in self._by_name.values())

    async def unload(self, name: str) -> bool:
        return False

    def loaded(self) -> tuple[Backend, ...]:
        return tuple(self._by_name.values())

    def progress(self) -> float | None:
        return None if self._loading is None else 0.5


def say(
    *texts: str,
    finish: Finish = "stop",
    stop_hit: str | None = None,
    before: Sequence[Step] = (),
    experts: Mapping[str, Any] | None = None,
) -> Script:
    """A script: one delta per text, a token per byte, then the finish. Logprobs where asked for."""

    def script(job: Job) -> Iterable[Step]:
        yield from before
        count = 0
        yield from _prompt_logprobs(job)
        for text in texts:
            tokens = tuple(text.encode())
            count += len(tokens)
            yield Delta(
                text=text,
                tokens=tokens,
                logprobs=_logprobs(job, tokens),
                timings=_timings(job, count),
            )
        figures = {"mode": "exact", "exactness": "exact", **(experts or {})}
        yield Delta(
            tokens=(FakeVocabulary.eos,) if finish == "stop" and stop_hit is None else (),
            finish=finish,
            stop_hit=stop_hit,
            timings=_timings(job, count, figures),
        )

    return script


def echo_prompt(job: Job) -> Iterable[Step]:
    """A script that answers with the prompt, so that each request has an answer of its own."""
    text = bytes(t for t in job.tokens if t < 256).decode("utf-8", "replace")
    return say(text)(job)


def embed(job: Job) -> Iterable[Step]:
    """A script for embeddings: a unit vector that depends on the prompt's length."""
    vector = np.array([1.0, len(job.tokens), 0.0, 2.0], np.float32)
    vector /= np.linalg.norm(vector)
    yield Delta(embedding=vector, finish="stop", timings=Timings(prompt_n=len(job.tokens)))


def client_of(*routers: APIRouter) -> TestClient:
    """A client over the given routes; what an app adds (keys, errors of its own) is not there."""
    app = FastAPI()
    for router in routers:
        app.include_router(router)
    return TestClient(app, raise_server_exceptions=False)


def _timings(job: Job, predicted: int, experts: Mapping[str, Any] | None = None) -> Timings:
    return Timings(
        prompt_n=len(job.tokens) - 1,
        cached_n=1,
        prompt_ms=10.0,
        predicted_n=predicted,
        predicted_ms=2.0 * predicted,
        experts=experts or {},
    )


def _logprobs(job: Job, tokens: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
    if job.top_logprobs is None:
        return ()
    return tuple(_logprob(token, job.top_logprobs) for token in tokens)


def _logprob(token: int, n: int) -> TokenLogprob:
    piece = bytes([token]) if token < 256 else b""
    others = tuple(((token + i) % 256, bytes([(token + i) % 256]), -0.5 - i) for i in range(n))
    return TokenLogprob(token, piece, -0.5, others)


def _prompt_logprobs(job: Job) -> Iterable[Delta]:
    if job.echo_logprobs:
        n = job.top_logprobs or 0
        first: tuple[TokenLogprob | None, ...] = (None,)
        yield Delta(prompt_logprobs=first + tuple(_logprob(t, n) for t in job.tokens[1:]))
