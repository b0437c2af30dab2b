"""What the user sees: answers on standard output, everything else on standard error.

Colour, Markdown and the progress bar are for terminals only; NO_COLOR and TERM=dumb turn styles
off. Knows nothing of engines.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

from speculoe_local.cli.markdown import DIM, RESET, MarkdownStream

__all__ = ["AnswerWriter", "LoadBar", "note", "styles"]

# An answer could otherwise move the cursor, retitle the window or write to the clipboard.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR_WIDTH = 30
_BAR_DELAY_S = 0.3
_BAR_PERIOD_S = 0.05


def styles(stream: TextIO) -> bool:
    """Whether `stream` may carry SGR codes."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def note(text: str) -> None:
    """One remark to the user, on standard error, dim where possible."""
    shown = f"{DIM}{text}{RESET}" if styles(sys.stderr) else text
    print(shown, file=sys.stderr, flush=True)


class AnswerWriter:
    """Writes one answer as it grows. Not a terminal: the answer's own characters and no others."""

    def __init__(self, *, markdown: bool) -> None:
        self._terminal = sys.stdout.isatty()
        self._markdown = MarkdownStream() if markdown and styles(sys.stdout) else None
        self._last = ""

    def feed(self, text: str) -> None:
        if not text:
            return
        self._last = text[-1]
        if self._terminal:
            text = _CONTROLS.sub("", text)
        self._write(self._markdown.feed(text) if self._markdown else text)

    def end(self) -> None:
        """Write what was held back, and a line end if the answer has none."""
        if self._markdown:
            self._write(self._markdown.flush())
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()


class LoadBar:
    """A progress bar on standard error, if that is a terminal and the work takes a while.

    `update` may be called from any one thread.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._terminal = sys.stderr.isatty()
        self._began = self._drawn = time.monotonic()
        self._shown = False

    def update(self, share: float) -> None:
        """`share` of the work is done, 0 to 1."""
        now = time.monotonic()
        if not self._terminal or now - self._began < _BAR_DELAY_S:
            return
        if now - self._drawn < _BAR_PERIOD_S:
            return
        self._drawn, self._shown = now, True
        sys.stderr.write("\r" + _bar(self._label, share, shutil.get_terminal_size().columns))
        sys.stderr.flush()

    def __enter__(self) -> LoadBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            # Spaces rather than an erase code: works on every terminal.
            columns = shutil.get_terminal_size().columns
            sys.stderr.write("\r" + " " * (columns - 1) + "\r")
            sys.stderr.flush()


def _bar(label: str, share: float, columns: int) -> str:
    share = min(max(share, 0.0), 1.0)
    unicode = "utf" in (sys.stderr.encoding or "").lower()
    full, empty = ("█", "░") if unicode else ("#", ".")
    width = max(min(_BAR_WIDTH, columns - len(label) - 8), 0)
    done = round(width * share)
    return f"{label} {full * done}{empty * (width - done)} {share:4.0%}"[: max(columns - 1, 0)]
