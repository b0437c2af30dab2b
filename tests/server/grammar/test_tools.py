"""Grammars of calls: whatever llama.cpp draws from one, the parser of that format reads as whole calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from speculoe_local.runtime.llama import Model, Vocabulary
from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.form import grammar_of_schema
from speculoe_local.server.grammar.schema import Grammar
from speculoe_local.server.grammar.tools import Function, answer_grammar, until
from speculoe_local.server.toolcalls import collect
from speculoe_local.server.toolcalls.formats import FORMATS, make_parser
from speculoe_local.server.toolcalls.thinking import TAGS
from tests.models.fixtures import TinyModel
from tests.server.grammar.walk import in_language, walk

WEATHER = Function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"type": "string", "enum": ["c", "f"]},
        },
        "required": ["city"],
    },
)
NOW = Function("now", {"type": "object", "properties": {}})
SCHEMAS = {each.name: each.parameters for each in (WEATHER, NOW)}
MARKS = (b"</think>", b"</parameter>", b"</arg_value>", b"<|end|>")


@pytest.fixture(scope="module")
def vocab(tiny_model: TinyModel) -> Iterator[Vocabulary]:
    model = Model(tiny_model("qwen3moe"), lazy_experts=False, repack=False)
    yield model.vocab
    model.close()


def read(form: str, text: str, *, inside: bool = False) -> Any:
    parser = make_parser(FORMATS[form], tools=SCHEMAS, inside=inside)
    return collect([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_a_forced_answer_is_calls_that_fit_their_schemas(
    form: str, inside: bool, vocab: Vocabulary
) -> None:
    inside = inside and form != "harmony"
    grammar, triggers = answer_grammar(
        FORMATS[form], functions=(WEATHER, NOW), tags=TAGS[0], inside=inside
    )
    assert () == triggers
    answers = [walk(vocab, grammar, seed, limit=300, marks=MARKS) for seed in range(2)]
    whole = [text for text in answers if text is not None]
    assert whole
    for text in whole:
        found = read(form, text, inside=inside)
        assert found.calls
        assert "" == found.content.strip()
        for call in found.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_is_a_call_or_in_the_language_asked_for(form: str, vocab: Vocabulary) -> None:
    answer = grammar_of_schema({"type": "boolean"})
    grammar, _ = answer_grammar(FORMATS[form], functions=(NOW,), answer=answer)
    lead = "<|channel|>final<|message|>" if form == "harmony" else ""
    assert in_language(vocab, grammar, f"{lead}true")
    assert not in_language(vocab, grammar, f"{lead}maybe")
    texts = [walk(vocab, grammar, seed, limit=200, marks=MARKS) for seed in range(4)]
    assert any(read(form, text).calls for text in texts if text is not None)


def test_one_call_is_all_where_calls_are_not_parallel(vocab: Vocabulary) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    one, _ = answer_grammar(FORMATS["hermes"], functions=(NOW,), parallel=False)
    more, _ = answer_grammar(FORMATS["hermes"], functions=(NOW,), parallel=True)
    assert in_language(vocab, one, call)
    assert not in_language(vocab, one, f"{call}\n{call}")
    assert in_language(vocab, more, f"{call}\n{call}")


def test_reasoning_may_come_first_and_must_where_the_prompt_opened_it(vocab: Vocabulary) -> None:
    answer = grammar_of_schema({"type": "boolean"})
    may, _ = answer_grammar(FORMATS["hermes"], answer=answer, tags=TAGS[0])
    must, _ = answer_grammar(FORMATS["hermes"], answer=answer, tags=TAGS[0], inside=True)
    assert in_language(vocab, may, "true")
    assert in_language(vocab, may, "<think>\nso </thin be it</think>\n\ntrue")
    assert in_language(vocab, must, "so be it</think>\ntrue")
    assert not in_language(vocab, must, "true")


def test_a_call_that_may_come_waits_for_its_first_words(vocab: Vocabulary) -> None:
    for name, form in FORMATS.items():
        grammar, triggers = answer_grammar(form, functions=(NOW,), forced=False)
        assert triggers, name
        assert grammar


def test_only_offered_functions_can_be_called(vocab: Vocabulary) -> None:
    grammar, _ = answer_grammar(FORMATS["hermes"], functions=(NOW,))
    call = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'
    assert in_language(vocab, grammar, call.format("now"))
    assert not in_language(vocab, grammar, call.format("rm"))
    with pytest.raises(GrammarError, match="no function is offered"):
        answer_grammar(FORMATS["hermes"])


def test_a_schema_no_grammar_can_follow_costs_only_strict_functions_their_call() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    for form in FORMATS.values():
        grammar, _ = answer_grammar(form, functions=(Function("f", schema),))
        assert grammar
        with pytest.raises(GrammarError, match="strict"):
            answer_grammar(form, functions=(Function("f", schema, strict=True),))


def test_a_grammar_of_the_client_keeps_its_rules_beside_ours(vocab: Vocabulary) -> None:
    own = 'root ::= object | "[root]" x{2}\nobject ::= "{o}" # root\nx ::= [a-z]'
    grammar, _ = answer_grammar(FORMATS["hermes"], functions=(NOW,), answer=own)
    assert in_language(vocab, grammar, "{o}")
    assert in_language(vocab, grammar, "[root]ab")
    assert not in_language(vocab, grammar, "{}")


def test_text_goes_up_to_the_first_mark_and_past_no_other(vocab: Vocabulary) -> None:
    grammar = Grammar()
    grammar.define("root", until(grammar, "aab", never=("aaa", "x")))
    text = grammar.text()
    for sample, inside in {
        "aab": 1,
        "ababaab": 1,
        "aabaab": 0,
        "aaab": 0,
        "xaab": 0,
        "aa": 0,
    }.items():
        assert bool(inside) == in_language(vocab, text, sample), sample
