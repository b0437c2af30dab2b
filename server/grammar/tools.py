"""Calls of functions as GBNF, in the format that a model's template teaches.

A function's name is one of those offered, its arguments are valid under its schema. Where a schema says
more than a grammar can, a `strict` function is refused and another one's argument is any JSON: the call is
whole all the same. Knows nothing of requests or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.gbnf import check, literal
from speculoe_local.server.grammar.json_rules import either
from speculoe_local.server.grammar.schema import Grammar
from speculoe_local.server.toolcalls.formats import CallFormat
from speculoe_local.server.toolcalls.thinking import Tags

__all__ = ["Function", "answer_grammar", "until"]

# Strings, classes, tokens, counts and comments are passed over; what is left are names of rules.
_WORD = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|<[^>]*>|\{[^}]*\}|#[^\r\n]*|([a-zA-Z0-9-]+)'
)
_FINAL = '"<|channel|>final" (" "? "<|constrain|>json")? "<|message|>" '


@dataclass(frozen=True, slots=True)
class Function:
    """A function on offer; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


def answer_grammar(
    form: CallFormat,
    *,
    functions: Sequence[Function] = (),
    parallel: bool = True,
    answer: str | None = None,
    tags: Tags | None = None,
    inside: bool = False,
    forced: bool = True,
) -> tuple[str, tuple[str, ...]]:
    """The grammar of an answer that calls `functions`, or is in the language of `answer`, another grammar.

    Reasoning between `tags` may come first, and does where the prompt has opened it (`inside`); None: the
    answer begins at once. Not `forced`: the model may do as it likes until it begins a call; the second
    result are the triggers (regular expressions) by which that is known. Raises GrammarError.
    """
    grammar = Grammar()
    writer = _WRITERS[form.name]
    bodies = []
    if functions:
        calls = grammar.add(either([writer(grammar, function) for function in functions]), "call")
        repeated = parallel and form.name != "harmony"
        bodies.append(f'{calls} ("\\n"{{0,2}} {calls})*' if repeated else calls)
    if answer is not None:
        bodies.append(
            _FINAL + _adopt(grammar, answer) if form.name == "harmony" else _adopt(grammar, answer)
        )
    if not bodies:
        raise GrammarError("a call is asked for, but no function is offered; give tools")
    body = either(bodies)
    if not forced and answer is None:
        grammar.define("root", body)
        return grammar.text(), tuple(f"({re.escape(text)})" for text in _triggers(form))
    if form.name == "harmony":
        body = _harmony_root(grammar, body)
    else:
        body = f"{_reasoning(grammar, tags, inside=inside)}{body}"
    grammar.define("root", body)
    return grammar.text(), ()


def until(grammar: Grammar, mark: str, never: Sequence[str] = ()) -> str:
    """The rule for any text up to the first `mark`, and that mark; none of `never` comes before it.

    One rule per state of the automaton that looks for all of them at once (Aho and Corasick, 1975).
    """
    marks = (mark, *never)
    prefixes = {each[:n] for each in marks for n in range(len(each))}
    names = {prefix: grammar.add("", "until") for prefix in sorted(prefixes, key=len)}
    alphabet = sorted(set("".join(marks)))
    others = "".join(f"\\x{ord(character):02X}" for character in alphabet)
    for prefix, name in names.items():
        steps = [f"[^{others}] {names['']}"]
        for character in alphabet:
            text = prefix + character
            if text.endswith(mark):
                steps.append(literal(character))
            elif not text.endswith(tuple(never)):
                state = next(text[n:] for n in range(len(text) + 1) if text[n:] in prefixes)
                steps.append(f"{literal(character)} {names[state]}")
        grammar.define(name, " | ".join(steps))
    return names[""]


def _reasoning(grammar: Grammar, tags: Tags | None, *, inside: bool) -> str:
    if tags is None:
        return ""
    close = until(grammar, tags.end)
    if inside:
        return f'{close} "\\n"{{0,3}} '
    return f'("\\n"? {literal(tags.begin)} {close})? "\\n"{{0,3}} '


def _harmony_root(grammar: Grammar, calls: str) -> str:
    """Analysis may come first. The end of a call is a token that ends the generation: not written."""
    end = until(grammar, "<|end|>")
    analysis = f'"<|channel|>analysis<|message|>" {end} "<|start|>assistant"'
    return f"({analysis}){{0,4}} {calls}"


def _adopt(grammar: Grammar, other: str) -> str:
    """The rules of another grammar under names of their own; the name of its root."""
    check(other)
    grammar.include(_WORD.sub(lambda m: f"own-{m[1]}" if m[1] else m[0], other))
    return "own-root"


