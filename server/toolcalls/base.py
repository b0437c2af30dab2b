"""What a model's answer is made of: the events that parsers give out. Knows no format, no dialect, no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "Call",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Collected",
    "Content",
    "Event",
    "Parser",
    "Reasoning",
    "Schemas",
    "collect",
    "is_object",
]

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by the name of the function."""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model thought aloud."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name`; `index` counts the calls of an answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further piece of the arguments, which are JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is over. `whole`: its arguments together are a JSON object. Where not (the answer was cut
    off, or went astray after the call had begun), `raw` is what the model wrote, to be shown as text."""

    index: int
    whole: bool
    raw: str


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


class Parser(Protocol):
    """Reads one answer. The events are the same however the text is cut, but for where texts are cut."""

    @property
    def reasons(self) -> bool:
        """Whether reasoning between tags is open, and nothing is held back that might be its end."""
        ...

    def feed(self, text: str) -> list[Event]:
        """What `text` made certain; possibly nothing yet."""
        ...

    def finish(self) -> list[Event]:
        """The rest, once the answer is over. Nothing may be fed afterwards."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Collected:
    """An answer as a whole."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = field(default_factory=tuple)


def collect(events: Sequence[Event]) -> Collected:
    """The answer that `events` make. Calls that are not whole become content, as the model wrote them."""
    content: list[str] = []
    reasoning: list[str] = []
    open_calls: dict[int, tuple[str, list[str]]] = {}
    calls: list[Call] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            reasoning.append(event.text)
        elif isinstance(event, CallStart):
            open_calls[event.index] = (event.name, [])
        elif isinstance(event, CallArguments):
            open_calls[event.index][1].append(event.text)
        else:
            name, pieces = open_calls.pop(event.index)
            if event.whole:
                calls.append(Call(name, "".join(pieces)))
            else:
                content.append("\n" + event.raw if content else event.raw)
    return Collected("".join(content), "".join(reasoning), tuple(calls))


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object, strictly."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
