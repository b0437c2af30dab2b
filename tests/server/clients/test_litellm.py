"""litellm against the embedded model: its calls, and its own classes for what goes wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.server.clients.outside import Cases, run_cases
from tests.server.conftest import Live

ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def cases(embedded_server: Live, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return run_cases(
        [sys.executable, Path(__file__).with_name("litellm_cases.py"), embedded_server.url],
        cwd=tmp_path_factory.mktemp("litellm"),
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # prices are not fetched
    )


def test_a_completion_has_text_reason_and_usage(cases: Cases) -> None:
    assert {"text": ANSWER, "finish": "stop", "tokens": 8} == cases["completion"]


def test_calls_at_once_get_the_same_answer(cases: Cases) -> None:
    assert [ANSWER] * 3 == cases["at_once"]


def test_a_stream_adds_up(cases: Cases) -> None:
    assert {"text": ANSWER, "built": ANSWER, "tokens": 8} == cases["stream"]


def test_a_call_is_made_streamed_and_answered(cases: Cases) -> None:
    found = cases["tools"]
    assert "tool_calls" == found["finish"]
    assert "add" == found["call"]["name"]
    assert {"a": 2, "b": 3} == json.loads(found["call"]["arguments"])
    assert found["call"] == found["streamed"]
    assert "5" in found["answer"]


def test_a_class_constrains_the_answer(cases: Cases) -> None:
    assert {"coastal", "climate"} == cases["response_format"].keys()


def test_text_is_continued(cases: Cases) -> None:
    assert " Paris." == cases["text_completion"]


def test_embeddings_have_unit_length_and_repeat(cases: Cases) -> None:
    one, same, other = np.array(cases["embedding"])
    assert np.allclose(1, np.linalg.norm([one, other], axis=1), atol=1e-5)
    assert np.allclose(one, same, atol=1e-4)
    assert not np.allclose(one, other, atol=1e-2)


def test_a_prompt_too_long_is_litellms_bad_request(cases: Cases) -> None:
    assert [400, 400] == [error["status"] for error in cases["errors"]]
    assert all("the context holds 2048" in error["message"] for error in cases["errors"])
