"""Calls as JSON between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Hermes, Qwen2.5, Qwen3 and many more. Also what models without a format of their own are told to write
(`instructions`). Knows nothing of the text around calls.

Format: Qwen3's and Hermes 3's chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from speculoe_local.server.toolcalls.base import Schemas
from speculoe_local.server.toolcalls.feed import Feed, NotACall, Reading
from speculoe_local.server.toolcalls.output import Output
from speculoe_local.server.toolcalls.values import json_object, json_string, json_value

__all__ = ["CLOSE", "OPEN", "instructions", "read", "read_json", "written"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")


def read(feed: Feed, output: Output, mark: str, tools: Schemas) -> Reading:
    """Read what follows the opening tag: one call, or a list of calls."""
    yield from feed.space()
    if (yield from feed.literal("[")):
        while True:
            yield from read_json(feed, output)
            yield from feed.space()
            if not (yield from feed.literal(",")):
                break
            yield from feed.space()
        if not (yield from feed.literal("]")) and not feed.ended:
            raise NotACall
    else:
        yield from read_json(feed, output)
    yield from feed.space()
    while (yield from feed.peek()) == "}":  # one brace too many is a common slip
        feed.take(1)
        yield from feed.space()
    yield from feed.literal(CLOSE)


def read_json(feed: Feed, output: Output) -> Reading:
    """Read one call. Arguments stream once the name is known. Raises NotACall."""
    if not (yield from feed.literal("{")):
        raise NotACall
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    some = False
    while True:
        yield from feed.space()
        if (yield from feed.literal("}")):
            break
        if feed.ended and not feed.text and name is not None and some:
            break  # cut off after the arguments: nothing is missing
        key = yield from json_string(feed)
        yield from feed.space()
        if not (yield from feed.literal(":")):
            raise NotACall
        yield from feed.space()
        if key in _NAME_KEYS and name is None:
            name = yield from json_string(feed)
            if not name:
                raise NotACall
            output.call(name)
            output.arguments("".join(early))
        elif key in _ARGUMENT_KEYS and not some:
            sink = early.append if name is None else output.arguments
            yield from _arguments(feed, sink)
            some = True
        else:
            yield from json_value(feed, lambda _text: None)
        yield from feed.space()
        yield from feed.literal(",")
    if name is None:
        raise NotACall
    if not some:
        output.arguments("{}")
    output.end_call(feed.recorded())


def _arguments(feed: Feed, sink: Any) -> Generator[None, None, None]:
    """An object; also one that was written into a string, and null for none."""
    first = yield from feed.peek()
    if first == "{":
        if not (yield from json_object(feed, sink)):
            raise NotACall
    elif first == '"':
        text = yield from json_string(feed)
        sink(text if text.strip() else "{}")
    elif (yield from feed.literal("null")):
        sink("{}")
    else:
        raise NotACall


def written(function: Mapping[str, Any]) -> str:
    """A call as the model would have written it."""
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CLOSE}"


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What to tell a model whose template knows no functions."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, each given with the JSON schema of its arguments:\n"
        f"{listed}\n"
        "To call one, write nothing but this, with its name and a JSON object of arguments:\n"
        f'{OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CLOSE}\n'
        "Its result comes in the next message. When no function is of use, answer in plain text."
    )
