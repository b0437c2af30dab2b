"""openai and @ai-sdk/openai-compatible from npm against the embedded model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.clients.outside import Cases, run_cases
from tests.server.conftest import Live

SCRIPTS = Path(__file__).with_name("node")
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def folder(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the scripts, beside what npm installed."""
    installed = repository / "build/node/node_modules"
    assert shutil.which("node"), "node is missing; install Debian's nodejs and npm, 18 or newer"
    assert installed.is_dir(), f"{installed} is missing; run `make build/stamps/node`"
    folder = tmp_path_factory.mktemp("node")
    for script in SCRIPTS.glob("*.mjs"):
        shutil.copy(script, folder)
    (folder / "node_modules").symlink_to(installed)
    return folder


@pytest.fixture(scope="module")
def openai(folder: Path, embedded_server: Live) -> Cases:
    return run_cases(["node", "openai.mjs", embedded_server.url], cwd=folder)


@pytest.fixture(scope="module")
def ai_sdk(folder: Path, embedded_server: Live) -> Cases:
    return run_cases(["node", "ai-sdk.mjs", embedded_server.url], cwd=folder)


def is_city(found: Any) -> bool:
    kinds = {name: type(value) for name, value in found.items()}
    return kinds == {"coastal": bool, "climate": str} and found["climate"] in {
        *("cold", "mild", "hot")
    }


def are_embeddings(found: Any) -> bool:
    """Of two equal texts and another one."""
    one, same, other = np.array(found)
    unit = np.allclose(1, np.linalg.norm([one, other], axis=1), atol=1e-5)
    return bool(
        unit and np.allclose(one, same, atol=1e-4) and not np.allclose(one, other, atol=0.01)
    )


def test_openai_chats_and_its_stream_adds_up(openai: Cases) -> None:
    assert {"text": ANSWER, "finish_reason": "stop", "tokens": 8} == openai["chat"]
    assert {"text": ANSWER, "whole": ANSWER, "tokens": 8} == openai["stream"]


def test_openai_gets_calls_whole_and_streamed_and_answers_them(openai: Cases) -> None:
    found = openai["tools"]
    assert "tool_calls" == found["finish_reason"]
    assert "add" == found["call"]["name"]
    assert {"a": 2, "b": 3} == json.loads(found["call"]["arguments"])
    assert found["call"] == found["streamed"]
    assert "5" in found["answer"]["content"]
    assert "tool_calls" not in found["answer"]


def test_openai_parses_what_a_zod_schema_asked_for(openai: Cases) -> None:
    assert is_city(openai["parse"])


def test_openai_gets_an_echo_scored(openai: Cases) -> None:
    found = openai["completions"]
    assert ANSWER == found["text"] == found["joined"]
    first, *others = found["logprobs"]
    assert first is None
    assert all(logprob < 0 for logprob in others)


def test_openais_responses_answer_and_stream(openai: Cases) -> None:
    assert {"text": ANSWER, "streamed": ANSWER} == openai["responses"]


def test_openai_decodes_embeddings(openai: Cases) -> None:
    found = openai["embeddings"]
    assert are_embeddings(found["packed"])
    assert np.allclose(found["plain"], found["packed"], atol=1e-4)


def test_openai_lists_the_models(openai: Cases) -> None:
    assert ["embedded"] == openai["models"]


def test_openai_throws_its_own_error_also_where_it_streams(openai: Cases) -> None:
    assert [{"typed": True, "status": 400, "n_ctx": 2048}] * 2 == openai["errors"]


def test_ai_sdk_generates_and_streams_text(ai_sdk: Cases) -> None:
    expected = {"text": ANSWER, "tokens": 8, "finishReason": "stop"}
    assert expected == ai_sdk["generateText"]
    assert expected == ai_sdk["streamText"]


def test_ai_sdk_runs_a_tool_and_answers_from_its_result(ai_sdk: Cases) -> None:
    found = ai_sdk["tools"]
    assert ["tool-calls", "stop"] == found["reasons"]
    assert {"a": 2, "b": 3} == found["call"] == found["streamed"]
    assert 5 == found["result"]
    assert "5" in found["text"]


def test_ai_sdk_generates_an_object(ai_sdk: Cases) -> None:
    assert is_city(ai_sdk["generateObject"])


def test_ai_sdk_embeds_many(ai_sdk: Cases) -> None:
    assert are_embeddings(ai_sdk["embedMany"])


def test_ai_sdk_throws_its_own_error_and_does_not_try_again(ai_sdk: Cases) -> None:
    errors = ai_sdk["errors"]
    assert 2 == len(errors)
    for error in errors:
        assert (True, 400, False) == (error["typed"], error["status"], error["retryable"])
        assert "the context holds 2048" in error["message"]
