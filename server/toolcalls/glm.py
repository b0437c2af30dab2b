"""Calls as pairs of tags: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`.

GLM-4.5 to 4.7, with line breaks between the parts or without. Strings are bare, everything else is JSON; the
function's schema says which. Knows nothing of the text around calls.

Format: GLM-4.6's and GLM-4.7-Flash's chat templates.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from speculoe_local.server.toolcalls import hermes
from speculoe_local.server.toolcalls.base import Schemas
from speculoe_local.server.toolcalls.feed import Feed, NotACall, Reading
from speculoe_local.server.toolcalls.output import Output
from speculoe_local.server.toolcalls.qwen3_coder import properties
from speculoe_local.server.toolcalls.values import StringSink, coerce, dumps, is_text

__all__ = ["CLOSE", "OPEN", "read"]

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME_ENDS = ("\n", _KEY, CLOSE)
# A value ends at its own closing tag, or where that was forgotten and the next part begins.
_VALUE_ENDS = (_VALUE_END, _KEY, CLOSE)


def read(feed: Feed, output: Output, mark: str, tools: Schemas) -> Reading:
    """Read what follows the opening tag."""
    yield from feed.space()
    if (yield from feed.peek()) in ("{", "["):
        yield from hermes.read(feed, output, mark, tools)
        return
    name, last = yield from feed.name(_NAME_ENDS)
    if last is None and name not in tools:
        raise NotACall
    if last == "\n":
        yield from feed.space()
        last = yield from _next(feed, (_KEY, CLOSE))
        if last is None and not feed.ended:
            raise NotACall
    output.call(name)
    schemas = properties(tools, name)
    count = 0
    while last == _KEY:
        parts: list[str] = []
        if (yield from feed.until((_KEY_END,), parts.append)) is None:
            raise NotACall
        key = "".join(parts).strip()
        yield from feed.space()
        if not (yield from feed.literal(_VALUE)):
            raise NotACall
        output.arguments(("{" if count == 0 else ", ") + dumps(key) + ": ")
        count += 1
        last = yield from _value(feed, output, schemas.get(key))
        if last is None:
            raise NotACall
        if last == _VALUE_END:
            yield from feed.space()
            last = yield from _next(feed, (_KEY, CLOSE))  # None: the closing tag was forgotten
    output.arguments("}" if count else "{}")
    output.end_call(feed.recorded())


def _next(feed: Feed, words: tuple[str, ...]) -> Generator[None, None, str | None]:
    for word in words:
        if (yield from feed.literal(word)):
            return word
    return None


def _value(
    feed: Feed, output: Output, schema: Mapping[str, Any] | None
) -> Generator[None, None, str | None]:
    """Read a value; strings stream, the rest waits until it is whole."""
    if is_text(schema):
        sink = StringSink(output.arguments, lines=False)
        mark = yield from feed.until(_VALUE_ENDS, sink)
        if mark is not None:
            sink.close()
        return mark
    parts: list[str] = []
    mark = yield from feed.until(_VALUE_ENDS, parts.append)
    if mark is not None:
        output.arguments(coerce("".join(parts), schema))
    return mark
