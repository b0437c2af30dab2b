"""llama.vim's requests against a live model that has fill-in-the-middle tokens."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import Live

REQUEST: dict[str, Any] = {
    "id_slot": 7,
    "input_prefix": "def f(a):\n",
    "input_suffix": "\n    return b\n",
    "input_extra": [{"text": "import os", "time": [1, 2], "filename": "x.py"}],
    "prompt": "    b = ",
    "n_predict": 16,
    "n_indent": 0,
    "stop": [],
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 10_000,
    "response_fields": ["content", "timings/prompt_n", "timings/cache_n", "tokens_cached"],
    "model": "",
}


def test_the_plugin_warms_the_cache_and_finds_it_warm(filling: Live) -> None:
    warm_up = {**REQUEST, "n_predict": 0, "samplers": [], "response_fields": [""]}
    answer = filling.post("/infill", warm_up)
    assert (200, {}) == (answer.status_code, answer.json())
    answer = filling.post("/infill", REQUEST)
    found = answer.json()
    assert set(REQUEST["response_fields"]) == found.keys()
    assert found["timings/cache_n"] > found["timings/prompt_n"]
    assert "\n" not in answer.text


def test_a_gap_that_exceeds_the_context_is_cut_and_answered(filling: Live) -> None:
    body = {**REQUEST, "input_prefix": "x = 1\n" * 400, "input_suffix": "y = 2\n" * 400}
    answer = filling.post("/infill", body)
    assert 200 == answer.status_code
    assert answer.json()["tokens_cached"] <= 512


def test_a_suffix_fills_the_middle_for_openais_clients(filling: Live) -> None:
    body = {"prompt": "def f(", "suffix": "):", "max_tokens": 3, "temperature": 0}
    answer = filling.post("/v1/completions", body)
    assert 200 == answer.status_code
    assert answer.json()["usage"]["prompt_tokens"] >= 3 + 2
