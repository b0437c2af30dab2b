"""Questions are read, asked and judged as their file says."""

from __future__ import annotations

import numpy as np
import pytest

from speculoe_local.runtime import Engine, EngineOptions, Sampling, tasks
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.tasks import Item, Score, is_right, parse
from tests.models.fixtures import TinyModel

OPTIONS = EngineOptions(expert_budget="50%", threads=1, ctx=128)


def test_the_likeliest_choice_is_chosen_by_every_byte_of_it(tiny_model: TinyModel) -> None:
    choices = ("the hat", "42 17", "in the end and on")
    with Engine.open(tiny_model("qwen3moe"), options=OPTIONS) as engine:
        prompt = engine.vocab.tokenize("and then ")
        costs = []
        for choice in choices:
            tokens = engine.vocab.tokenize("and then " + choice)
            rows = [row.astype(np.float64) for row in engine.score(tokens, prompt=1)]
            total = sum(
                rows[at - 1][tokens[at]] - np.log(np.exp(rows[at - 1]).sum())
                for at in range(len(prompt), len(tokens))
            )
            costs.append(total / len(choice.encode()))
        best = choices[int(np.argmax(costs))]
        items = [Item("and then ", choice, choices) for choice in choices]

        assert [choice == best for choice in choices] == tasks.run(engine, items, 4, lambda: None)


def test_a_short_answer_is_right_when_the_greedy_answer_begins_with_it(
    tiny_model: TinyModel,
) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=OPTIONS) as engine:
        steps = engine.generate("and then ", sampling=Sampling(temp=0), max_tokens=16)
        text = "".join(step.text for step in steps)
        items = [Item("and then ", text), Item("and then ", "surely not this")]

        assert any(character.isalpha() for character in text)
        assert [True, False] == tasks.run(engine, items, 16, lambda: None)


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("72", "48 / 2 = 24, so 48 + 24 = 72.", True),
        ("72", "72 is too much: 24", False),
        ("1,200", "It is 1200.0", True),
        ("-3", "minus 3, that is -3", True),
        ("72", "I do not know", False),
        ("New York", "  new york, of course", True),
        ("New York", "It is New York", False),
        ("New", "Newark", False),
    ],
)
def test_answers_are_judged_by_last_number_or_first_words(
    answer: str, text: str, right: bool
) -> None:
    assert right == is_right(answer, text)


def test_items_are_read_from_json_lines() -> None:
    lines = (
        '{"prompt": "2 + 2 =", "answer": "4", "stop": ["\\n"]}\n\n'
        '{"prompt": "The sky is", "choices": [" blue", " green"], "answer": 0}\n'
    )

    assert (
        Item("2 + 2 =", "4", stop=("\n",)),
        Item("The sky is", " blue", (" blue", " green")),
    ) == parse(lines, "x")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ("[]", 'no object with a text "prompt"'),
        ('{"prompt": "", "answer": "a"}', '"prompt" is empty'),
        ('{"prompt": "p"}', '"answer" has no word'),
        ('{"prompt": "p", "answer": "?!"}', '"answer" has no word'),
        ('{"prompt": "p", "choices": ["a", "b"], "answer": 2}', "not 0 to 1"),
        ('{"prompt": "p", "choices": ["a", "b"], "answer": true}', "not 0 to 1"),
        ('{"prompt": "p", "choices": ["a"], "answer": 0}', "two or more that differ"),
        ('{"prompt": "p", "choices": ["a", "a"], "answer": 0}', "two or more that differ"),
        ('{"prompt": "p", "choices": ["a", ""], "answer": 0}', '"choices" is no list'),
        ('{"prompt": "p", "choices": 3, "answer": 0}', '"choices" is no list'),
        ('{"prompt": "p", "answer": "a", "stop": "x"}', '"stop" is no list'),
        ("", "has no items"),
    ],
)
def test_an_item_that_is_none_is_refused_by_its_line(line: str, message: str) -> None:
    with pytest.raises(OptionError, match="--task x") as raised:
        parse(line, "x")

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_score_counts_what_only_one_got_right() -> None:
    found = Score.of([True] * 6 + [False] * 4, [True] * 2 + [False] * 7 + [True])

    assert Score(10, 3, 6, 4, 1, 12 / 32) == found
    assert {"accuracy": 0.3, "accuracy_exact": 0.6, "items": 10, "lost": 4, "won": 1}.items() <= (
        found.to_json().items()
    )
