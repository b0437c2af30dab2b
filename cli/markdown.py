"""Markdown for a terminal, written once and never redrawn. Knows nothing of models or of screens.

Text is given out as it arrives, styled with SGR codes. What could be the beginning of a marker is
held back until it is decided: a few characters at the start of a line, and `**bold**`, `*italic*`
and `` `code` `` until their end, for at most `MAX_HELD` characters. A marker that stays alone is
text. The result does not depend on how the input was cut.
"""

from __future__ import annotations

import re

__all__ = ["MAX_HELD", "MarkdownStream"]

MAX_HELD = 160
MAX_HEAD = 100

RESET = "\x1b[0m"
BOLD = "\x1b[1m"
DIM = "\x1b[2m"
ITALIC = "\x1b[3m"
CODE = "\x1b[36m"
HEADING = "\x1b[1;4m"

_MARKERS = "*_`"
_WEIGHTS = {1: ITALIC, 2: BOLD, 3: BOLD + ITALIC}
_RULE = re.compile(r" {0,3}([-*_])(?: ?\1){2,} *")
_FENCE = re.compile(r" *(`{3,}|~{3,})([^`]*)")
_HEADING = re.compile(r" {0,3}#{1,6} ")
_BULLET = re.compile(r"( *)[-*+] ")
_QUOTE = re.compile(r" {0,3}> ?")
# What may still become one of the above when more characters follow.
_UNDECIDED = re.compile(
    r" *(?:#{0,6}|[-+]?|>?|[-*_]{1,3}(?: ?[-*_])*|[`~]{1,2}|(?:`{3,}|~{3,})[^`]*)"
)


class MarkdownStream:
    """Styles Markdown that arrives in pieces."""

    __slots__ = ("_fence", "_head", "_held", "_open", "_previous", "_style")

    def __init__(self) -> None:
        self._head: str | None = ""  # start of the line while its kind is open; None once decided
        self._held = ""  # text of the line that may contain an unfinished span
        self._previous = " "  # the character before `_held`
        self._style = ""  # style of the whole line
        self._fence = ""  # the marker that opened the code block we are in
        self._open = ""  # the style now in force on the terminal

    def feed(self, text: str) -> str:
        """What can be written now."""
        return "".join(map(self._push, text))

    def flush(self) -> str:
        """What was held back, once no more follows."""
        rest = ""
        if self._head:
            rest += self._decide(self._head, final=True) or ""
        return rest + self._spans(final=True) + self._emit("")

    def _push(self, character: str) -> str:
        if self._head is None:
            if character == "\n":
                return self._end_line()
            if self._fence:
                return self._emit(CODE, character)
            self._held += character
            return self._spans(final=False)
        if character == "\n":
            head, self._head = self._head, None
            return (self._decide(head, final=True) or "") + self._end_line()
        self._head += character
        written = self._decide(self._head, final=False)
        return written or ""

    def _end_line(self) -> str:
        rest = self._spans(final=True) + self._emit("") + "\n"
        self._head, self._previous, self._style = "", " ", ""
        return rest

    def _decide(self, head: str, *, final: bool) -> str | None:
        """What the beginning of a line comes to, or None while that is open."""
        fence = _FENCE.fullmatch(head)
        if self._fence:
            return self._decide_in_code(head, final=final)
        if not final and len(head) < MAX_HEAD and _UNDECIDED.fullmatch(head):
            return None
        self._head = None
        if final and fence is not None:
            self._fence = fence[1]
            return self._emit(DIM, head)
        if final and _RULE.fullmatch(head):
            return self._emit(DIM, head)
        written = ""
        if heading := _HEADING.match(head):
            self._style, head = HEADING, head[heading.end() :]
        elif bullet := _BULLET.match(head):
            written, head = self._emit("", f"{bullet[1]}• "), head[bullet.end() :]
        elif quote := _QUOTE.match(head):
            written, head = self._emit(DIM, "│ "), head[quote.end() :]
        self._held = head
        return written + self._spans(final=final)

    def _decide_in_code(self, head: str, *, final: bool) -> str | None:
        """Code is given out as it is, unless the line may become the closing fence."""
        marker = head.strip(" ")
        closing = not marker.strip(self._fence[0])
        if final and closing and len(marker) >= len(self._fence):
            self._fence, self._head = "", None
            return self._emit(DIM, head)
        if not final and closing and len(head) < MAX_HEAD:
            return None
        self._head = None
        return self._emit(CODE, head)

    def _spans(self, *, final: bool) -> str:
        """Give out `_held` up to a span that is not finished; `final` when the line is."""
        written, at = self._inline(self._held, self._style, self._previous, final=final)
        if at:
            self._previous = self._held[at - 1]
        self._held = self._held[at:]
        return written

    def _inline(self, text: str, style: str, before: str, *, final: bool) -> tuple[str, int]:
        """What to write of `text`, and how many characters of it that took."""
        written, at = "", 0
        while at < len(text):
            start = _next_marker(text, at)
            written += self._emit(style, text[at:start])
            at = start
            run = _run(text, start)
            if not run or (start + run == len(text) and not final):
                break
            opens = _opens(text, start, run, text[start - 1] if start else before)
            end = _closing(text, start, run, final=final) if opens else None
            if opens and end is None and not final and len(text) - start < MAX_HELD:
                break
            at = start + run
            if end is None:
                written += self._emit(style, text[start:at])
                continue
            inner = text[at:end]
            if text[start] == "`":
                written += self._emit(style + CODE, inner)
            else:
                written += self._inline(inner, style + _WEIGHTS[run], " ", final=True)[0]
            at = end + run
        return written, at

    def _emit(self, style: str, text: str = "") -> str:
        """`text` in `style`; without text, just the end of the style in force."""
        if style == self._open or (style and not text):
            return text
        change = (RESET if self._open else "") + style
        self._open = style
        return change + text


def _next_marker(text: str, at: int) -> int:
    while at < len(text) and text[at] not in _MARKERS:
        at += 1
    return at


def _run(text: str, start: int) -> int:
    end = start
    while end < len(text) and text[end] == text[start]:
        end += 1
    return end - start


def _opens(text: str, start: int, run: int, before: str) -> bool:
    """Whether a span may begin here: `2 * 3`, `snake_case` and `****` are text."""
    after = text[start + run : start + run + 1]
    if text[start] == "`":
        return after != ""
    # Inside a word only `**` marks anything, or `2*3*4` would lose its stars.
    inside = before.isalnum() and (text[start] == "_" or run == 1)
    return run <= 3 and after != "" and not after.isspace() and not inside


def _closing(text: str, start: int, run: int, *, final: bool) -> int | None:
    """Where the marker that ends the span begins, if it is there."""
    at = start + run
    while at < len(text):
        if text[at] != text[start]:
            at += 1
            continue
        length = _run(text, at)
        end = at + length
        certain = final or end < len(text)
        if certain and length == run:
            if text[start] == "`":
                return at
            inside = text[end : end + 1].isalnum() and (text[start] == "_" or run == 1)
            if not text[at - 1].isspace() and not inside:
                return at
        at = end
    return None
