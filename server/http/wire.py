"""HTTP as all dialects use it: bodies in, JSON and event streams out, clients that leave.

A stream answers 200 only once its job was accepted and either the first delta is there or `PATIENCE_S`
are over, so that what goes wrong before has a status of its own. When a client leaves, its tickets are
cancelled, whatever they wait for. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import suppress
from typing import Any, TypeVar

import anyio
from fastapi import Request
from pydantic import BaseModel, ValidationError
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from speculoe_local.server.errors import BadRequest
from speculoe_local.server.jobs import Backend, Delta, Job, Ticket

__all__ = [
    "PATIENCE_S",
    "ClientLeft",
    "Tickets",
    "attended",
    "begun",
    "body_of",
    "body_schema",
    "deltas",
    "dumps",
    "event",
    "event_stream",
    "json_response",
    "merged",
    "validated",
]

# Clients give up on a silent connection after 15 s or more; a queue may be longer than that.
PATIENCE_S = 5.0
MAX_DEPTH = 200

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class ClientLeft(Exception):  # nobody is there to be told
    """The client closed the connection before its answer was done."""


async def body_of(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest for anything else, whatever its bytes."""
    raw = await request.body()
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8; send JSON") from None
    except RecursionError:
        raise BadRequest("the body nests too deep; send flatter JSON") from None
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {str(error)[:120]}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object; send {...}")
    return body


def validated(model: type[M], body: Mapping[str, Any]) -> M:
    """`body` as `model`. Raises BadRequest naming the first field that is not usable."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"][:3])
        shown = repr(first["input"])
        shown = shown if len(shown) <= 40 else shown[:39] + "…"
        param = str(first["loc"][0]) if first["loc"] else None
        raise BadRequest(f"{field}: {first['msg']}, got {shown}", param) from None
    except RecursionError:
        raise BadRequest("the body nests too deep; send flatter JSON") from None


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is read by `body_of`."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def dumps(value: Any) -> bytes:
    """JSON on one line. Text is never refused: what UTF-8 cannot carry becomes `?`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


def event(value: Any, name: str | None = None) -> bytes:
    """A server-sent event with JSON data."""
    head = f"event: {name}\n".encode() if name is not None else b""
    return head + b"data: " + dumps(value) + b"\n\n"


class Tickets:
    """The accepted jobs of one request."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._parts: list[Tickets] = []

    def part(self) -> Tickets:
        """The tickets of one of several answers: cancelled with these, or alone."""
        part = Tickets()
        self._parts.append(part)
        return part

    async def submit(self, backend: Backend, jobs: Sequence[Job]) -> list[Ticket]:
        """All of `jobs` or none: raises what the first refusal raises, having cancelled the others."""
        mine: list[Ticket] = []
        try:
            for job in jobs:
                mine.append(await backend.submit(job))  # noqa: PERF401  # those before a refusal count
        except BaseException:
            for ticket in mine:
                ticket.cancel()
            raise
        self._tickets += mine
        return mine

    def cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()
        for part in self._parts:
            part.cancel()


async def attended(request: Request, tickets: Tickets, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns, unless the client leaves first: then ClientLeft, and `tickets` cancelled.

    Also when `work` raises, its tickets are cancelled.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    except BaseException:
        tickets.cancel()
        raise
    finally:
        for each in (task, watch):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def deltas(
    tickets: Sequence[Ticket], *, patience_s: float = PATIENCE_S
) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all tickets as they come, with the ticket's place. Await it, then iterate.

    Awaiting takes until the first delta is there, but no longer than `patience_s`; it raises what the
    first delta raises.
    """
    return await begun(merged(tickets), patience_s=patience_s)


async def begun(
    source: AsyncGenerator[T, None], *, patience_s: float = PATIENCE_S
) -> AsyncIterator[T]:
    """`source`, once its first item is there or `patience_s` are over; raises what the first step raises."""
    first = asyncio.ensure_future(_next(source))
    try:
        await asyncio.wait({first}, timeout=patience_s)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await source.aclose()
        raise
    return _resumed(first, source)


def event_stream(
    request: Request,
    events: AsyncIterator[bytes],
    tickets: Tickets,
    *,
    ping_s: float,
    grace_s: float,
) -> Response:
    """The response for a stream of ready-made events; `ping_s` 0: no comments while it is silent."""

    async def left(_message: Any) -> None:
        tickets.cancel()

    return EventSourceResponse(
        _cancelling(events, tickets),
        sep="\n",
        ping=ping_s,
        ping_message_factory=lambda: ServerSentEvent(comment="", sep="\n"),
        client_close_handler_callable=left,
        shutdown_event=anyio.Event(),
        shutdown_grace_period=grace_s,
    )


async def _cancelling(events: AsyncIterator[bytes], tickets: Tickets) -> AsyncIterator[bytes]:
    try:
        async for each in events:
            yield each
    finally:
        tickets.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def merged(sources: Sequence[AsyncIterable[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """What several sources give, as it comes, with the place of its source. The first error ends it."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T, None] | tuple[int, None, BaseException | None]]
    arrived = asyncio.Queue()

    async def pump(place: int, source: AsyncIterable[T]) -> None:
        try:
            async for item in source:
                arrived.put_nowait((place, item, None))
            arrived.put_nowait((place, None, None))
        except Exception as error:
            arrived.put_nowait((place, None, error))

    pumps = [asyncio.ensure_future(pump(i, source)) for i, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            place, found, error = await arrived.get()
            if error is not None:
                raise error
            if found is None:
                running -= 1
            else:
                yield place, found
    finally:
        for each in pumps:
            each.cancel()


class _End:
    """What `_next` gives when there is nothing more."""


async def _next(source: AsyncGenerator[T, None]) -> T | _End:
    try:
        return await anext(source)
    except StopAsyncIteration:
        return _End()


async def _resumed(
    first: asyncio.Future[T | _End], source: AsyncGenerator[T, None]
) -> AsyncIterator[T]:
    try:
        found = await first
        if isinstance(found, _End):
            return
        yield found
        async for each in source:
            yield each
    finally:
        first.cancel()
        with suppress(RuntimeError):  # the cancelled first step may still be inside it
            await source.aclose()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
