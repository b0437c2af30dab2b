"""JSON as GBNF: the rules of its values, of known string formats, of members and items in order.

Expressions only; knows nothing of schemas. `add` names an expression and gives back the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.gbnf import MAX_REPEAT, literal
from speculoe_local.server.grammar.number import INTEGER, NUMBER
from speculoe_local.server.grammar.regex import ANY_CHARACTER

__all__ = [
    "Add",
    "FORMATS",
    "JSON_OBJECT",
    "JSON_RULES",
    "either",
    "items_of",
    "members_of",
    "other_name",
    "times",
]

MAX_NAME_CHARS = 128

Add = Callable[[str, str], str]

_COMMA = '"," ws '
_HEX = "[0-9a-fA-F]"
_DATE = '[1-9] [0-9]{3} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | "1" [0-9] | "2" [0-8])'
_TIME = (
    '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})? '
    '("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
)
_OCTET = '([0-9] | [1-9] [0-9] | "1" [0-9]{2} | "2" [0-4] [0-9] | "25" [0-5])'
_LABEL = "[a-z0-9] ([a-z0-9-]{0,30} [a-z0-9])?"
# Days stop at 28: a grammar cannot know how long a month is.
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f'{_DATE} "T" {_TIME}',
    "uuid": f'{_HEX}{{8}} ("-" {_HEX}{{4}}){{3}} "-" {_HEX}{{12}}',
    "ipv4": f'{_OCTET} ("." {_OCTET}){{3}}',
    "ipv6": f'{_HEX}{{1,4}} (":" {_HEX}{{1,4}}){{7}}',
    "hostname": f'{_LABEL} ("." {_LABEL}){{0,6}}',
    "email": f'[a-zA-Z0-9_+-]{{1,32}} ("." [a-zA-Z0-9_+-]{{1,32}}){{0,3}} "@" {_LABEL} ("." {_LABEL}){{1,5}}',
    "uri": f'"http" "s"? "://" {_LABEL} ("." {_LABEL}){{0,6}} ("/" [a-zA-Z0-9._~-]{{0,64}}){{0,16}}',
    "duration": '"P" ([0-9]{1,4} "D" | "T" [0-9]{1,4} [HMS])',
}
FORMATS = {**FORMATS, "uri-reference": FORMATS["uri"], "url": FORMATS["uri"], "iri": FORMATS["uri"]}

JSON_RULES: Mapping[str, str] = {
    "ws": '| " " | "\\n" [ \\t]{0,20}',
    "char": ANY_CHARACTER,
    "string": r'"\"" char* "\""',
    "number": NUMBER,
    "integer": INTEGER,
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "member": 'string ":" ws value',
    "object": '"{" ws (member ("," ws member)* ws)? "}"',
    "array": '"[" ws (value ("," ws value)* ws)? "]"',
}

JSON_OBJECT = "\n".join(
    f"{name} ::= {rule}"
    for name, rule in {"root": "object", **JSON_RULES}.items()
    if name != "integer"
)


def either(parts: Iterable[str]) -> str:
    """One of several expressions."""
    unique = list(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else f"({' | '.join(unique)})"


def members_of(members: list[tuple[str, bool]], other: str | None, add: Add) -> str:
    """Members in order; two chains of rules, for nothing written yet and for a comma due."""
    if not members and other is None:
        return '"{" ws "}"'
    later = f'("," ws {other})*' if other else ""
    start = f"({other} {later})?" if other else ""
    for name, needed in reversed(members):
        tail = add(later, "more") if len(later) > 200 else later
        begin = add(start, "first") if len(start) > 200 else start
        here = f"{name} {tail}".rstrip()
        if needed:
            later, start = f'"," ws {here}', here
        else:
            later = f'("," ws {name})? {tail}'.rstrip()
            start = f"({here} | {begin})" if begin else f"({here})?"
    return add(f'"{{" ws {start} ws "}}"', "object")


def other_name(listed: Iterable[str], add: Add) -> str:
    """A string that is none of the listed names: a repeated name would escape its schema."""
    names = sorted(listed)
    if not names:
        return "string"
    for name in names:
        if (
            len(name) > MAX_NAME_CHARS
            or not name.isascii()
            or not name.isprintable()
            or set(name) & {'"', "\\"}
        ):
            raise GrammarError(f"additionalProperties beside a property named {name[:60]!r}")
    return f'"\\"" {_not_one_of(names, 0, add)} "\\""'


def _not_one_of(names: list[str], depth: int, add: Add) -> str:
    """Texts that differ from all of `names`, which agree in their first `depth` characters.

    Escapes are left out: they could spell a listed name.
    """
    nexts: dict[str, list[str]] = {}
    for name in names:
        if len(name) > depth:
            nexts.setdefault(name[depth], []).append(name)
    plain = r'[^"\\\x7F\x00-\x1F]'
    ends_here = any(len(name) == depth for name in names)
    parts = []
    if nexts:
        others = "".join(f"\\x{ord(character):02X}" for character in nexts)
        parts.append(rf'[^"\\\x7F\x00-\x1F{others}] {plain}*')
    else:
        parts.append(f"{plain}+" if ends_here else f"{plain}*")
    for character, group in nexts.items():
        parts.append(f"{literal(character)} {add(_not_one_of(group, depth + 1, add), 'other')}")
    if nexts and not ends_here:
        parts.append('""')
    return either(parts)


def items_of(heads: list[str], rest: str | None, least: int, most: int | None) -> str:
    """What stands between the brackets."""
    if rest is None:
        needed = min(least, len(heads))
        if not heads:
            return ""
        text = ""
        for i, head in reversed(list(enumerate(heads))):
            inner = f"{'' if i == 0 else _COMMA}{head} {text}".strip()
            text = f"({inner})?" if i >= max(needed, 0) and i >= needed else inner
        return f"{text} ws"
    if heads:
        more = max(0, least - len(heads))
        room = None if most is None else most - len(heads)
        return f"{_COMMA.join(heads)} ({_COMMA}{rest}){times(more, room)} ws"
    room = None if most is None else most - 1
    text = f"{rest} ({_COMMA}{rest}){times(max(0, least - 1), room)} ws"
    return text if least else f"({text})?"


def times(least: int, most: int | None) -> str:
    if least > MAX_REPEAT:
        raise GrammarError(f"at least {least} is above the limit of {MAX_REPEAT}")
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{min(most, MAX_REPEAT)}}}"
