"""Many prompts in one request: jobs in flight as many as may run, the others behind them.

A list of prompts is one request and must not fill the queue that others wait in. Knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.errors import BadRequest, ContextOverflow, QueueFull
from speculoe_local.server.http.wire import Tickets
from speculoe_local.server.jobs import Backend, Delta, Job, Ticket

__all__ = ["MAX_PROMPTS", "Tokens", "prompts_of", "run_batch", "token_lists"]

MAX_PROMPTS = 2048
_RETRY_S = 0.05

Item = tuple[int, Delta]


Tokens = tuple[int, ...]


async def prompts_of(
    prompts: Any, vocab: Vocabulary, *, field: str, special: bool = True, each: int = 1
) -> list[tuple[Tokens, str | None]]:
    """`token_lists`, off the event loop; `each` answers are wanted per prompt."""
    if isinstance(prompts, list) and len(prompts) * each > MAX_PROMPTS:
        raise BadRequest(
            f"{field} asks for {len(prompts) * each} answers, the limit is {MAX_PROMPTS}", field
        )
    return await asyncio.to_thread(token_lists, prompts, vocab, field=field, special=special)


def token_lists(
    prompts: Any, vocab: Vocabulary, *, field: str, special: bool = True
) -> list[tuple[Tokens, str | None]]:
    """Prompts as tokens, with their text where it was text: a text, tokens, or a list of either.

    Raises BadRequest naming `field`.
    """
    if isinstance(prompts, str) or (
        isinstance(prompts, list) and prompts and all(map(_is_token, prompts))
    ):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts:
        raise BadRequest(
            f"{field} is empty or no text; give a text, tokens or a list of them", field
        )
    return [_one(each, vocab, field, special) for each in prompts]


def _one(prompt: Any, vocab: Vocabulary, field: str, special: bool) -> tuple[Tokens, str | None]:
    if isinstance(prompt, str):
        tokens = vocab.tokenize(prompt, special=special, add_bos=True)
        # Nothing to go on from but the begin of text, where the model has one.
        return tuple(tokens) or ((vocab.bos,) if vocab.bos >= 0 else ()), prompt
    if isinstance(prompt, list) and prompt and all(map(_is_token, prompt)):
        for token in prompt:
            if not 0 <= token < vocab.size:
                raise BadRequest(
                    f"{field} has token {token}, the model's are 0..{vocab.size - 1}", field
                )
        return tuple(prompt), None
    if (
        isinstance(prompt, list)
        and prompt
        and all(isinstance(p, str) or _is_token(p) for p in prompt)
    ):
        tokens = []
        for i, part in enumerate(prompt):
            tokens += (
                vocab.tokenize(part, special=special, add_bos=i == 0)
                if isinstance(part, str)
                else _one([part], vocab, field, special)[0]
            )
        return tuple(tokens), None
    raise BadRequest(f"{field} has an entry that is no text and no list of tokens", field)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def run_batch(
    backend: Backend,
    jobs: Sequence[Job],
    tickets: Tickets,
    *,
    parts: Sequence[Tickets] | None = None,
) -> AsyncGenerator[Item, None]:
    """Deltas of all jobs with the job's place, as they come. The first error ends it.

    `parts` has each job's own share of `tickets`, where one may be cancelled alone.
    Raises ContextOverflow before any job runs. A full queue is an error for the first job only; later ones
    wait for room.
    """
    for job in jobs:
        if len(job.tokens) >= backend.info.n_ctx:
            raise ContextOverflow(len(job.tokens), backend.info.n_ctx)
    arrived: asyncio.Queue[Item | BaseException | None] = asyncio.Queue()
    room = asyncio.Semaphore(backend.info.n_parallel)

    async def pump(place: int, job: Job) -> None:
        try:
            async with room:
                mine = parts[place] if parts is not None else tickets
                (ticket,) = await _submit(backend, job, mine, patient=place > 0)
                async for delta in ticket:
                    arrived.put_nowait((place, delta))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    pumps = [asyncio.ensure_future(pump(i, job)) for i, job in enumerate(jobs)]
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for each in pumps:
            each.cancel()
        tickets.cancel()


async def _submit(backend: Backend, job: Job, tickets: Tickets, *, patient: bool) -> list[Ticket]:
    while True:
        try:
            return await tickets.submit(backend, [job])
        except QueueFull:
            if not patient:
                raise
            await asyncio.sleep(_RETRY_S)
