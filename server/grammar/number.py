"""Bounds on numbers as GBNF: `{"minimum": 3, "maximum": 120}` as digits. Knows nothing of schemas.

Integers have up to 16 digits, as everywhere in our JSON grammars: more would not survive a double.
"""

from __future__ import annotations

from speculoe_local.server.grammar.gbnf import literal

__all__ = ["INTEGER", "NUMBER", "Bound", "integer_between", "number_between"]

INTEGER = '"-"? ("0" | [1-9] [0-9]{0,15})'
NUMBER = f'{INTEGER} ("." [0-9]{{1,16}})? ([eE] [-+]? [0-9]{{1,2}})?'

_DIGITS = 16
_FRACTION = '("." [0-9]{1,15})?'
_ABOVE_ZERO = '"." [0-9]{0,14} [1-9]'

# An integral bound and whether it is exclusive; None: unbounded.
Bound = tuple[int, bool] | None


def integer_between(low: int | None, high: int | None) -> str:
    """A GBNF expression for the integers low..high, both included; "" when there are none."""
    parts = _magnitudes(max(low or 0, 0) if low is not None else 0, high)
    if low is None or low < 0:
        most = None if low is None else -low
        least = 1 if high is None or high >= 0 else -high
        negative = _magnitudes(least, most)
        if negative:
            parts.append(f'"-" ({" | ".join(negative)})')
    return f"({' | '.join(parts)})" if parts else ""


def number_between(low: Bound, high: Bound) -> str:
    """The same for numbers with a fraction of up to 15 digits; no exponent."""
    parts = []
    if high is None or high[0] > 0 or (high[0] == 0 and not high[1]):
        start = (0, False) if low is None or low[0] < 0 else low
        parts += _fractions(start, high)
    if low is None or low[0] < 0:
        near = (0, True) if high is None or high[0] >= 0 else (-high[0], high[1])
        negative = _fractions(near, None if low is None else (-low[0], low[1]))
        if negative:
            parts.append(f'"-" ({" | ".join(negative)})')
    return f"({' | '.join(parts)})" if parts else ""


def _fractions(low: tuple[int, bool], high: Bound) -> list[str]:
    """Numbers from low to high, both at least 0."""
    start, open_start = low
    if high is None:
        end, open_end = None, True
    else:
        end, open_end = high
    if end is not None and end <= start:
        closed = end == start and not open_start and not open_end
        return [literal(str(start))] if closed else []
    parts = [f"{literal(str(start))} {_ABOVE_ZERO if open_start else _FRACTION}"]
    inner = _magnitudes(start + 1, None if end is None else end - 1)
    parts += [f"({' | '.join(inner)}) {_FRACTION}"] if inner else []
    if end is not None and not open_end:
        parts.append(literal(str(end)))
    return parts


def _magnitudes(low: int, high: int | None) -> list[str]:
    """Alternatives for low..high, 0 <= low, without leading zeros."""
    if high is not None and high < low:
        return []
    parts: list[str] = []
    most_digits = len(str(high)) if high is not None else max(_DIGITS, len(str(low)))
    for digits in range(len(str(low)), most_digits + 1):
        least = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        most = 10**digits - 1 if high is None else min(high, 10**digits - 1)
        if digits > len(str(low)) and most == 10**digits - 1:
            # From here on whole decades: one expression for all of them.
            last = most_digits if high is None or high == 10**most_digits - 1 else most_digits - 1
            parts.append(f"[1-9] [0-9]{{{digits - 1},{last - 1}}}")
            if last < most_digits and high is not None:
                parts.append(_same_length(str(10 ** (most_digits - 1)), str(high)))
            break
        parts.append(_same_length(str(least), str(most)))
    return parts


def _same_length(low: str, high: str) -> str:
    """Digit strings between two of equal length."""
    if low == high:
        return literal(low)
    if low.strip("0") == "" and high.strip("9") == "":
        return f"[0-9]{{{len(low)}}}"
    if low[0] == high[0]:
        return f"{literal(low[0])} {_grouped(_same_length(low[1:], high[1:]))}"
    if len(low) == 1:
        return f"[{low}-{high}]"
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(f"{literal(low[0])} {_grouped(_same_length(low[1:], '9' * rest))}")
        first += 1
    ends = []
    if high[1:].strip("9"):
        ends.append(f"{literal(high[0])} {_grouped(_same_length('0' * rest, high[1:]))}")
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}] [0-9]{{{rest}}}")
    return " | ".join([*parts, *ends])


def _grouped(expression: str) -> str:
    return f"({expression})" if "|" in expression else expression