def _triggers(form: CallFormat) -> Iterable[str]:
    return ("<|channel|>commentary to=functions.",) if form.name == "harmony" else form.opens[:1]


def _hermes(grammar: Grammar, function: Function) -> str:
    name = json.dumps(function.name, ensure_ascii=False)
    head = literal(f'<tool_call>\n{{"name": {name}, "arguments": ')
    tail = literal("}\n</tool_call>")
    return f"{head} {_arguments(grammar, function)} {tail}"


def _harmony(grammar: Grammar, function: Function) -> str:
    head = literal(f"<|channel|>commentary to=functions.{function.name} ")
    return f'{head} "<|constrain|>json<|message|>" {_arguments(grammar, function)}'


def _qwen3_coder(grammar: Grammar, function: Function) -> str:
    parts = _bare(
        grammar,
        function,
        lambda key: literal(f"<parameter={key}>\n"),
        _Ends("\n", "</parameter>", "\n", ("\n<parameter=", "</function>\n</tool_call>")),
    )
    head = literal(f"<tool_call>\n<function={function.name}>\n")
    tail = literal("</function>\n</tool_call>")
    return f"{head} {parts} {tail}"


def _glm(grammar: Grammar, function: Function) -> str:
    parts = _bare(
        grammar,
        function,
        lambda key: literal(f"<arg_key>{key}</arg_key>\n<arg_value>"),
        _Ends("", "</arg_value>", "\n", ("<arg_key>", "</tool_call>")),
    )
    head = literal(f"<tool_call>{function.name}\n")
    return f"{head} {parts} {literal('</tool_call>')}"


class _Ends(NamedTuple):
    """How a bare value ends: `before` the tag `mark` and `after` it. `never` ends it too, by mistake."""

    before: str
    mark: str
    after: str
    never: tuple[str, ...]

    @property
    def tag(self) -> str:
        return literal(f"{self.before}{self.mark}{self.after}")


_WRITERS: Mapping[str, Callable[[Grammar, Function], str]] = {
    "hermes": _hermes,
    "harmony": _harmony,
    "qwen3-coder": _qwen3_coder,
    "glm": _glm,
}


def _arguments(grammar: Grammar, function: Function) -> str:
    """A JSON object of arguments."""
    if not function.parameters:
        return "object"
    schema = {"type": "object", **function.parameters}
    return _or_any(grammar, function, "object", lambda: grammar.of(schema))


def _bare(grammar: Grammar, function: Function, head: Callable[[str], str], ends: _Ends) -> str:
    """Arguments as tagged values, in the order of the schema: strings bare, everything else JSON."""
    schema = function.parameters
    listed = schema.get("properties", {})
    if not isinstance(listed, Mapping) or (not listed and schema.get("required")):
        raise GrammarError(f"function {function.name[:64]!r} lists no properties; list them")
    required = schema.get("required", ())
    parts = []
    for key, value in listed.items():
        if function.strict and set(key) & set("<>\n"):
            raise GrammarError(f"argument {key[:64]!r} of {function.name[:64]!r} cannot be written")
        text = f"{head(key)} {_value(grammar, function, key, value, ends)}"
        name = grammar.add(text, key)
        parts.append(name if key in required else f"{name}?")
    return " ".join(parts)


def _value(grammar: Grammar, function: Function, key: str, schema: Any, ends: _Ends) -> str:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list) and listed and all(isinstance(v, str) for v in listed):
            return f"({' | '.join(literal(v) for v in listed)}) {ends.tag}"
        limits = {"pattern", "format", "minLength", "maxLength"} & schema.keys()
        if function.strict and limits:
            raise GrammarError(
                f"argument {key[:64]!r} of {function.name[:64]!r} uses {min(limits)}: no grammar can "
                "follow it in this model's format of calls"
            )
        text = until(grammar, ends.mark, ends.never)
        return f"{text} {literal(ends.after)}" if ends.after else text
    expression = _or_any(
        grammar,
        function,
        "value",
        lambda: grammar.part(dict(function.parameters), schema, f"#/properties/{key}"),
    )
    return f"{expression} {ends.tag}"


def _or_any(
    grammar: Grammar, function: Function, otherwise: str, expression: Callable[[], str]
) -> str:
    try:
        return grammar.attempt(expression)
    except GrammarError as error:
        if function.strict:
            raise GrammarError(f"function {function.name[:64]!r} is strict, but {error}") from None
        return otherwise
