"""From what a format's reader finds to events: `Output` collects, `Reader` is the parser of both.

Knows no format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speculoe_local.server.toolcalls.base import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
    is_object,
)
from speculoe_local.server.toolcalls.feed import Feed, Reading

__all__ = ["Output", "Reader"]


class Output:
    """Makes events of findings: joins pieces, counts calls, drops the white space between parts.

    With `calls`, white space is held back until it is certain that no call follows it.
    """

    def __init__(self, *, calls: bool) -> None:
        self.reasons = False  # reasoning between tags is open
        self._calls = calls
        self._events: list[Event] = []
        self._count = 0
        self._open: int | None = None  # the call under way
        self._arguments: list[str] = []
        self._space = ""  # after content, before what is to come
        self._reasoning_space = ""
        self._begun = False  # reasoning has been given out
        self._trim = ""  # characters to drop from the front of the content to come
        self._told = False  # content has been given out
        self._joint = ""  # between that and the content to come

    def content(self, text: str) -> None:
        if self._trim:
            text = text.lstrip(self._trim)
            if not text:
                return
            self._trim = ""
        text = self._joint + self._space + text
        self._joint = ""
        kept = len(text.rstrip()) if self._calls else len(text)
        self._space = text[kept:]
        self._told = self._told or kept > 0
        self._add(Content(text[:kept]))

    def reasoning(self, text: str) -> None:
        text = self._reasoning_space + text
        if not self._begun:
            text = text.lstrip()
        kept = len(text.rstrip())
        self._reasoning_space = text[kept:]
        if kept:
            self._begun = True
            self._add(Reasoning(text[:kept]))

    def end_reasoning(self) -> None:
        """What follows is content, or reasoning anew: white space between them belongs to neither."""
        self.reasons = False
        self._reasoning_space = "\n\n" if self._begun else ""
        self._space = ""
        self._trim = " \t\r\n"

    def call(self, name: str) -> None:
        self._space = ""
        self._open = self._count
        self._count += 1
        self._arguments = []
        self._add(CallStart(self._open, name))

    def arguments(self, text: str) -> None:
        assert self._open is not None
        if text:
            self._arguments.append(text)
            self._add(CallArguments(self._open, text))

    def end_call(self, raw: str) -> None:
        """End the open call; whether it is whole is judged here, by its arguments."""
        assert self._open is not None
        whole = is_object("".join(self._arguments))
        self._add(CallEnd(self._open, whole, "" if whole else raw))
        self._open = None
        self._trim = " \t\r\n"
        self._joint = "\n" if self._told else ""

    @property
    def in_call(self) -> bool:
        return self._open is not None

    def not_a_call(self, raw: str) -> None:
        """What looked like a call was none, or went astray after it had begun."""
        if self._open is not None:
            self.end_call(raw)
        else:
            self.content(raw)

    def add(self, events: Sequence[Event]) -> None:
        """Events that another parser has found."""
        for event in events:
            self._add(event)

    def end(self) -> None:
        if self._space:
            self._add(Content(self._space))
            self._space = ""

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Content | Reasoning | CallArguments):
            if not event.text:
                return
            if isinstance(event, Content) and isinstance(last, Content):
                self._events[-1] = Content(last.text + event.text)
                return
            if isinstance(event, Reasoning) and isinstance(last, Reasoning):
                self._events[-1] = Reasoning(last.text + event.text)
                return
            if isinstance(event, CallArguments) and isinstance(last, CallArguments):
                self._events[-1] = CallArguments(last.index, last.text + event.text)
                return
        self._events.append(event)


class Reader:
    """A `Parser` made of a generator function."""

    def __init__(self, read: Callable[[Feed, Output], Reading], *, calls: bool) -> None:
        self._feed = Feed()
        self._output = Output(calls=calls)
        self._reading: Reading | None = read(self._feed, self._output)

    @property
    def reasons(self) -> bool:
        return self._output.reasons and not self._feed.text

    def feed(self, text: str) -> list[Event]:
        if text:
            self._feed.text += text
            self._run()
        return self._output.drain()

    def finish(self) -> list[Event]:
        self._feed.ended = True
        self._run()
        self._output.end()
        return self._output.drain()

    def _run(self) -> None:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
