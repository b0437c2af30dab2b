"""Calls as tags with bare values: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>`.

Qwen3-Coder, Qwen3.5, Nemotron 3. Values are bare text on lines of their own, so what they are is decided by
the function's schema. Knows nothing of the text around calls.

Format: Qwen3-Coder's chat template.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from speculoe_local.server.toolcalls import hermes
from speculoe_local.server.toolcalls.base import Schemas
from speculoe_local.server.toolcalls.feed import Feed, NotACall, Reading
from speculoe_local.server.toolcalls.output import Output
from speculoe_local.server.toolcalls.values import StringSink, coerce, dumps, is_text

__all__ = ["CLOSE", "OPEN", "OPENS", "properties", "read"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_FUNCTION = "<function="
_PARAMETER = "<parameter="
OPENS = (OPEN, _FUNCTION)  # some answers leave the outer tag out
# A value ends at its own closing tag, or where one was forgotten and the next part plainly begins.
_VALUE_ENDS = ("</parameter>", "\n<parameter=", "</function>\n</tool_call>")


def read(feed: Feed, output: Output, mark: str, tools: Schemas) -> Reading:
    """Read what follows the opening tag."""
    if mark == OPEN:
        yield from feed.space()
        if (yield from feed.peek()) in ("{", "["):
            yield from hermes.read(feed, output, mark, tools)
            return
        if not (yield from feed.literal(_FUNCTION)):
            raise NotACall
    while True:
        closed = yield from _function(feed, output, tools)
        if closed:
            break
        yield from feed.space()
        if not (yield from feed.literal(_FUNCTION)):  # several functions in one outer tag
            break
    yield from feed.space()
    yield from feed.literal(CLOSE)


def properties(tools: Schemas, name: str) -> Mapping[str, Any]:
    """The schemas of a function's arguments."""
    found = tools.get(name, {}).get("properties")
    return found if isinstance(found, Mapping) else {}


def _function(feed: Feed, output: Output, tools: Schemas) -> Generator[None, None, bool]:
    """Read after `<function=`. True: the outer tag was closed with it."""
    name, mark = yield from feed.name((">",))
    if mark is None:
        raise NotACall
    output.call(name)
    schemas = properties(tools, name)
    closed = False
    begun = False  # at a parameter whose opening tag was taken already
    count = 0
    while True:
        if not begun:
            yield from feed.space()
            if (yield from feed.literal("</function>")):
                break
            if not (yield from feed.literal(_PARAMETER)):
                closed = yield from feed.literal(CLOSE)  # the inner tag was forgotten
                if closed:
                    break
                raise NotACall
        key, mark = yield from feed.name((">",))
        if mark is None:
            raise NotACall
        output.arguments(("{" if count == 0 else ", ") + dumps(key) + ": ")
        count += 1
        mark = yield from _value(feed, output, schemas.get(key))
        if mark is None:
            raise NotACall
        begun = mark == _VALUE_ENDS[1]
        closed = mark == _VALUE_ENDS[2]
        if closed:
            break
    output.arguments("}" if count else "{}")
    output.end_call(feed.recorded())
    return closed


def _value(
    feed: Feed, output: Output, schema: Mapping[str, Any] | None
) -> Generator[None, None, str | None]:
    """Read a value; strings stream, the rest waits until it is whole."""
    if is_text(schema):
        sink = StringSink(output.arguments, lines=True)
        mark = yield from feed.until(_VALUE_ENDS, sink)
        if mark is not None:
            sink.close()
        return mark
    parts: list[str] = []
    mark = yield from feed.until(_VALUE_ENDS, parts.append)
    if mark is not None:
        text = "".join(parts).removeprefix("\n").removesuffix("\n")
        output.arguments(coerce(text, schema))
    return mark
