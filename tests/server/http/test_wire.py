"""Bodies, streams and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest
from fastapi import Request

from speculoe_local.server.dialects.many_prompts import run_batch
from speculoe_local.server.errors import ContextOverflow, QueueFull
from speculoe_local.server.http.wire import (
    ClientLeft,
    Tickets,
    attended,
    begun,
    deltas,
    dumps,
    event,
    merged,
)
from speculoe_local.server.jobs import Delta, Job
from tests.server.fake_backend import FakeBackend, FakeTicket, say

JOB = Job(tokens=(1,))


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(work())


def request_that(leaves: asyncio.Event) -> Request:
    async def receive() -> dict[str, Any]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "headers": []}, receive)


def test_a_stream_waits_for_its_first_delta_and_raises_what_it_raises() -> None:
    async def work() -> None:
        backend = FakeBackend(lambda _job: [RuntimeError("early")])
        with pytest.raises(RuntimeError, match="early"):
            await deltas([await backend.submit(JOB)])
        backend.script = say("a", "b")
        found = [delta.text async for _, delta in await deltas([await backend.submit(JOB)])]
        assert ["a", "b", ""] == found

    run(work)


def test_patience_ends_before_a_silent_queue_does() -> None:
    async def work() -> None:
        release = asyncio.Event()
        backend = FakeBackend(lambda job: [release, *say("a")(job)])
        stream = await deltas([await backend.submit(JOB)], patience_s=0.01)
        release.set()
        assert ["a", ""] == [delta.text async for _, delta in stream]

    run(work)


def test_several_sources_give_what_they_have_as_it_comes() -> None:
    async def work() -> None:
        release = asyncio.Event()

        async def slow() -> AsyncGenerator[str, None]:
            await release.wait()
            yield "slow"

        async def fast() -> AsyncGenerator[str, None]:
            yield "fast"
            release.set()

        assert [(1, "fast"), (0, "slow")] == [item async for item in merged([slow(), fast()])]

        async def failing() -> AsyncGenerator[str, None]:
            yield "x"
            raise ValueError("now")

        with pytest.raises(ValueError, match="now"):
            [item async for item in merged([failing(), failing()])]

    run(work)


def test_a_client_that_leaves_cancels_what_it_waited_for() -> None:
    async def work() -> None:
        never, leaves, tickets = asyncio.Event(), asyncio.Event(), Tickets()
        backend = FakeBackend(lambda _job: [never])

        async def wait_for_it() -> None:
            (ticket,) = await tickets.part().submit(backend, [JOB])
            leaves.set()
            async for _ in ticket:
                pass

        with pytest.raises(ClientLeft):
            await attended(request_that(leaves), tickets, wait_for_it())
        assert backend.tickets[0].cancelled.is_set()

    run(work)


def test_work_that_fails_leaves_no_job_behind() -> None:
    async def work() -> None:
        tickets = Tickets()
        backend = FakeBackend(say("a"))

        async def fail() -> None:
            await tickets.submit(backend, [JOB])
            raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            await attended(request_that(asyncio.Event()), tickets, fail())
        assert backend.tickets[0].cancelled.is_set()

    run(work)


def test_of_several_jobs_all_are_accepted_or_none() -> None:
    class Small(FakeBackend):
        """Takes two jobs."""

        async def submit(self, job: Job) -> FakeTicket:
            if len(self.jobs) == 2:
                raise QueueFull(2, 1)
            return await super().submit(job)

    async def work() -> None:
        backend = Small(say("a"))
        with pytest.raises(QueueFull):
            await Tickets().submit(backend, [JOB] * 3)
        assert all(ticket.cancelled.is_set() for ticket in backend.tickets)

    run(work)


def test_a_batch_runs_as_many_as_may_and_is_gone_with_its_reader() -> None:
    async def work() -> None:
        never = asyncio.Event()
        backend = FakeBackend(lambda _job: [Delta(text="a"), never])
        tickets = Tickets()
        source = run_batch(backend, [JOB] * 9, tickets)
        async for _ in await begun(source):
            break
        await asyncio.sleep(0)
        assert backend.info.n_parallel == len(backend.jobs)
        await source.aclose()
        assert all(ticket.cancelled.is_set() for ticket in backend.tickets)

    run(work)


def test_a_batch_is_measured_before_it_runs() -> None:
    async def work() -> None:
        backend = FakeBackend(say("a"), n_ctx=4)
        with pytest.raises(ContextOverflow):
            await begun(run_batch(backend, [JOB, Job(tokens=(1,) * 4)], Tickets()))
        assert not backend.jobs

    run(work)


def test_whatever_text_there_is_can_be_sent() -> None:
    assert b'{"a":"?\\u0000\xc3\xa9"}' == dumps({"a": "\ud800\0é"})
    assert {"a": [1, None]} == json.loads(dumps({"a": [1, None]}))
    assert b'data: {"a":"x\\ny"}\n\n' == event({"a": "x\ny"})
    assert b"event: n\ndata: 1\n\n" == event(1, "n")
