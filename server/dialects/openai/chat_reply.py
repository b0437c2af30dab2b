"""How chat completions are written: whole, or as chunks while the answer grows. Knows no fields of requests.

A stream begins with the role of each choice; then content, reasoning and pieces of calls as they become
certain; a finish reason per choice, exactly one; usage where asked for; `[DONE]`. Ids and names of calls are
in the first piece alone: clients overwrite what they had by what comes later.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.dialects.openai.common import (
    chat_logprobs,
    error_event,
    identifier,
    now,
    usage_of,
)
from speculoe_local.server.dialects.turn import Step, Turn
from speculoe_local.server.http.wire import event, merged
from speculoe_local.server.jobs import TokenLogprob
from speculoe_local.server.toolcalls import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    collect,
)

__all__ = ["DONE", "Reply", "progress_of", "start_all", "streamed", "whole"]

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """What is the same in all parts of one reply."""

    model: str
    vocab: Vocabulary
    mode: str
    usage: bool = False
    progress: bool = False
    id: str = field(default_factory=lambda: identifier("chatcmpl-"))
    created: int = field(default_factory=now)
    begun: float = field(default_factory=time.perf_counter)

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"speculoe-local-{self.mode}",
        }


async def start_all(turns: Sequence[Turn]) -> None:
    """Submit all; waits for the first delta of the first. Raises what any raises."""
    for i, turn in enumerate(turns):
        await (turn.start() if i == 0 else turn.start(patience_s=0.0))


async def whole(turns: Sequence[Turn], reply: Reply) -> dict[str, Any]:
    """The response, once all choices are done."""
    await start_all(turns)
    events: list[list[Event]] = [[] for _ in turns]
    logprobs: list[list[TokenLogprob]] = [[] for _ in turns]
    async for place, step in merged(turns):
        events[place] += step.events
        logprobs[place] += step.delta.logprobs
    choices = [
        {
            "index": i,
            "message": _message(events[i]),
            "logprobs": chat_logprobs(logprobs[i], reply.vocab) if logprobs[i] else None,
            "finish_reason": _finish_reason(turn),
        }
        for i, turn in enumerate(turns)
    ]
    return {
        **reply.head("chat.completion"),
        "choices": choices,
        "usage": _usage(turns),
        "timings": turns[0].usage.timings.to_json(),
    }


async def streamed(turns: Sequence[Turn], reply: Reply) -> AsyncIterator[bytes]:
    """The events of the response. An error that comes now is the last of them."""
    head = reply.head("chat.completion.chunk")
    writers = [_Writer(i, turn, reply) for i, turn in enumerate(turns)]
    try:
        for writer in writers:
            first = writer.choice({"role": "assistant", "content": None})
            yield event({**head, "choices": [first]})
        async for place, step in merged(turns):
            for part in writers[place].parts(step):
                yield event({**head, **part})
        if reply.usage:
            timings = turns[0].usage.timings.to_json()
            yield event({**head, "choices": [], "usage": _usage(turns), "timings": timings})
        yield DONE
    except Exception as error:
        yield event(error_event(error))


class _Writer:
    """Makes the chunks of one choice."""

    def __init__(self, index: int, turn: Turn, reply: Reply) -> None:
        self._index = index
        self._turn = turn
        self._reply = reply
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not out yet
        self._written = False

    def choice(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = chat_logprobs(self._logprobs, self._reply.vocab)
            self._logprobs = []
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        }

    def parts(self, step: Step) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        self._logprobs += step.delta.logprobs
        if self._reply.progress and not step.delta.tokens and not step.done:
            progress = progress_of(step, self._turn.usage.prompt, self._reply.begun)
            found.append({"choices": [self.choice({})], "prompt_progress": progress})
        for each in step.events:
            delta = self._delta(each)
            if delta is not None:
                found.append({"choices": [self.choice(delta)]})
        if step.done:
            end = self.choice({}, _finish_reason(self._turn))
            found.append({"choices": [end], "timings": self._turn.usage.timings.to_json()})
        return found

    def _delta(self, each: Event) -> dict[str, Any] | None:
        if isinstance(each, Content):
            self._written = True
            return {"content": each.text}
        if isinstance(each, Reasoning):
            return {"reasoning_content": each.text}
        if isinstance(each, CallStart):
            function = {"name": each.name, "arguments": ""}
            call = {
                "index": each.index,
                "id": identifier("call_"),
                "type": "function",
                "function": function,
            }
            return {"tool_calls": [call]}
        if isinstance(each, CallArguments):
            piece = {"index": each.index, "function": {"arguments": each.text}}
            return {"tool_calls": [piece]}
        assert isinstance(each, CallEnd)
        if each.whole:
            return None
        # The call went astray after it had begun: what the model wrote is shown as text.
        text = f"\n{each.raw}" if self._written else each.raw
        self._written = True
        return {"content": text}


def progress_of(step: Step, n_prompt: int, begun: float) -> dict[str, Any]:
    """How far the prompt is, as llama-server tells it."""
    return {
        "total": n_prompt,
        "cache": 0,
        "processed": round(step.delta.prompt_done * n_prompt),
        "time_ms": round((time.perf_counter() - begun) * 1e3),
    }


def _message(events: Sequence[Event]) -> dict[str, Any]:
    found = collect(events)
    message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
    if found.reasoning:
        message["reasoning_content"] = found.reasoning
    if found.calls:
        message["content"] = found.content or None
        message["tool_calls"] = [
            {
                "id": identifier("call_"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in found.calls
        ]
    return message


def _finish_reason(turn: Turn) -> str:
    if turn.usage.finish == "length":
        return "length"
    return "tool_calls" if turn.usage.calls else "stop"


def _usage(turns: Sequence[Turn]) -> dict[str, Any]:
    return usage_of(
        [turn.usage.timings for turn in turns], sum(turn.usage.reasoning for turn in turns)
    )
