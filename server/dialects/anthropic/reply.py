"""How the Anthropic dialect writes an answer: as a message, or as events. Knows no routes.

Events of a stream: message_start, per block content_block_start, ..._delta, ..._stop, then message_delta with
the reason and the counts, message_stop. An error in it is an event of its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from speculoe_local.server.dialects.turn import Turn
from speculoe_local.server.errors import Fault
from speculoe_local.server.http.envelopes import told
from speculoe_local.server.http.wire import event
from speculoe_local.server.toolcalls import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    collect,
)

__all__ = ["envelope", "streamed", "whole"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def envelope(fault: Fault) -> dict[str, Any]:
    kind = _KINDS.get(fault.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": fault.message, **fault.extra}}


async def whole(turn: Turn, model: str) -> dict[str, Any]:
    """Run the turn; the message as one object."""
    await turn.start()
    events: list[Event] = []
    async for step in turn:
        events += step.events
    found = collect(events)
    content: list[dict[str, Any]] = []
    if found.reasoning:
        content.append({"type": "thinking", "thinking": found.reasoning, "signature": ""})
    if found.content or not (found.calls or found.reasoning):
        content.append({"type": "text", "text": found.content})
    content += [
        {
            "type": "tool_use",
            "id": _id("toolu_"),
            "name": call.name,
            "input": json.loads(call.arguments),
        }
        for call in found.calls
    ]
    return {
        **_message(model),
        "content": content,
        **_reason(turn),
        "usage": _usage(turn),
        "timings": turn.usage.timings.to_json(),
    }


async def streamed(turn: Turn, model: str) -> AsyncIterator[bytes]:
    """Events of a turn that was started."""
    blocks = _Blocks()
    begin = {**_message(model), "content": [], "stop_reason": None, "stop_sequence": None}
    begin["usage"] = _usage(turn)
    yield event({"type": "message_start", "message": begin}, "message_start")
    try:
        async for step in turn:
            for body in blocks.of(step.events):
                yield event(body, body["type"])
    except Exception as error:
        yield event(envelope(told(error)), "error")
        return
    for body in blocks.end():
        yield event(body, body["type"])
    end = {
        "type": "message_delta",
        "delta": _reason(turn),
        "usage": _usage(turn),
        "timings": turn.usage.timings.to_json(),
    }
    yield event(end, "message_delta")
    yield event({"type": "message_stop"}, "message_stop")


class _Blocks:
    """Makes blocks of events, one open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def of(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        for each in events:
            if isinstance(each, Content):
                yield from self._text(each.text)
            elif isinstance(each, Reasoning):
                thinking = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._ensure("thinking", thinking)
                yield self._delta({"type": "thinking_delta", "thinking": each.text})
            elif isinstance(each, CallStart):
                yield from self._close()
                block = {"type": "tool_use", "id": _id("toolu_"), "name": each.name, "input": {}}
                yield from self._ensure("tool_use", block)
            elif isinstance(each, CallArguments):
                yield self._delta({"type": "input_json_delta", "partial_json": each.text})
            elif isinstance(each, CallEnd):
                yield from self._close()
                if not each.whole:
                    yield from self._text(each.raw)

    def end(self) -> Iterator[dict[str, Any]]:
        if self._index < 0:  # clients take the first block for granted
            yield from self._ensure("text", {"type": "text", "text": ""})
        yield from self._close()

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        yield from self._ensure("text", {"type": "text", "text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _ensure(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}


def _message(model: str) -> dict[str, Any]:
    return {"id": _id("msg_"), "type": "message", "role": "assistant", "model": model}


def _id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"


def _reason(turn: Turn) -> dict[str, Any]:
    usage = turn.usage
    if usage.finish == "length":
        reason = "max_tokens"
    elif usage.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if usage.stop_hit is None else "stop_sequence"
    hit = usage.stop_hit if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": hit}


def _usage(turn: Turn) -> dict[str, Any]:
    """Tokens; those that were in the cache do not count as input here."""
    usage = turn.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }
