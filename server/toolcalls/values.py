"""JSON text, as models write it and as clients must get it. Knows no format of calls.

`json_object` takes an object from a feed while it arrives; `coerce` makes JSON of an argument that a format
writes as bare text, by the schema of the function.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

from speculoe_local.server.toolcalls.feed import Feed, NotACall

__all__ = ["StringSink", "coerce", "dumps", "is_text", "json_object", "json_string", "json_value"]

_CONTROLS = {chr(code): f"\\u{code:04x}" for code in range(0x20)} | {
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
}
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_MAX_LITERAL_CHARS = 1 << 16


def dumps(value: Any) -> str:
    """One line of JSON, letters as they are. Raises ValueError for what JSON has no notation for."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def json_object(feed: Feed, sink: Callable[[str], None]) -> Generator[None, None, bool]:
    """Take a JSON object or array, giving its text to `sink` as it comes. False: it ended before its end.

    Models write line breaks into strings as they are, which JSON forbids: these come out escaped.
    """
    depth, in_string, escaped = 0, False, False
    while (yield from feed.peek()):
        out: list[str] = []
        used = 0
        for character in feed.text:
            used += 1
            if in_string:
                if escaped:
                    escaped = False
                elif character == "\\":
                    escaped = True
                elif character == '"':
                    in_string = False
                out.append(_CONTROLS.get(character, character))
                continue
            out.append(character)
            if character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if depth <= 0:
                    break
        feed.take(used)
        sink("".join(out))
        if depth <= 0 and not in_string:
            return True
    return False


def json_string(feed: Feed) -> Generator[None, None, str]:
    """Take a JSON string and decode it. Raises NotACall where there is none."""
    if not (yield from feed.literal('"')):
        raise NotACall
    parts = ['"']
    closed = escaped = False
    while not closed:
        if not (yield from feed.peek()):
            raise NotACall
        used = 0
        for character in feed.text:
            used += 1
            parts.append(_CONTROLS.get(character, character))
            closed = character == '"' and not escaped
            if closed:
                break
            escaped = character == "\\" and not escaped
        feed.take(used)
    try:
        decoded = json.loads("".join(parts))
    except ValueError:
        raise NotACall from None
    return str(decoded)


def json_value(feed: Feed, sink: Callable[[str], None]) -> Generator[None, None, None]:
    """Take any JSON value. Raises NotACall where there is none."""
    first = yield from feed.peek()
    if first == '"':
        sink(dumps((yield from json_string(feed))))
    elif first and first in "{[":
        if not (yield from json_object(feed, sink)):
            raise NotACall
    else:
        word = ""
        while (character := (yield from feed.peek())) and (
            character.isalnum() or character in "+-."
        ):
            word += feed.take(1)
            if len(word) > 400:  # the longest double in full has 325 characters
                raise NotACall
        try:
            json.loads(word)
        except ValueError:
            raise NotACall from None
        sink(word)


class StringSink:
    """Bare text into a JSON string, piece by piece. `lines`: the text stands between line breaks that are
    the format's, not its own; one is dropped at either end."""

    def __init__(self, sink: Callable[[str], None], *, lines: bool) -> None:
        self._sink = sink
        self._lines = lines
        self._first = True
        self._held = ""
        sink('"')

    def __call__(self, text: str) -> None:
        if self._first and self._lines and text:
            self._first = False
            text = text.removeprefix("\n")
        if self._lines:
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._sink(dumps(text)[1:-1])

    def close(self) -> None:
        self._sink('"')


def is_text(schema: Mapping[str, Any] | None) -> bool:
    """Whether an argument of this schema is a string and nothing else."""
    return _types(schema) == {"string"}


def coerce(text: str, schema: Mapping[str, Any] | None) -> str:
    """JSON for an argument written as bare text. What does not fit its schema stays a string."""
    types = _types(schema)
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return "null"
    if "string" in types:
        return dumps(text)
    value = _read(bare, python=bool(types))
    if isinstance(value, bool):
        fits = not types or "boolean" in types
    elif isinstance(value, int):
        fits = not types or bool(types & {"integer", "number"})
    elif isinstance(value, float):
        if "number" not in types and "integer" in types and value.is_integer():
            value = int(value)
        fits = not types or bool(types & {"integer", "number"})
    elif isinstance(value, dict):
        fits = not types or "object" in types
    elif isinstance(value, list):
        fits = not types or "array" in types
    else:
        fits = value is None and bare == "null" and not types
    try:
        return dumps(value) if fits else dumps(text)
    except (ValueError, TypeError, RecursionError):
        return dumps(text)


def _read(text: str, *, python: bool) -> Any:
    """`text` as JSON, else (a schema asks for it) as a Python literal, else as itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if python and len(text) <= _MAX_LITERAL_CHARS:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what the model wrote is no concern of our log
                return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
    return text


def _types(schema: Mapping[str, Any] | None) -> set[str]:
    """The JSON types a schema names; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set()
    if isinstance(named, list):
        found = {name for name in named if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list):
            for branch in branches:
                if isinstance(branch, Mapping) and isinstance(branch.get("type"), str):
                    found.add(branch["type"])
    enum = schema.get("enum")
    if not found and isinstance(enum, list) and enum and all(isinstance(v, str) for v in enum):
        found = {"string"}
    return {name for name in found if name in _TYPES}
