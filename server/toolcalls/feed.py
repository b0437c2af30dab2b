"""Text that arrives cut anywhere, read as if it were all there.

Each format is a generator over a `Feed`: plain top-down reading that yields where it needs more text. What is
taken never depends on how the text was cut. Knows no format and no events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence

__all__ = ["Feed", "NotACall", "Reading", "cut"]

MAX_NAME_CHARS = 128
_NAME = re.compile(rf"\s{{0,8}}[\w.:/-]{{0,{MAX_NAME_CHARS}}}\s{{0,8}}")

Reading = Generator[None, None, None]


class NotACall(Exception):  # a finding, not an error: the text is content then
    """What looked like a call is none."""


def cut(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """Text before the first of `marks`, that mark, and what follows it.

    Without one: the text that cannot become part of a mark, None, and the tail that still could.
    """
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        at, mark = found
        return text[:at], mark, text[at + len(mark) :]
    longest = max(map(len, marks), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return text[:at], None, text[at:]
    return text, None, ""


class Feed:
    """Text that arrives in pieces; readers take it from the front and yield where there is none."""

    __slots__ = ("_record", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._record: list[str] | None = None

    def record(self, begin: str) -> None:
        """From now on keep what is taken, after `begin`."""
        self._record = [begin]

    def recorded(self) -> str:
        return "".join(self._record or ())

    def forget(self) -> None:
        self._record = None

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def peek(self) -> Generator[None, None, str]:
        """The next character, left in place; "" at the end."""
        while not self.text and not self.ended:
            yield
        return self.text[:1]

    def space(self) -> Generator[None, None, str]:
        """Take white space; returns it."""
        taken = ""
        while (yield from self.peek()).isspace():
            taken += self.take(len(self.text) - len(self.text.lstrip()))
        return taken

    def literal(self, word: str) -> Generator[None, None, bool]:
        """Take `word` if it comes next."""
        while len(self.text) < len(word) and word.startswith(self.text) and not self.ended:
            yield
        if not self.text.startswith(word):
            return False
        self.take(len(word))
        return True

    def until(
        self, marks: Sequence[str], sink: Callable[[str], None], limit: int | None = None
    ) -> Generator[None, None, str | None]:
        """Give text to `sink` up to the first of `marks`, which is taken and returned.

        None: the text, or `limit` characters of it, ended before a mark.
        """
        given = 0
        while True:
            before, mark, _ = cut(self.text, marks)
            if mark is None and self.ended:
                before = self.text
            if limit is not None and given + len(before) > limit:
                before, mark = before[: limit - given], None
            if before:
                sink(self.take(len(before)))
                given += len(before)
            if mark is not None:
                self.take(len(mark))
                return mark
            if self.ended or given == limit:
                return None
            yield

    def name(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str | None]]:
        """A name and the mark after it. Raises NotACall where no function is called like that."""
        name = ""
        while True:
            before, mark, _ = cut(self.text, marks)
            if mark is None and self.ended:
                before = self.text
            # Only what may belong to a name is taken: where it ends must not depend on the pieces.
            good = _NAME.match(name + before)
            assert good is not None
            astray = good.end() < len(name + before)
            name += self.take(good.end() - len(name))
            if astray:
                raise NotACall
            if mark is not None or self.ended:
                break
            yield
        if mark is not None:
            self.take(len(mark))
        if not name.strip():
            raise NotACall
        return name.strip(), mark
