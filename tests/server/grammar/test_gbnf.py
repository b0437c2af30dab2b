"""Grammars as they come over HTTP: what llama.cpp takes is let through, what it chokes on is not."""

from __future__ import annotations

import contextlib

import llama_cpp.llama_grammar as examples
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculoe_local.runtime.llama import Model
from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.gbnf import MAX_CHARS, check, literal
from tests.models.fixtures import TinyModel
from tests.server.grammar.walk import in_language


@pytest.mark.parametrize("name", [n for n in dir(examples) if n.endswith("_GBNF")])
def test_grammars_that_come_with_the_bindings_are_fine(name: str) -> None:
    check(getattr(examples, name))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('x ::= "a"', "no rule named root"),
        ("root ::= thing", "'thing', which is not defined"),
        ('root = "a"', "expected ::="),
        ('root ::= "a', 'expected " before the end'),
        ("root ::= [a", "expected ] before the end"),
        ("root ::= []", "matches nothing"),
        (r'root ::= "\q"', "expected an escape"),
        ('root ::= "a" )', "expected the end of the rule"),
        ('root ::= ("a"', "expected )"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= ""*', "nothing to repeat"),
        ('root ::= "a"{5,2}', "at most less often than at least"),
        ('root ::= "a"{2001}', "the limit is 2000"),
        ('root ::= "a"{', "expected a repetition"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= root "a" | "b"', "left recursion"),
        ('root ::= x "a"\nx ::= y\ny ::= "b"? root', "left recursion"),
        ('root ::= ("a"?)*', "repeats without bound what may be empty"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "nest deeper than 64"),
        ('root ::= "a"\0', "NUL"),
        ("root ::= <tok", "expected a token"),
    ],
)
def test_a_mistake_is_named(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        check(grammar)


def test_what_unfolds_to_gigabytes_is_refused_before_it_does() -> None:
    text = "x" * 1000
    with pytest.raises(GrammarError, match="unfold"):
        check(f'root ::= "{text}"{{2000}}')
    with pytest.raises(GrammarError, match="unfold"):
        check('root ::= "abcdefgh"{1000}{1000}')
    with pytest.raises(GrammarError, match=str(MAX_CHARS)):
        check("#" * (MAX_CHARS + 1))


def test_a_mistake_says_its_line() -> None:
    with pytest.raises(GrammarError, match="line 3"):
        check('root ::= a\n\na = "x"')


@given(st.text(max_size=40))
def test_any_text_is_a_grammar_or_a_grammar_error(text: str) -> None:
    with contextlib.suppress(GrammarError):
        check(text)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20))
def test_a_literal_is_a_grammar_of_its_own(text: str) -> None:
    check(f"root ::= {literal(text)}")


def test_a_literal_stands_for_its_text_alone(tiny_model: TinyModel) -> None:
    model = Model(tiny_model("qwen3moe"), lazy_experts=False, repack=False)
    text = 'a "b"\\ \n\t[x]-é\x01'
    grammar = f"root ::= {literal(text)}"
    assert in_language(model.vocab, grammar, text)
    assert not in_language(model.vocab, grammar, text + "!")
    model.close()
