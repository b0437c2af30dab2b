"""JSON schemas as grammars: whatever llama.cpp draws from one is valid under the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.llama import Model, Vocabulary
from speculoe_local.server.errors import BadRequest, GrammarError
from speculoe_local.server.grammar.form import form_of, grammar_of_schema
from speculoe_local.server.grammar.number import integer_between, number_between
from speculoe_local.server.grammar.schema import schema_grammar
from tests.models.fixtures import TinyModel
from tests.server.grammar.walk import in_language, walk

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 3, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"c']}, "minItems": 1, "maxItems": 3},
        "child": {"$ref": "#"},
    },
    "required": ["name", "tags"],
    "additionalProperties": {"type": "null"},
}
SCHEMAS: dict[str, Any] = {
    "a recursive object with other properties": PERSON,
    "optional properties": {
        "type": "object",
        "properties": {k: {"type": "boolean"} for k in "abc"},
        "required": ["b"],
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
    "anything": {},
    "a map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "bounded numbers": {"type": "number", "exclusiveMinimum": -12, "maximum": 7},
    "a share": {"type": "number", "minimum": 0, "maximum": 1},
    "bounded integers": {"type": "integer", "minimum": -35, "exclusiveMaximum": 1204},
    "half-open integers": {"type": "integer", "minimum": 42},
    "an anchored pattern": {"type": "string", "pattern": "^[A-Z]{2,3}-\\d+$"},
    "a pattern of alternatives": {"type": "string", "pattern": "^(foo|ba[rz])$|^x\\\\y$"},
    "a pattern with quotes": {"type": "string", "pattern": '^"[^"]{1,4}"$'},
    "an open pattern": {"type": "string", "pattern": "[^a-z\\s]\\\\?"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "a date and time": {"type": "string", "format": "date-time"},
    "an address": {"type": "string", "format": "ipv4"},
    "an id": {"type": "string", "format": "uuid"},
    "mail": {"type": "string", "format": "email"},
    "tuples": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "boolean"}],
        "minItems": 1,
    },
    "tuples with more": {
        "type": "array",
        "prefixItems": [{"type": "integer"}],
        "items": {"type": "null"},
        "minItems": 3,
        "maxItems": 5,
    },
    "no items": {"type": "array", "maxItems": 0},
    "listed values": {"enum": [1, "x", None, {"a": [True]}, "é\n"]},
    "listed values of a type": {"type": "string", "enum": ["a", 2, "b"]},
    "alternatives": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
    "types": {"type": ["integer", "null", "boolean"]},
    "tagged alternatives": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"k": {"const": "a"}, "x": {"type": "integer"}},
                "required": ["k", "x"],
            },
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
        ]
    },
    "parts and references": {
        "allOf": [
            {"$ref": "#/$defs/A"},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "$defs": {
            "A": {
                "type": "object",
                "properties": {"a": {"type": ["integer", "null"]}, "b": {"enum": [True, 1]}},
                "required": ["a"],
            }
        },
    },
    "a reference with a name to escape": {
        "$ref": "#/$defs/x~1y%20z",
        "$defs": {"x/y z": {"type": "array", "items": {"type": "boolean"}, "minItems": 1}},
    },
}


@pytest.fixture(scope="module")
def vocab(tiny_model: TinyModel) -> Iterator[Vocabulary]:
    model = Model(tiny_model("qwen3moe"), lazy_experts=False, repack=False)
    yield model.vocab
    model.close()


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_what_a_grammar_lets_through_is_valid(schema: Any, vocab: Vocabulary) -> None:
    grammar = schema_grammar(schema)
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    checker = jsonschema.Draft202012Validator(schema, format_checker=formats)
    texts = {walk(vocab, grammar, seed, limit=200) for seed in range(8)} - {None}
    assert texts
    for text in texts:
        assert text is not None
        checker.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (PERSON, {"name": "Ann", "tags": ["a"], "child": {"name": "B", "tags": ['b"c']}}),
        (PERSON, {"name": "Ann", "age": 120, "tags": ["a", "a"], "more": None}),
        (SCHEMAS["optional properties"], {"b": True}),
        (SCHEMAS["optional properties"], {"a": True, "b": False, "c": True}),
        (SCHEMAS["an open pattern"], "ab\\Zc"),
        (SCHEMAS["bounded numbers"], -11.5),
        (SCHEMAS["a share"], 0.25),
        (SCHEMAS["tuples"], [1]),
        (SCHEMAS["tuples with more"], [1, None, None]),
        (SCHEMAS["anything"], {"a": [1.5e3, "\n", None]}),
    ],
)
def test_valid_values_are_let_through(schema: Any, value: Any, vocab: Vocabulary) -> None:
    assert in_language(vocab, schema_grammar(schema), json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
        ({"type": "string", "format": "isbn"}, "isbn"),
        ({"type": "string", "pattern": "(?=x)y"}, "assert"),
        ({"type": "string", "pattern": "(?<n>a)"}, "not"),
        ({"type": "string", "pattern": "(a)\\1"}, "groupref"),
        ({"type": "string", "pattern": "("}, "no JSON Schema"),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "maxLength"),
        ({"type": "string", "pattern": r"^a\$", "maxLength": 3}, "maxLength"),
        ({"type": "number", "minimum": float("inf")}, "out of range"),
        ({"type": "string", "minLength": 4, "maxLength": 3}, "above maxLength"),
        ({"type": "number", "minimum": 0.5}, "whole number"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no number lies"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "above maxItems"),
        ({"type": "strin"}, "no JSON Schema"),
        ({"$ref": "http://example.com/x"}, "only places inside"),
        ({"$ref": "#/$defs/x"}, "not in it"),
        ({"$ref": "#"}, "itself"),
        ({"anyOf": [{"$ref": "#"}]}, "left recursion"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "nothing in common"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "overlap"),
        (
            {"allOf": [{"prefixItems": [{}]}, {"type": "array", "items": {"const": 1}}]},
            "said apart",
        ),
        ({"enum": ["b"], "format": "date"}, "format"),
        ({"const": "b", "anyOf": [{"pattern": "^(a+)+$"}]}, "pattern"),
        ({"type": "string", "enum": [1]}, "none of the values"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "does not allow"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (False, "false"),
        ("text", "no JSON object"),
        ({"type": "array", "items": {"type": "string", "pattern": "x{3000}"}}, "repetitions"),
    ],
)
def test_what_a_grammar_cannot_say_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        schema_grammar(schema)


def test_a_refusal_names_the_place() -> None:
    schema = {"type": "object", "properties": {"a": {"items": {"not": {}}}}}
    with pytest.raises(GrammarError, match="#/properties/a/items uses not"):
        schema_grammar(schema)


def test_a_deep_or_wide_schema_is_refused_in_no_time() -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    wide = {"enum": list(range(20_000))}
    for schema in (deep, wide):
        with pytest.raises(GrammarError, match="simplify"):
            schema_grammar(schema)


def test_parts_that_double_at_each_step_are_refused_in_no_time() -> None:
    def chain(step: Any) -> dict[str, Any]:
        defs: dict[str, Any] = {f"d{i}": step(f"#/$defs/d{i + 1}") for i in range(22)}
        return {"$ref": "#/$defs/d0", "$defs": {**defs, "d22": {"type": "string"}}}

    both = chain(lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]})
    either = chain(lambda ref: {"type": "string", "anyOf": [{"$ref": ref}, {"$ref": ref}]})
    for schema in (both, either):
        with pytest.raises(GrammarError, match="simplify"):
            schema_grammar(schema)


def test_a_pattern_of_nothing_but_brackets_is_refused() -> None:
    with pytest.raises(GrammarError):
        schema_grammar({"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000})


def test_words_beside_the_vocabulary_do_not_constrain(vocab: Vocabulary) -> None:
    schema = {"type": "boolean", "title": "T", "x-order": 1, "errorMessage": "no", "nullable": True}
    assert in_language(vocab, schema_grammar(schema), "true")


@settings(max_examples=60, deadline=None)
@given(st.integers(-3000, 3000), st.integers(0, 3000), st.sampled_from([-1, 0, 1, 2]))
def test_integers_are_let_through_exactly_between_their_bounds(
    vocab: Vocabulary, low: int, width: int, beside: int
) -> None:
    grammar = f"root ::= {integer_between(low, low + width)}"
    for value in (low + beside, low + width - beside, low + width // 2):
        assert (low <= value <= low + width) == in_language(vocab, grammar, str(value))


def test_numbers_respect_open_and_closed_bounds(vocab: Vocabulary) -> None:
    grammar = f"root ::= {number_between((0, True), (10, False))}"
    for text, inside in {
        "0": 0,
        "0.0": 0,
        "0.01": 1,
        "9.99": 1,
        "10": 1,
        "10.0": 0,
        "-1": 0,
    }.items():
        assert bool(inside) == in_language(vocab, grammar, text), text


def test_response_formats_of_both_dialects_are_understood(vocab: Vocabulary) -> None:
    schema = {"type": "boolean"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    own = {"type": "json_object", "schema": schema}
    assert grammar_of_schema(schema) == form_of(wrapped) == form_of(flat) == form_of(own)
    assert form_of({"type": "text"}) is None
    anything = form_of({"type": "json_object"})
    assert anything is not None
    assert in_language(vocab, anything, '{"a": [1, {}]}')
    assert not in_language(vocab, anything, "[1]")


@pytest.mark.parametrize("form", [{"type": "xml"}, {}, {"type": "json_schema"}, "json"])
def test_a_response_format_that_is_none_is_refused(form: Any) -> None:
    with pytest.raises(BadRequest, match="response_format"):
        form_of(form)
