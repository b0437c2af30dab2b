"""Questions with known answers, asked of one way of running a model after the other.

A file has one JSON object per line, of one of two kinds:

1. `{"prompt": "...", "choices": ["...", "..."], "answer": 0}`: multiple choice. Right when the choice at
   `answer` has the highest likelihood per byte, as a continuation of the prompt.
2. `{"prompt": "...", "answer": "..."}`: short answer, with an optional list of `stop` strings. A greedy
   answer is right when its last number equals `answer`, where that is a number, and otherwise when it begins
   with the words of `answer`.

Prompts are used as they stand: examples and the layout of a question belong to the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculoe_local.runtime.engine import Engine
from speculoe_local.runtime.errors import BackendError, OptionError
from speculoe_local.runtime.options import Sampling
from speculoe_local.runtime.quality import common_prefix, log_softmax, mcnemar

__all__ = ["Item", "Score", "is_right", "parse", "read", "run"]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Item:
    """One question. With `choices`, `answer` is the right one of them."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """Two ways of running on the same items. Of those that only one got right, `lost` were exact's and
    `won` the other's; `p` is McNemar's exact test of that split."""

    items: int
    right: int
    right_exact: int
    lost: int
    won: int
    p: float

    @classmethod
    def of(cls, exact: Sequence[bool], other: Sequence[bool]) -> Score:
        pairs = list(zip(exact, other, strict=True))
        lost, won = pairs.count((True, False)), pairs.count((False, True))
        return cls(len(pairs), sum(other), sum(exact), lost, won, mcnemar(lost, won))

    def to_json(self) -> dict[str, Any]:
        share = self.right / self.items
        return {
            "accuracy": round(share, 6),
            "accuracy_se": round(math.sqrt(share * (1 - share) / self.items), 6),
            "accuracy_exact": round(self.right_exact / self.items, 6),
            "items": self.items,
            "lost": self.lost,
            "won": self.won,
            "mcnemar_p": round(self.p, 6),
        }


def read(path: Path) -> tuple[Item, ...]:
    """The items of a file. Raises OptionError, naming the line, for anything else."""
    try:
        return parse(path.read_text(encoding="utf-8"), path.name)
    except UnicodeDecodeError as error:
        raise OptionError(f"--task {str(path)!r} is not UTF-8 at byte {error.start}") from error
    except OSError as error:
        raise OptionError(f"--task {str(path)!r} cannot be read: {error.strerror}") from error


def parse(text: str, name: str) -> tuple[Item, ...]:
    """The items of JSON lines; blank lines do not count. Raises OptionError, naming the line."""
    items = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            items.append(_item(json.loads(line)))
        except (json.JSONDecodeError, ValueError, RecursionError) as error:
            raise OptionError(f"--task {name}, line {number}: {error}") from error
    if not items:
        raise OptionError(f"--task {name} has no items; give one JSON object per line")
    return tuple(items)


def run(
    engine: Engine, items: Sequence[Item], max_tokens: int, step: Callable[[], None]
) -> list[bool]:
    """Whether each item is answered right; `step` is called after each.

    Raises ContextError when a prompt or choice does not fit, and what running raises.
    """
    found = []
    for item in items:
        found.append(_chooses(engine, item) if item.choices else _answers(engine, item, max_tokens))
        step()
    return found


def is_right(answer: str, text: str) -> bool:
    """Whether `text`, written freely, gives `answer`: see the module."""
    wanted = _number(answer.strip())
    if wanted is not None:
        given = _NUMBER.findall(text)
        return bool(given) and _number(given[-1]) == wanted
    words = _words(answer)
    return _words(text)[: len(words)] == words


def _answers(engine: Engine, item: Item, max_tokens: int) -> bool:
    engine.forget()  # equal prompts are run in equal shape, whatever was asked before
    steps = engine.generate(
        item.prompt, sampling=Sampling(temp=0), max_tokens=max_tokens, stop=item.stop
    )
    return is_right(item.answer, "".join(step.text for step in steps))


def _chooses(engine: Engine, item: Item) -> bool:
    likelihoods = [
        _log_likelihood(engine, item.prompt, choice) / len(choice.encode())
        for choice in item.choices
    ]
    return item.choices[int(np.argmax(likelihoods))] == item.answer


def _log_likelihood(engine: Engine, prompt: str, choice: str) -> float:
    """ln P(choice | prompt). The prompt's last token is a decode step as the choice's are: behind a prompt, a
    choice of one token would show nothing of the mode."""
    tokens = engine.vocab.tokenize(prompt + choice)
    # A tokenizer may join the end of a prompt with what follows.
    given = common_prefix(engine.vocab.tokenize(prompt), tokens)
    if given < 2 or given == len(tokens):
        raise OptionError(
            f"--task: prompt {prompt[-30:]!r} and choice {choice[:30]!r} come to {given} and "
            f"{len(tokens) - given} tokens, 2 and 1 are needed; give a longer one"
        )
    total, seen = 0.0, 0
    for row in engine.score(tokens[:-1], prompt=given - 1):
        if seen:
            total += float(log_softmax(row)[tokens[given + seen - 1]])
        seen += 1
    if seen != len(tokens) - given + 1:
        raise BackendError(f"scoring was interrupted after {seen} tokens")
    return total


def _item(found: Any) -> Item:
    if not isinstance(found, dict) or not isinstance(found.get("prompt"), str):
        raise ValueError('no object with a text "prompt"')
    prompt, answer = found["prompt"], found.get("answer")
    choices, stop = found.get("choices", []), found.get("stop", [])
    for name, texts in (("choices", choices), ("stop", stop)):
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f'"{name}" is no list of texts that are not empty')
    if not prompt:
        raise ValueError('"prompt" is empty')
    if not choices:
        if not isinstance(answer, str) or not _words(answer):
            raise ValueError('"answer" has no word; without "choices" it is a text with one')
        return Item(prompt, answer, stop=tuple(stop))
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f'"answer" is {str(answer)[:20]}, not 0 to {len(choices) - 1}')
    if len(set(choices)) < max(2, len(choices)):
        raise ValueError('"choices" are not two or more that differ')
    return Item(prompt, choices[answer], tuple(choices))


def _number(text: str) -> float | None:
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
