"""Which format a template teaches, and the parser of a whole answer made of that format's reader.

    text, cut anywhere -> thinking.reader -> content, or a call's reader -> events

Knows no dialect and no tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from speculoe_local.server.toolcalls import glm, harmony, hermes, qwen3_coder, thinking
from speculoe_local.server.toolcalls.base import CallEnd, Event, Parser, Schemas
from speculoe_local.server.toolcalls.feed import Feed, NotACall, Reading
from speculoe_local.server.toolcalls.output import Output, Reader

__all__ = ["FORMATS", "CallFormat", "format_of", "make_parser"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls look. `opens`: texts that begin one, which is where a grammar for calls sets in; `close`
    ends it, and may be missing. `native`: the template itself tells the model about functions."""

    name: str
    opens: tuple[str, ...]
    close: str
    native: bool = True


_READERS: dict[str, Callable[[Feed, Output, str, Schemas], Reading]] = {
    "hermes": hermes.read,
    "qwen3-coder": qwen3_coder.read,
    "glm": glm.read,
}
FORMATS = {
    "hermes": CallFormat("hermes", (hermes.OPEN,), hermes.CLOSE),
    "qwen3-coder": CallFormat("qwen3-coder", qwen3_coder.OPENS, qwen3_coder.CLOSE),
    "glm": CallFormat("glm", (glm.OPEN,), glm.CLOSE),
    "harmony": CallFormat("harmony", (harmony.OPEN,), "<|call|>"),
}
_FOREIGN = CallFormat("hermes", (hermes.OPEN,), hermes.CLOSE, native=False)
_TOOLS = re.compile(r"\btools\b")


def format_of(template: str | None) -> CallFormat:
    """The format a template teaches its model; hermes, by instructions, where it teaches none of ours."""
    if template is not None:
        if "<|channel|>" in template and "<|message|>" in template:
            return FORMATS["harmony"]
        if "<arg_key>" in template:
            return FORMATS["glm"]
        if hermes.OPEN in template and _TOOLS.search(template):
            bare = qwen3_coder.OPENS[1] in template and "<parameter=" in template
            return FORMATS["qwen3-coder" if bare else "hermes"]
    return _FOREIGN


def make_parser(
    form: CallFormat,
    *,
    tools: Schemas | None = None,
    tags: thinking.Tags | None = thinking.TAGS[0],
    inside: bool = False,
) -> Parser:
    """A parser of one answer.

    `tools` None: nothing is read as a call (harmony's channels are told apart all the same). `tags` None:
    reasoning stays in the content. `inside`: the prompt has opened the reasoning (`begins_inside`).
    """
    if form.name == "harmony":
        known: Schemas = tools if tools is not None else {}
        return Reader(lambda feed, output: harmony.read(feed, output, known), calls=True)

    def read(feed: Feed, output: Output) -> Reading:
        opens = form.opens if tools is not None else ()
        if tags is not None:
            answered = yield from thinking.reader(
                feed, output, tags, inside=inside, calls=opens[:1], salvage=salvage
            )
            if not answered:
                return
        yield from _answer(feed, output, form, tools)

    def salvage(text: str) -> list[Event] | None:
        parser = make_parser(form, tools=tools, tags=None)
        events = [*parser.feed(text), *parser.finish()]
        whole = any(isinstance(event, CallEnd) and event.whole for event in events)
        return events if whole else None

    return Reader(read, calls=tools is not None)


def _answer(feed: Feed, output: Output, form: CallFormat, tools: Schemas | None) -> Reading:
    """Content with calls in it."""
    opens = form.opens if tools is not None else ()
    reader = _READERS[form.name]
    while True:
        mark = yield from feed.until(opens, output.content)
        if mark is None:
            return
        feed.record(mark)
        try:
            yield from reader(feed, output, mark, tools or {})
        except NotACall:
            output.not_a_call(feed.recorded())
        feed.forget()
