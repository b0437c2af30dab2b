"""lm-eval's local-completions against a tiny model: its scores are those of our own scoring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speculoe_local.runtime import Engine, EngineOptions, tasks
from speculoe_local.runtime.quality import log_softmax
from tests.models.fixtures import TinyModel
from tests.server.clients.outside import run
from tests.server.conftest import Live

WORDS = ("red", "green and blue", "there", "in the ring", "of all", "seen", "a hat", "told")
TASK = """\
task: words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


def items() -> list[dict[str, Any]]:
    """Multiple choice as both lm-eval's task above and runtime/tasks.py read it."""
    return [
        {
            "prompt": f"Of what he had, the {word} was",
            "choices": [f" {WORDS[(i + k) % len(WORDS)]}" for k in range(3)],
            "answer": i % 3,
        }
        for i, word in enumerate(WORDS)
    ]


@pytest.fixture(scope="module")
def results(
    repository: Path, live: Live, tmp_path_factory: pytest.TempPathFactory
) -> tuple[float, list[list[float]]]:
    """lm-eval's accuracy by length, and its log likelihood of each choice of each item."""
    program = repository / "build/lm-eval/bin/lm_eval"
    assert program.is_file(), f"{program} is missing; run `make build/stamps/lm-eval`"
    folder = tmp_path_factory.mktemp("lm-eval")
    questions = folder / "items.jsonl"
    questions.write_text("".join(f"{json.dumps(item)}\n" for item in items()))
    (folder / "tasks").mkdir()
    (folder / "tasks/words.yaml").write_text(TASK.format(items=questions))
    run(
        [
            *(program, "run", "--model", "local-completions"),
            *("--model_args", f"model=tiny,base_url={live.url}/v1/completions,max_length=512"),
            *("--tasks", "words", "--include_path", "tasks"),
            *("--output_path", "out", "--log_samples"),
        ],
        cwd=folder,
        env={"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    (summary,) = folder.glob("out/**/results_*.json")
    (samples,) = folder.glob("out/**/samples_words_*.jsonl")
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
    answers.sort(key=lambda answer: int(answer["doc_id"]))
    return (
        float(json.loads(summary.read_text())["results"]["words"]["acc_norm,none"]),
        [[float(choice[0][0]) for choice in answer["resps"]] for answer in answers],
    )


@pytest.fixture(scope="module")
def engine(tiny_model: TinyModel) -> Any:
    with Engine.open(tiny_model("qwen3moe"), options=EngineOptions(threads=1, ctx=512)) as opened:
        yield opened


def log_likelihood(engine: Engine, prompt: str, choice: str) -> float:
    given, tokens = engine.vocab.tokenize(prompt), engine.vocab.tokenize(prompt + choice)
    assert given == tokens[: len(given)]
    rows = engine.score(tokens[:-1], prompt=len(given))
    return sum(
        float(log_softmax(row)[token])
        for row, token in zip(rows, tokens[len(given) :], strict=True)
    )


def test_every_choice_is_as_likely_as_scored_directly(
    results: tuple[float, list[list[float]]], engine: Engine
) -> None:
    direct = [
        [log_likelihood(engine, item["prompt"], choice) for choice in item["choices"]]
        for item in items()
    ]
    assert direct == [pytest.approx(found, abs=1e-3) for found in results[1]]


def test_the_score_is_that_of_our_own_tasks(
    results: tuple[float, list[list[float]]], engine: Engine
) -> None:
    text = "\n".join(json.dumps(item) for item in items())
    right = tasks.run(engine, tasks.parse(text, "items"), max_tokens=1, step=lambda: None)
    assert pytest.approx(sum(right) / len(right)) == results[0]
    assert 0 < results[0] < 1  # a score that every model gets would say nothing
