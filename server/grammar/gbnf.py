"""GBNF, the grammar notation of llama.cpp, checked before llama.cpp sees it.

llama.cpp's parser answers a mistake with a line on stderr that repeats the whole grammar, loops on
`{5,2}`, and copies what is repeated as often as the grammar says. A grammar comes over HTTP, so its
syntax, its depth and its unfolded size are judged here first. Knows nothing of JSON, tokens or models.

Notation: grammars/README.md of the pinned llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from speculoe_local.server.errors import GrammarError

__all__ = ["MAX_CHARS", "MAX_REPEAT", "check", "literal"]

MAX_CHARS = 1 << 18
MAX_DEPTH = 64  # llama.cpp descends into parentheses and rules on the C stack
MAX_RULES = 20_000
MAX_REPEAT = 2000  # llama.cpp takes a larger upper bound for "no bound" without saying so
MAX_ELEMENTS = 400_000  # unfolded, 8 bytes each

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9-]+")
_ESCAPE = re.compile(r'\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\"\[\]-])')
_TOKEN = re.compile(r"!?<(?:\[[0-9]{1,9}\]|[^>\[][^>]*)>")
_REPEAT = re.compile(r"\{[ \t]*([0-9]{1,9})[ \t]*(,[ \t]*([0-9]{1,9})?[ \t]*)?\}")
_LITERAL_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def literal(text: str) -> str:
    """`text` as a GBNF string: `"text"`, with whatever must be escaped."""
    out = []
    for character in text:
        escaped = _LITERAL_ESCAPES.get(character)
        if escaped is None:
            escaped = character if character >= " " else f"\\x{ord(character):02X}"
        out.append(escaped)
    return f'"{"".join(out)}"'


def check(grammar: str) -> None:
    """Raises GrammarError with line and reason when llama.cpp would refuse `grammar`, or choke on it."""
    if len(grammar) > MAX_CHARS:
        raise GrammarError(
            f"the grammar has {len(grammar)} characters, the limit is {MAX_CHARS}; shorten it"
        )
    if "\0" in grammar:
        raise GrammarError("the grammar contains a NUL character; write it as \\x00")
    rules = _Parser(grammar).rules()
    if "root" not in rules:
        raise GrammarError("the grammar has no rule named root; add `root ::= ...`")
    _find_left_recursion(rules)


@dataclass(slots=True)
class _Item:
    """One symbol of a sequence. `ref` names a rule; `loops` when it is repeated without bound."""

    ref: str | None
    elements: int
    optional: bool = False
    loops: bool = False


@dataclass(slots=True)
class _Rule:
    line: int
    alternatives: list[list[_Item]] = field(default_factory=list)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._rules: dict[str, _Rule] = {}
        self._groups = 0
        self._elements = 0

    def rules(self) -> dict[str, _Rule]:
        """All rules; those of parentheses have names that no grammar can write."""
        self._skip(newlines=True)
        while self._at < len(self._text):
            self._rule()
        for name, rule in self._rules.items():
            for item in _items(rule):
                if item.ref is not None and item.ref not in self._rules:
                    raise GrammarError(
                        f"the grammar's rule {name!r} (line {rule.line}) uses {item.ref!r}, "
                        "which is not defined"
                    )
        return self._rules

    def _rule(self) -> None:
        line = self._line()
        name = self._take(_NAME, "the name of a rule").group()
        if name in self._rules:
            raise self._error(f"rule {name!r} is defined twice")
        self._skip(newlines=False)
        if not self._text.startswith("::=", self._at):
            raise self._error("expected ::=")
        self._at += 3
        self._skip(newlines=True)
        self._rules[name] = rule = _Rule(line)
        self._alternatives(rule, 0)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            raise self._error("expected the end of the rule")
        self._skip(newlines=True)

    def _alternatives(self, rule: _Rule, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._error(f"parentheses nest deeper than {MAX_DEPTH}; name the parts")
        if len(self._rules) > MAX_RULES:
            raise self._error(f"more than {MAX_RULES} rules and parentheses; simplify")
        while True:
            rule.alternatives.append(self._sequence(depth))
            if not self._text.startswith("|", self._at):
                return
            self._at += 1
            self._skip(newlines=True)

    def _sequence(self, depth: int) -> list[_Item]:
        items: list[_Item] = []
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in "*+?{":
                self._repeat(items)
            else:
                item = self._symbol(character, depth)
                if item is None:
                    break
                items.append(item)
                self._count(item.elements)
            self._skip(newlines=depth > 0)
        return items

    def _symbol(self, character: str, depth: int) -> _Item | None:
        if character == '"':
            return _Item(None, self._characters('"'))
        if character == "[":
            return _Item(None, self._class())
        if character in "<!":
            self._take(_TOKEN, "a token as <text> or <[id]>")
            return _Item(None, 1)
        if character == ".":
            self._at += 1
            return _Item(None, 1)
        if character == "(":
            return self._group(depth)
        found = _NAME.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return _Item(found.group(), 1)

    def _group(self, depth: int) -> _Item:
        self._at += 1
        self._skip(newlines=True)
        self._groups += 1
        name = f"({self._groups})"
        self._rules[name] = rule = _Rule(self._line())
        self._alternatives(rule, depth + 1)
        if not self._text.startswith(")", self._at):
            raise self._error("expected )")
        self._at += 1
        return _Item(name, 1)

    def _characters(self, end: str) -> int:
        """Skips a string or class up to and with `end`; how many characters it names."""
        self._at += 1
        count = 0
        while not self._text.startswith(end, self._at):
            if self._at >= len(self._text):
                raise self._error(f"expected {end} before the end of the grammar")
            if self._text[self._at] == "\\":
                self._take(_ESCAPE, 'an escape (\\n \\t \\r \\\\ \\" \\[ \\] \\- \\xHH \\uHHHH)')
            else:
                self._at += 1
            count += 1
        self._at += 1
        return count

    def _class(self) -> int:
        inner = self._text[self._at + 1 : self._at + 2]
        if inner == "^":
            self._at += 1
        count = self._characters("]")
        if count == 0:
            raise self._error("[] matches nothing; name at least one character")
        return count

    def _repeat(self, items: list[_Item]) -> None:
        character = self._text[self._at]
        if not items or items[-1].elements == 0:
            raise self._error(f"nothing to repeat before {character}")
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(character, (0, 0))
        if character == "{":
            found = self._take(_REPEAT, "a repetition as {n}, {n,} or {n,m}")
            low = int(found[1])
            high = low if found[2] is None else int(found[3]) if found[3] else None
        else:
            self._at += 1
        if high is not None and high < low:
            raise self._error(f"{{{low},{high}}} repeats at most less often than at least")
        if max(low, high or 0) > MAX_REPEAT:
            raise self._error(f"{max(low, high or 0)} repetitions; the limit is {MAX_REPEAT}")
        item = items[-1]
        times = max(low, low + 1 if high is None else high)
        self._count(item.elements * times + 2 * times)
        # Repeated again, the whole counts as one symbol of that size: x{9}{9} unfolds to 81.
        item.elements *= max(times, 1)
        item.optional = item.optional or low == 0
        item.loops = item.loops or high is None

    def _count(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            raise self._error(
                f"repetitions unfold to more than {MAX_ELEMENTS} symbols; repeat less"
            )

    def _take(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._error(f"expected {what}")
        self._at = found.end()
        return found

    def _skip(self, *, newlines: bool) -> None:
        found = (_SPACES if newlines else _SPACE).match(self._text, self._at)
        assert found is not None
        self._at = found.end()

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _error(self, reason: str) -> GrammarError:
        near = self._text[self._at : self._at + 20].split("\n")[0]
        where = f"at {near!r}" if near else "at its end"
        return GrammarError(f"the grammar, line {self._line()}, {where}: {reason}")


def _items(rule: _Rule) -> Iterator[_Item]:
    for alternative in rule.alternatives:
        yield from alternative


def _find_left_recursion(rules: dict[str, _Rule]) -> None:
    """Raises GrammarError for a rule that can begin with itself: it would never read a character."""
    empty = _nullable(rules)
    begins: dict[str, list[str]] = {}
    for name, rule in rules.items():
        begins[name] = firsts = []
        for alternative in rule.alternatives:
            leading = True
            for item in alternative:
                if item.loops and item.ref in empty:
                    raise GrammarError(
                        f"the grammar, line {rule.line}: repeats without bound what may be empty"
                    )
                if leading and item.ref is not None:
                    firsts.append(item.ref)
                leading = leading and _may_be_empty(item, empty)
    done: set[str] = set()
    for name in rules:
        open_: dict[str, Iterator[str]] = {} if name in done else {name: iter(begins[name])}
        while open_:
            top = next(reversed(open_))
            follow = next(open_[top], None)
            if follow is None:
                done.add(top)
                del open_[top]
            elif follow in open_:
                line = rules[follow].line
                raise GrammarError(
                    f"the grammar, line {line}: a rule begins with itself (left recursion); "
                    "put what it repeats behind something"
                )
            elif follow not in done:
                open_[follow] = iter(begins[follow])
            if len(open_) > MAX_RULES // 4:
                raise GrammarError(
                    f"the grammar's rules begin with each other {len(open_)} deep; simplify"
                )


def _may_be_empty(item: _Item, empty: set[str]) -> bool:
    return item.optional or item.elements == 0 or item.ref in empty


def _nullable(rules: dict[str, _Rule]) -> set[str]:
    """Names of the rules that can match nothing."""
    users: dict[str, list[str]] = {}
    for name, rule in rules.items():
        for item in _items(rule):
            if item.ref is not None:
                users.setdefault(item.ref, []).append(name)
    empty: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name in empty:
            continue
        if any(
            all(_may_be_empty(item, empty) for item in alternative)
            for alternative in rules[name].alternatives
        ):
            empty.add(name)
            waiting += users.get(name, ())
    return empty
