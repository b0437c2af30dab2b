"""Regular expressions of JSON Schema's `pattern`, and character sets, as GBNF over JSON text.

What comes out matches the inside of a JSON string: quotes, backslashes and control characters appear
escaped. Knows nothing of schemas. Where JSON could write a character in several ways, one is offered:
the language may be smaller than the pattern's, never larger.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.gbnf import MAX_REPEAT, literal

if sys.version_info >= (3, 11):
    import re._constants as _op
    import re._parser as _parser
else:  # the same modules under the names they had
    import sre_constants as _op
    import sre_parse as _parser

__all__ = ["ANY_CHARACTER", "pattern_grammar", "pattern_width"]

_TOP = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_SHORT_ESCAPES = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}

Ranges = list[tuple[int, int]]

_DIGIT: Ranges = [(48, 57)]
_WORD: Ranges = [(48, 57), (65, 90), (95, 95), (97, 122)]
# What ECMA-262 calls white space and line ends.
_SPACE: Ranges = [
    *((9, 13), (32, 32), (160, 160), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
_LINE_ENDS: Ranges = [(10, 10), (13, 13), (0x2028, 0x2029)]

# Lone surrogates (\ud800) are left out: they are JSON, but no text that UTF-8 could carry.
ANY_CHARACTER = (
    r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" '
    r"([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}))"
)


def pattern_width(pattern: str) -> tuple[int, int | None]:
    """Fewest and most characters of a text that `pattern` accepts; None: no bound."""
    tree = _parse(pattern)
    low, high = tree.getwidth()
    ends = ((_op.AT, _op.AT_BEGINNING), (_op.AT, _op.AT_END))
    anchored = len(tree) > 1 and (tree[0], tree[-1]) == ends
    return int(low), int(high) if anchored and high < _op.MAXREPEAT else None


def pattern_grammar(pattern: str, any_character: str) -> str:
    """A GBNF expression for JSON strings' insides in which `pattern` is found.

    `any_character` names the rule of one character, used where the pattern is not anchored. Raises
    GrammarError for what no grammar can say: look-around, back references, inline flags, `\\b`.
    """
    return _Translation(pattern, any_character).top(list(_parse(pattern)), started=False)


def _parse(pattern: str) -> Any:
    if len(pattern) > 4096:
        raise GrammarError(f"pattern has {len(pattern)} characters, the limit is 4096; shorten it")
    try:
        tree = _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise GrammarError(f"pattern {pattern[:60]!r} is not understood: {error}") from None
    if tree.state.flags & ~re.UNICODE.value:
        raise GrammarError(f"pattern {pattern[:60]!r} sets flags, which no grammar can follow")
    return tree


class _Translation:
    def __init__(self, pattern: str, any_character: str) -> None:
        self._pattern = pattern
        self._any = f"{any_character}*"

    def top(self, items: list[Any], *, started: bool) -> str:
        """A whole pattern, or one of its outermost alternatives, whose ends may be open."""
        while items and items[0] == (_op.AT, _op.AT_BEGINNING):
            items, started = items[1:], True
        if len(items) == 1 and items[0][0] is _op.BRANCH:
            return _either(self.top(list(branch), started=started) for branch in items[0][1][1])
        lead = [] if started else [self._any]
        if items and items[-1][0] is _op.BRANCH:
            ends = _either(self._tail(list(branch)) for branch in items[-1][1][1])
            return " ".join([*lead, *self._sequence(items[:-1]), ends])
        return " ".join([*lead, self._tail(items)])

    def _tail(self, items: list[Any]) -> str:
        ended = False
        while items and items[-1] == (_op.AT, _op.AT_END):
            items, ended = items[:-1], True
        parts = self._sequence(items)
        return " ".join(parts if ended else [*parts, self._any]) or '""'

    def _sequence(self, items: Iterable[Any]) -> list[str]:
        return [self._one(code, argument) for code, argument in items]

    def _group(self, items: Iterable[Any]) -> str:
        return f"({' '.join(self._sequence(items)) or chr(34) * 2})"

    def _one(self, code: Any, argument: Any) -> str:
        if code is _op.LITERAL:
            return literal(_escaped(argument))
        if code is _op.NOT_LITERAL:
            return _class(_complement([(argument, argument)]), self._pattern)
        if code is _op.ANY:
            return _class(_complement(_LINE_ENDS), self._pattern)
        if code is _op.IN:
            return _class(self._ranges(argument), self._pattern)
        if code is _op.BRANCH:
            return _either(self._group(branch) for branch in argument[1])
        if code is _op.SUBPATTERN and not (argument[1] or argument[2]):
            return self._group(argument[3])
        if code in (_op.MAX_REPEAT, _op.MIN_REPEAT):
            low, high, inner = argument
            if low > MAX_REPEAT:
                raise self._refuse(f"{low} repetitions, more than {MAX_REPEAT}")
            most = "" if high == _op.MAXREPEAT else min(int(high), MAX_REPEAT)
            return f"{self._group(inner)}{{{low},{most}}}"
        raise self._refuse(str(code).lower().replace("_", " "))

    def _ranges(self, members: Sequence[tuple[Any, Any]]) -> Ranges:
        found: Ranges = []
        negated = False
        for code, argument in members:
            if code is _op.NEGATE:
                negated = True
            elif code is _op.LITERAL:
                found.append((argument, argument))
            elif code is _op.RANGE:
                found.append(argument)
            elif code is _op.CATEGORY:
                found += self._category(argument)
            else:
                raise self._refuse(str(code).lower())
        return _complement(found) if negated else found

    def _category(self, category: Any) -> Ranges:
        known = {
            _op.CATEGORY_DIGIT: _DIGIT,
            _op.CATEGORY_NOT_DIGIT: _complement(_DIGIT),
            _op.CATEGORY_WORD: _WORD,
            _op.CATEGORY_NOT_WORD: _complement(_WORD),
            _op.CATEGORY_SPACE: _SPACE,
            _op.CATEGORY_NOT_SPACE: _complement(_SPACE),
        }
        return known[category]

    def _refuse(self, what: str) -> GrammarError:
        return GrammarError(
            f"pattern {self._pattern[:60]!r} uses {what}, which no grammar can follow; leave it out"
        )


def _either(alternatives: Iterable[str]) -> str:
    return f"({' | '.join(alternatives)})"


def _escaped(code: int) -> str:
    """A character as JSON writes it inside a string."""
    short = _SHORT_ESCAPES.get(code)
    if short is not None:
        return short
    return chr(code) if 0x20 <= code != 0x7F else f"\\u{code:04x}"


def _complement(ranges: Ranges) -> Ranges:
    found: Ranges = []
    at = 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return [*found, (at, _TOP)] if at <= _TOP else found


def _class(ranges: Ranges, pattern: str) -> str:
    """One character out of `ranges`: those that stand for themselves as a class, others escaped."""
    plain: list[str] = []
    escaped: list[str] = []
    special = [*((code, code) for code in (34, 92, 127)), (0, 31), _SURROGATES]
    for low, high in ranges:
        for start, end in _cut(low, high, special):
            plain.append(_hex(start) if start == end else f"{_hex(start)}-{_hex(end)}")
        escaped += [literal(text) for code, text in _SHORT_ESCAPES.items() if low <= code <= high]
    parts = [f"[{''.join(plain)}]"] if plain else []
    if not parts and not escaped:
        raise GrammarError(f"pattern {pattern[:60]!r} asks for characters that no answer can hold")
    return _either([*parts, *dict.fromkeys(escaped)])


def _cut(low: int, high: int, holes: Iterable[tuple[int, int]]) -> Ranges:
    """`low`..`high` without `holes`."""
    for start, end in sorted(holes):
        if end < low or start > high:
            continue
        before = [(low, start - 1)] if low < start else []
        return [*before, *(_cut(end + 1, high, holes) if end < high else [])]
    return [(low, high)]


def _hex(code: int) -> str:
    if chr(code).isascii() and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02X}" if code < 0x100 else f"\\U{code:08X}"
