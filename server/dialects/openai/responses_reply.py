"""How /v1/responses is written: output items that grow, and the events that tell of it.

One writer makes both: a whole response is what the events have built by the end. Items do not overlap; each
is begun, filled and ended before the next. Knows no fields of requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.dialects.openai.common import chat_logprobs, error_event, identifier, now
from speculoe_local.server.dialects.turn import Step, Turn
from speculoe_local.server.http.wire import event
from speculoe_local.server.jobs import TokenLogprob
from speculoe_local.server.toolcalls import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)

__all__ = ["ResponseWriter", "streamed", "whole"]

Part = dict[str, Any]


async def whole(turn: Turn, writer: ResponseWriter) -> dict[str, Any]:
    await turn.start()
    async for step in turn:
        for _ in writer.step(step):
            pass
    return writer.response()


async def streamed(turn: Turn, writer: ResponseWriter) -> AsyncIterator[bytes]:
    """All events. An error that comes now is the last of them."""
    try:
        for part in writer.begin():
            yield event(part, part["type"])
        async for step in turn:
            for part in writer.step(step):
                yield event(part, part["type"])
    except Exception as error:
        told = error_event(error)["error"]
        yield event(writer.numbered({**told, "type": "error", "error": told}), "error")


class ResponseWriter:
    """Builds one response. `echo` are its fields that say what was asked for."""

    def __init__(self, turn: Turn, vocab: Vocabulary, echo: Mapping[str, Any]) -> None:
        self._turn = turn
        self._vocab = vocab
        self._echo = echo
        self._id = identifier("resp_")
        self._created = now()
        self._status = "in_progress"
        self._output: list[Part | None] = []  # None: withdrawn
        self._open: Part | None = None
        self._logprobs: list[TokenLogprob] = []
        self._number = 0

    def response(self) -> dict[str, Any]:
        """The response as it is now."""
        done = self._status in ("completed", "incomplete")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": now() if done else None,
            "status": self._status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if self._status == "incomplete" else None
            ),
            "output": [item for item in self._output if item is not None],
            "usage": self._usage() if done else None,
            **({"timings": self._turn.usage.timings.to_json()} if done else {}),
            **self._echo,
        }

    def begin(self) -> Iterator[Part]:
        yield self.numbered({"type": "response.created", "response": self.response()})
        yield self.numbered({"type": "response.in_progress", "response": self.response()})

    def step(self, step: Step) -> Iterator[Part]:
        self._logprobs += step.delta.logprobs
        for each in step.events:
            yield from map(self.numbered, self._take(each))
        if step.done:
            yield from map(self.numbered, self._finish())

    def numbered(self, part: Part) -> Part:
        self._number += 1
        return {**part, "sequence_number": self._number - 1}

    def _take(self, each: Event) -> Iterator[Part]:
        if isinstance(each, Content):
            yield from self._text("message", each.text)
        elif isinstance(each, Reasoning):
            yield from self._text("reasoning", each.text)
        elif isinstance(each, CallStart):
            yield from self._close("completed")
            item = {
                "id": identifier("fc_"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": identifier("call_"),
                "name": each.name,
                "arguments": "",
            }
            yield from self._add(item)
        elif isinstance(each, CallArguments):
            assert self._open is not None
            self._open["arguments"] += each.text
            yield self._about("response.function_call_arguments.delta", delta=each.text)
        elif isinstance(each, CallEnd):
            yield from self._end_call(each)

    def _end_call(self, end: CallEnd) -> Iterator[Part]:
        if end.whole:
            yield from self._close("completed")
            return
        # It has begun to be told: it is ended, and withdrawn from what the response holds.
        at = len(self._output) - 1
        yield from self._close("incomplete")
        self._output[at] = None
        yield from self._text("message", end.raw)

    def _text(self, kind: str, text: str) -> Iterator[Part]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close("completed")
            yield from self._add(_empty(kind))
            yield self._about("response.content_part.added", content_index=0, part=_part(kind, ""))
        assert self._open is not None
        content = self._open["content"]
        if not content:
            content.append(_part(kind, ""))
        content[0]["text"] += text
        if kind == "reasoning":
            yield self._about("response.reasoning_text.delta", content_index=0, delta=text)
            return
        logprobs = self._take_logprobs()
        content[0]["logprobs"] += logprobs
        yield self._about(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )

    def _add(self, item: Part) -> Iterator[Part]:
        self._output.append(item)
        self._open = item
        yield {
            "type": "response.output_item.added",
            "output_index": len(self._output) - 1,
            "item": _copy(item),
        }

    def _close(self, status: str) -> Iterator[Part]:
        """End the item under way."""
        item = self._open
        if item is None:
            return
        kind = item["type"]
        if kind == "function_call":
            yield self._about(
                "response.function_call_arguments.done",
                arguments=item["arguments"],
                name=item["name"],
            )
        else:
            part = item["content"][0]
            done = "output_text" if kind == "message" else "reasoning_text"
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield self._about(f"response.{done}.done", content_index=0, text=part["text"], **more)
            yield self._about("response.content_part.done", content_index=0, part=part)
        item["status"] = status
        yield {
            "type": "response.output_item.done",
            "output_index": len(self._output) - 1,
            "item": _copy(item),
        }
        self._open = None

    def _finish(self) -> Iterator[Part]:
        self._status = "incomplete" if self._turn.usage.finish == "length" else "completed"
        if not any(item is not None for item in self._output):
            # Clients look for a message, also when the model said nothing.
            yield from self._text("message", "")
        yield from self._close(self._status)
        yield {"type": f"response.{self._status}", "response": self.response()}

    def _about(self, kind: str, **more: Any) -> Part:
        assert self._open is not None
        return {
            "type": kind,
            "item_id": self._open["id"],
            "output_index": len(self._output) - 1,
            **more,
        }

    def _take_logprobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = chat_logprobs(self._logprobs, self._vocab)["content"]
        self._logprobs = []
        return found

    def _usage(self) -> dict[str, Any]:
        usage = self._turn.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }


def _empty(kind: str) -> Part:
    if kind == "reasoning":
        return {
            "id": identifier("rs_"),
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }
    return {
        "id": identifier("msg_"),
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _part(kind: str, text: str) -> Part:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _copy(item: Part) -> Part:
    """As it is now: it goes on changing."""
    copied = dict(item)
    if "content" in item:
        copied["content"] = [dict(part) for part in item["content"]]
    return copied
