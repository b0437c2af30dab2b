"""gpt-oss's messages: `<|channel|>NAME to=WHO <|constrain|>json<|message|>TEXT<|end|>`, several in an answer.

The channel analysis is reasoning, a message to a function is a call whatever its channel, everything else is
content. Reads the whole answer, since channels stand around all of it. Needs control tokens as text.

Format: the harmony response format; gpt-oss's chat template. Models stray from it (headers left out, calls
on the wrong channel): whatever has no header is content.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from speculoe_local.server.toolcalls.base import Schemas
from speculoe_local.server.toolcalls.feed import Feed, Reading
from speculoe_local.server.toolcalls.output import Output
from speculoe_local.server.toolcalls.values import json_object

__all__ = ["OPEN", "read"]

OPEN = "<|channel|>"
_START, _MESSAGE, _CONSTRAIN = "<|start|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECEIVER = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(
    r"(?:<\|start\|>\w*)?(?:\s*to=[^\s<]*)?(?:<\|channel\|>\s*\w*)?(?:\s*to=[^\s<]*)?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
_FUNCTIONS = "functions."
_MAX_HEADER_CHARS = 256


def read(feed: Feed, output: Output, tools: Schemas) -> Reading:
    """Read an answer; it begins after the prompt's `<|start|>assistant`."""
    mark: str | None = None
    if (yield from feed.literal(" to=")):
        mark = " to="
    told = False  # content was given out: the next message is a paragraph of its own
    while (yield from feed.peek()) or mark is not None:
        if mark not in (OPEN, _START, _MESSAGE, " to="):
            mark = yield from feed.until((OPEN, _START, _MESSAGE, *_ENDS), output.content)
            continue
        header, mark = yield from _header(feed, output, mark)
        if mark != _MESSAGE:
            continue
        name = _function(header, tools)
        channel = _CHANNEL_NAME.search(header)
        if name is not None:
            mark = yield from _call(feed, output, name)
        elif channel is not None and channel[1] == "analysis":
            mark = yield from feed.until((OPEN, _START, *_ENDS), output.reasoning)
            output.end_reasoning()
        else:
            if told:
                output.content("\n\n")
            told = True
            mark = yield from feed.until((OPEN, _START, *_ENDS), output.content)


def _header(
    feed: Feed, output: Output, begin: str
) -> Generator[None, None, tuple[str, str | None]]:
    """What stands between `begin` and the message, and the mark after it.

    One that no message follows is dropped; where it is too long or reads otherwise, it is content.
    """
    if begin == _MESSAGE:
        return "", begin
    parts = [begin]
    while (room := _MAX_HEADER_CHARS - sum(map(len, parts))) > 0:
        mark = yield from feed.until(
            (_MESSAGE, OPEN, _START, _CONSTRAIN, *_ENDS), parts.append, room
        )
        if mark == _MESSAGE:
            return "".join(parts), mark
        if mark is None or mark in _ENDS:
            break
        parts.append(mark)
    else:
        mark = None
    header = "".join(parts)
    if not _HEADER.fullmatch(header):
        output.content(header)
    return header, mark


def _function(header: str, tools: Schemas) -> str | None:
    """The function a message is for. A built-in tool that was not offered is none."""
    receiver = _RECEIVER.search(header)
    if receiver is None:
        return None
    name = receiver[1]
    if name.startswith(_FUNCTIONS):
        return name.removeprefix(_FUNCTIONS) or None
    return name if name in tools else None


def _call(feed: Feed, output: Output, name: str) -> Generator[None, None, str | None]:
    """Read the arguments; returns the mark after them. What is no JSON object is content."""
    feed.record("")
    yield from feed.space()
    first = yield from feed.peek()
    if first == "{":
        output.call(name)
        yield from json_object(feed, output.arguments)
        output.end_call(feed.recorded())
        feed.forget()
        return (yield from feed.until((OPEN, _START, *_ENDS), lambda _rest: None))
    if not first or first == "<":
        output.call(name)
        output.arguments("{}")
        output.end_call("")
    feed.forget()
    return (yield from feed.until((OPEN, _START, *_ENDS), output.content))
