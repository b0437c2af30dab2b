"""From the bytes of tokens to text that may be shown. Knows nothing of tokens, models or terminals.

`Utf8Stream` joins the bytes of tokens into whole characters; `StopMatcher` keeps stop strings, and
whatever might become one, away from the reader. Both give the same text however their input is cut.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from speculoe_local.runtime.errors import OptionError

__all__ = ["StopMatcher", "Utf8Stream"]


class Utf8Stream:
    """Decodes UTF-8 that arrives in pieces, cut anywhere.

    A character is given out once its last byte is in. Bytes that can no longer become a character
    turn into U+FFFD, exactly as `bytes.decode("utf-8", "replace")` would do with the whole.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        """The characters completed by `piece`; possibly none."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What an unfinished character at the end comes to; the stream is as new afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StopMatcher:
    """Finds the first of several stop strings in text that arrives in pieces.

    The stop string that is complete first wins; of two complete at the same character, the longer.
    A tail that could still become a stop string is held back, never more. Time is proportional to
    the text, whatever the number of stop strings (Aho and Corasick, 1975).
    """

    __slots__ = ("_depth", "_fail", "_found", "_goto", "_held", "_match", "_state")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """Raises `OptionError` for an empty stop string, which would end every answer at once."""
        if isinstance(stops, str):
            raise OptionError(f"stop strings {stops!r} are one string: give a list of strings")
        if "" in stops:
            raise OptionError("stop string '' is empty and would end every answer: leave it out")
        # One node per prefix of a stop string; node 0 is the empty prefix.
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._goto)
        self._link_suffixes()
        self._state = 0
        self._held = ""
        self._found: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that was found, or None."""
        return self._found

    def feed(self, text: str) -> str:
        """The text that may be shown now. Empty once a stop string was found."""
        if self._found is not None:
            return ""
        if len(self._goto) == 1:
            return text
        seen = self._held + text
        for end in range(len(self._held) + 1, len(seen) + 1):
            self._state = self._next(self._state, seen[end - 1])
            found = self._match[self._state]
            if found is not None:
                self._found, self._held = found, ""
                return seen[: end - len(found)]
        kept = self._depth[self._state]
        self._held = seen[len(seen) - kept :]
        return seen[: len(seen) - kept]

    def flush(self) -> str:
        """The text held back, once it is certain that no more follows."""
        rest, self._held, self._state = self._held, "", 0
        return rest

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            child = self._goto[node].get(character)
            if child is None:
                child = len(self._goto)
                self._goto[node][character] = child
                self._goto.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = child
        self._match[node] = stop

    def _link_suffixes(self) -> None:
        """Point each node at its longest proper suffix that is a node too, short nodes first."""
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for character, child in self._goto[node].items():
                suffix = self._next(self._fail[node], character) if node else 0
                self._fail[child] = suffix
                # A node's own stop string is the longest one ending there; else a suffix's.
                self._match[child] = self._match[child] or self._match[suffix]
                queue.append(child)

    def _next(self, node: int, character: str) -> int:
        while character not in self._goto[node]:
            if node == 0:
                return 0
            node = self._fail[node]
        return self._goto[node][character]
