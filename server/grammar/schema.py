"""JSON Schema to GBNF: whatever the grammar lets through is valid under the schema.

Where a grammar cannot say exactly what the schema says, it says less (properties in the order they are
listed, no unlisted ones unless asked for, 16 digits); where it cannot say enough, the schema is refused
with the place and the reason. A constraint is never dropped. Knows nothing of tokens, models or requests.

Keywords: json-schema.org, draft 2020-12; `format` is asserted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jsonschema
from jsonschema.validators import validator_for

from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.gbnf import check, literal
from speculoe_local.server.grammar.json_rules import (
    JSON_RULES,
    either,
    items_of,
    members_of,
    other_name,
)
from speculoe_local.server.grammar.schema_merge import Document, Schema, disjoint, merged, resolve
from speculoe_local.server.grammar.schema_values import number_of, string_of

__all__ = ["Grammar", "schema_grammar"]

MAX_DEPTH = 48
MAX_SCHEMA_RULES = 5000
MAX_NODES = 10_000

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_USES = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|([a-zA-Z][a-zA-Z0-9-]*)')

# Keywords that constrain and that nothing here can follow.
_REFUSED = frozenset(
    (
        *("not", "if", "then", "else", "dependentSchemas", "dependentRequired"),
        *("dependencies", "patternProperties", "propertyNames", "contains", "minContains"),
        *("maxContains", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
        *("multipleOf", "$dynamicRef", "$recursiveRef", "additionalItems"),
    )
)


def schema_grammar(schema: Any) -> str:
    """GBNF with a rule `root` for JSON texts valid under `schema` (a JSON Schema, parsed).

    Raises GrammarError naming the place in the schema, or what is wrong with it as a schema.
    """
    grammar = Grammar()
    grammar.define("root", grammar.of(schema))
    return grammar.text()


class Grammar:
    """Rules that grow while schemas are added; `text` gives them out, checked."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._document = Document({})
        self._refs: dict[str, str] = {}
        self._included: list[str] = []

    def include(self, rules: str) -> None:
        """Take over a checked grammar, whose names must not be ours."""
        self._included.append(rules)

    def define(self, name: str, expression: str) -> None:
        self._rules[name] = expression

    def text(self) -> str:
        """The grammar, with those of our JSON rules that it uses. Raises GrammarError."""
        rules = dict(self._rules)
        waiting = list(rules)
        while waiting:
            for found in _USES.finditer(rules[waiting.pop()]):
                name = found[1]
                if name in JSON_RULES and name not in rules:
                    rules[name] = JSON_RULES[name]
                    waiting.append(name)
        text = "\n".join([*(f"{name} ::= {rule}" for name, rule in rules.items()), *self._included])
        check(text)
        return text

    def of(self, schema: Any) -> str:
        """An expression for a whole schema document; `$ref` looks inside that document only."""
        _check_schema(schema)
        self._document = Document(schema)
        root = self.add("", "root")
        self._refs = {"#": root}
        self._rules[root] = self._bounded(schema, "#")
        return root

    def part(self, document: Any, schema: Any, at: str) -> str:
        """An expression for `schema`, which lies at `at` of a document."""
        _check_schema(document)
        self._document, self._refs = Document(document), {}
        return self._bounded(schema, at)

    def _bounded(self, schema: Any, at: str) -> str:
        try:
            return self._visit(schema, at, 0)
        except RecursionError:
            raise GrammarError(f"{_place(at)} nests too deep; simplify it") from None
        except OverflowError:  # 1e999 is JSON, and no number
            raise GrammarError(
                f"{_place(at)} has a number out of range; use smaller ones"
            ) from None

    def attempt(self, expression: Callable[[], str]) -> str:
        """What `expression` gives; where it raises, the rules it added are gone."""
        before = dict(self._rules)
        try:
            return expression()
        except GrammarError:
            self._rules = before
            raise

    def add(self, expression: str, hint: str = "r") -> str:
        """Name an expression; the name."""
        if len(self._rules) >= MAX_SCHEMA_RULES:
            raise GrammarError(f"the schema needs more than {MAX_SCHEMA_RULES} rules; simplify it")
        base = re.sub(r"[^a-zA-Z0-9]+", "-", hint)[-24:].strip("-") or "r"
        name = f"{base}-{len(self._rules)}"
        self._rules[name] = expression
        return name

    def _visit(self, schema: Any, at: str, depth: int) -> str:
        """An expression, atomic enough to stand in a sequence."""
        self._document.spend()
        if depth > MAX_DEPTH:
            raise GrammarError(f"{_place(at)} nests deeper than {MAX_DEPTH}; simplify it")
        if schema is True or schema == {}:
            return "value"
        if schema is False:
            raise GrammarError(f"{_place(at)} is false: no answer can be valid")
        for keyword in _REFUSED & schema.keys():
            if not _says_nothing(keyword, schema):
                raise _refused(at, keyword, "no grammar can follow it")
        if "$ref" in schema:
            return self._reference(schema, at, depth)
        if "enum" in schema or "const" in schema:
            return self._listed(schema, at)
        if "allOf" in schema:
            parts = [{k: v for k, v in schema.items() if k != "allOf"}, *schema["allOf"]]
            return self._visit(self._merge(parts, at), at, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._union(schema, keyword, at, depth)
        return self._typed(schema, at, depth)

    def _reference(self, schema: Schema, at: str, depth: int) -> str:
        ref = schema["$ref"]
        beside = {k: v for k, v in schema.items() if k not in ("$ref", "$defs", "definitions")}
        target = resolve(self._document.root, ref)
        if _constrains(beside):
            return self._visit(self._merge([target, beside], at), at, depth + 1)
        if ref not in self._refs:
            # Named before it is visited, so that a schema may contain itself.
            self._refs[ref] = name = self.add("", ref)
            self._rules[name] = self._visit(target, ref, depth + 1)
        return self._refs[ref]

    def _merge(self, parts: Iterable[Any], at: str) -> Any:
        return self._checked(at, merged, parts, self._document)

    @staticmethod
    def _checked(at: str, of: Callable[..., Any], *arguments: Any) -> Any:
        """What `of` makes of its arguments; its refusals get the place."""
        try:
            return of(*arguments)
        except GrammarError as error:
            raise GrammarError(f"{_place(at)}: {error}") from None

    def _listed(self, schema: Schema, at: str) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        self._document.spend(len(values))
        beside = {k: v for k, v in schema.items() if k not in ("const", "enum")}
        for keyword in ("pattern", "format", "$ref"):
            # A pattern would be run by Python's engine, which may take for ever; most formats would
            # not be looked at.
            if _mentions(beside, keyword):
                raise _refused(at, keyword, "beside listed values it is not looked at")
        # Whatever else is said about a listed value is decided now.
        validator = jsonschema.Draft202012Validator({**schema, "$defs": {}})
        try:
            allowed = [value for value in values if validator.is_valid(value)]
        except Exception as error:
            raise GrammarError(f"{_place(at)}: {' '.join(str(error).split())[:200]}") from None
        if not allowed:
            raise GrammarError(f"{_place(at)} allows none of the values it lists")
        texts = dict.fromkeys(json.dumps(value, ensure_ascii=False) for value in allowed)
        return either(literal(_encodable(text, at)) for text in texts)

    def _union(self, schema: Schema, keyword: str, at: str, depth: int) -> str:
        beside = {k: v for k, v in schema.items() if k != keyword}
        options = [
            self._merge([beside, option], at) if _constrains(beside) else option
            for option in schema[keyword]
            if option is not False
        ]
        if keyword == "oneOf" and not disjoint(options, self._document):
            raise _refused(at, "oneOf", "its alternatives overlap; use anyOf")
        if not options:
            raise GrammarError(f"{_place(at)}/{keyword} leaves no alternative")
        return either(
            self._visit(option, f"{at}/{keyword}/{i}", depth + 1)
            for i, option in enumerate(options)
        )

    def _typed(self, schema: Schema, at: str, depth: int) -> str:
        types = schema.get("type", _implied(schema))
        names = [types] if isinstance(types, str) else list(types)
        if "number" in names and "integer" in names:
            names.remove("integer")
        return either(self._one_type(name, schema, at, depth) for name in names)

    def _one_type(self, name: str, schema: Schema, at: str, depth: int) -> str:
        if name in ("null", "boolean"):
            return name
        if name in ("integer", "number"):
            return str(self._checked(at, number_of, name, schema, self.add))
        if name == "string":
            return str(self._checked(at, string_of, schema, self.add))
        if name == "array":
            return self._array(schema, at, depth)
        return self._object(schema, at, depth)

    def _array(self, schema: Schema, at: str, depth: int) -> str:
        least = int(schema.get("minItems", 0))
        most = int(schema["maxItems"]) if "maxItems" in schema else None
        if most is not None and most < least:
            raise GrammarError(f"{_place(at)}: minItems {least} is above maxItems {most}")
        first = schema.get("prefixItems", ())
        heads = [
            self._visit(item, f"{at}/prefixItems/{i}", depth + 1) for i, item in enumerate(first)
        ]
        if most is not None:
            heads = heads[:most]
        rest_schema = schema.get("items", True)
        if most == 0:
            return '"[]"'
        if most is not None and len(heads) >= most:
            rest_schema = False
        if rest_schema is False and least > len(heads):
            raise GrammarError(f"{_place(at)}: minItems {least} is more than it has items for")
        rest = None
        if rest_schema is not False and not (
            heads and "items" not in schema and least <= len(heads)
        ):
            rest = self.add(self._visit(rest_schema, f"{at}/items", depth + 1), "item")
        return self.add(
            f'"[" ws {self._checked(at, items_of, heads, rest, least, most)} "]"', "array"
        )

    def _object(self, schema: Schema, at: str, depth: int) -> str:
        listed: dict[str, Any] = dict(schema.get("properties", {}))
        required = list(dict.fromkeys(schema.get("required", ())))
        extra = schema.get("additionalProperties", None if listed else True)
        for name in required:
            if name not in listed:
                if extra is False:
                    raise GrammarError(f"{_place(at)} requires {name!r}, which it does not allow")
                listed[name] = True if extra is None else extra
        for name, value in list(listed.items()):
            if value is False and name not in required:
                del listed[name]
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        if least > len(required):
            raise _refused(at, "minProperties", f"{least} is more than are required")
        if most is not None and (most < len(listed) or extra not in (None, False)):
            raise _refused(at, "maxProperties", "no grammar can count that; list the properties")
        if not listed and extra is True:
            return "object"
        members = [
            (
                self.add(
                    f'{_name(name, at)} ":" ws {self._visit(value, _below(at, name), depth + 1)}',
                    name,
                ),
                name in required,
            )
            for name, value in listed.items()
        ]
        other = None
        if extra not in (None, False):
            value = self._visit(extra, f"{at}/additionalProperties", depth + 1)
            other = self.add(
                f'{self._checked(at, other_name, listed, self.add)} ":" ws {value}', "other"
            )
        return members_of(members, other, self.add)


def _implied(schema: Schema) -> str | tuple[str, ...]:
    """The type that keywords are about where none is named; all types where nothing is said."""
    about = {
        "object": (
            "properties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
        ),
        "array": ("items", "prefixItems", "minItems", "maxItems"),
        "string": ("pattern", "format", "minLength", "maxLength"),
        "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
    for name, keywords in about.items():
        if any(keyword in schema for keyword in keywords):
            return name
    return _TYPES


def _constrains(schema: Schema) -> bool:
    known = {"type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", *_REFUSED}
    return bool(known & schema.keys()) or isinstance(_implied(schema), str)


def _says_nothing(keyword: str, schema: Schema) -> bool:
    if keyword == "multipleOf":
        return bool(schema[keyword] == 1 and schema.get("type") == "integer")
    return keyword == "uniqueItems" and schema[keyword] is False


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise GrammarError("the schema is no JSON object; give a JSON Schema")
    if isinstance(schema, bool):
        return
    _measure(schema)
    try:
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(map(str, ["#", *error.absolute_path]))
        raise GrammarError(f"{_place(where)} is no JSON Schema: {error.message[:200]}") from None
    except (RecursionError, TypeError, ValueError, re.error) as error:
        raise GrammarError(f"the schema cannot be read: {str(error)[:200]}") from None


def _measure(schema: Any) -> None:
    """Raises GrammarError for a schema whose mere reading would take seconds."""
    for seen, (_, depth) in enumerate(_nodes(schema)):
        if seen >= MAX_NODES or depth > 4 * MAX_DEPTH:
            raise GrammarError(
                f"the schema has more than {MAX_NODES} parts or nests deeper than {4 * MAX_DEPTH}; "
                "simplify it"
            )


def _mentions(schema: Any, keyword: str) -> bool:
    return any(isinstance(node, dict) and keyword in node for node, _ in _nodes(schema))


def _nodes(schema: Any) -> Iterator[tuple[Any, int]]:
    """All parts of a schema with their depths."""
    waiting: list[tuple[Any, int]] = [(schema, 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting += ((value, depth + 1) for value in inner)


def _name(name: str, at: str) -> str:
    return literal(f'"{_encodable(json.dumps(name, ensure_ascii=False)[1:-1], at)}"')


def _encodable(text: str, at: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"{_place(at)} holds a lone surrogate, which no answer can") from None
    return text


def _below(at: str, name: str) -> str:
    return f"{at}/properties/{name}"


def _place(at: str) -> str:
    return f"the schema at {at[:120]}"


def _refused(at: str, keyword: str, why: str) -> GrammarError:
    return GrammarError(f"{_place(at)} uses {keyword}: {why}")
