"""How the Ollama dialect writes an answer: whole, or a line of JSON per step. Knows no routes.

A call is one line, once it is whole, since its arguments are an object here. The last line carries the
counts and durations (ns), and no text: some clients do not look for any there.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from speculoe_local.server.dialects.ollama.models import iso
from speculoe_local.server.dialects.turn import Step, Turn
from speculoe_local.server.errors import Fault
from speculoe_local.server.http.envelopes import told
from speculoe_local.server.http.wire import Tickets, attended, dumps, json_response
from speculoe_local.server.jobs import Delta, Timings, TokenLogprob
from speculoe_local.server.toolcalls import Call, CallArguments, CallEnd, CallStart, Event, collect

__all__ = ["Clock", "Reply", "answer", "envelope", "message"]

_NO_BUFFER = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_IMPOSSIBLE = -9999.0  # JSON has no infinity


def envelope(fault: Fault) -> dict[str, Any]:
    return {"error": fault.message, **fault.extra}


class Clock:
    """When a request came and how long its model took to load."""

    def __init__(self) -> None:
        self._begin = time.perf_counter_ns()
        self.load_ns = 0

    def loaded(self) -> None:
        self.load_ns = time.perf_counter_ns() - self._begin

    def total_ns(self) -> int:
        return time.perf_counter_ns() - self._begin


@dataclass(slots=True)
class Reply:
    """How steps of an answer are written. `context`: the prompt of /api/generate, handed back with the
    answer's tokens behind it, None where that makes no sense."""

    model: str
    clock: Clock
    chat: bool = False
    context: Sequence[int] | None = None
    calls: int = 0

    def line(self, events: Sequence[Event], delta: Delta | None = None) -> dict[str, Any]:
        found = collect(events)
        body: dict[str, Any] = {"model": self.model, "created_at": iso(time.time())}
        if self.chat:
            body["message"] = message(
                found.content,
                found.reasoning,
                [self._call(call) for call in found.calls],
            )
        else:
            body["response"] = found.content
            if found.reasoning:
                body["thinking"] = found.reasoning
        if delta is not None and delta.logprobs:
            body["logprobs"] = [_logprob(each) for each in delta.logprobs]
        body["done"] = False
        return body

    def _call(self, call: Call) -> dict[str, Any]:
        index, self.calls = self.calls, self.calls + 1
        function = {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}
        return {"id": f"call_{secrets.token_hex(12)}", "function": function}

    def last(self, body: dict[str, Any], turn: Turn, tokens: Sequence[int]) -> dict[str, Any]:
        usage = turn.usage
        timings: Timings = usage.timings
        body |= {
            "done": True,
            "done_reason": "length" if usage.finish == "length" else "stop",
            "total_duration": self.clock.total_ns(),
            "load_duration": self.clock.load_ns,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": _ns(timings.prompt_ms),
            "eval_count": usage.completion,
            "eval_duration": _ns(timings.predicted_ms),
            "timings": timings.to_json(),
        }
        if self.context is not None:
            body["context"] = [*self.context, *tokens]
        return body


async def answer(
    request: Request, reply: Reply, make: Callable[[Tickets], Turn], *, stream: bool
) -> Response:
    """Run the turn that `make` makes; what goes wrong before its first delta is raised."""
    tickets = Tickets()
    turn = make(tickets)
    if not stream:
        whole = await attended(request, tickets, _whole(turn, reply))
        return json_response(whole)
    await attended(request, tickets, turn.start())
    return StreamingResponse(
        _lines(turn, reply, tickets), media_type="application/x-ndjson", headers=_NO_BUFFER
    )


async def _whole(turn: Turn, reply: Reply) -> dict[str, Any]:
    await turn.start()
    events: list[Event] = []
    tokens: list[int] = []
    logprobs: list[Any] = []
    async for step in turn:
        events += step.events
        tokens += step.delta.tokens
        logprobs += [_logprob(each) for each in step.delta.logprobs]
    body = reply.line(events)
    if logprobs:
        body["logprobs"] = logprobs
    return reply.last(body, turn, tokens)


async def _lines(turn: Turn, reply: Reply, tickets: Tickets) -> AsyncIterator[bytes]:
    """Text as it comes; a call is one line, once it is whole, since its arguments are an object."""
    waiting: list[Event] = []
    tokens: list[int] = []
    try:
        async for step in turn:
            tokens += step.delta.tokens
            ready, waiting = _ready(waiting, step)
            if step.done:
                # The last line carries no text: some clients do not look for any there.
                if ready:
                    yield dumps(reply.line(ready, step.delta)) + b"\n"
                yield dumps(reply.last(reply.line(()), turn, tokens)) + b"\n"
            elif ready or step.delta.logprobs:
                yield dumps(reply.line(ready, step.delta)) + b"\n"
    except Exception as error:
        yield dumps(envelope(told(error))) + b"\n"
    finally:
        tickets.cancel()


def _ready(waiting: list[Event], step: Step) -> tuple[list[Event], list[Event]]:
    """Which events can be written now, and which belong to a call that is still under way."""
    events = [*waiting, *step.events]
    ends = [i for i, event in enumerate(events) if isinstance(event, CallEnd)]
    begun = [i for i, event in enumerate(events) if isinstance(event, CallStart)]
    if step.done or len(ends) == len(begun):
        return events, []
    cut = begun[-1]
    assert all(isinstance(e, CallStart | CallArguments) for e in events[cut:])
    return events[:cut], events[cut:]


def message(
    content: str, thinking: str = "", calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = list(calls)
    return message


def _logprob(found: TokenLogprob) -> dict[str, Any]:
    def one(piece: bytes, logprob: float) -> dict[str, Any]:
        return {
            "token": piece.decode("utf-8", "replace"),
            "logprob": max(logprob, _IMPOSSIBLE),
            "bytes": list(piece),
        }

    top = [one(piece, logprob) for _, piece, logprob in found.top]
    return {**one(found.piece, found.logprob), **({"top_logprobs": top} if top else {})}


def _ns(ms: float) -> int:
    return int(ms * 1e6)
