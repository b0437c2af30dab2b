"""llama-server's own routes over a scripted model, with what its clients send."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest

from speculoe_local.server.dialects.llama import routes as llama
from speculoe_local.server.errors import Loading
from speculoe_local.server.jobs import Delta, Job, Timings
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import (
    FakeBackend,
    FakeBackends,
    Script,
    Step,
    client_of,
    echo_prompt,
    say,
)


class Served:
    """A model and a client of it."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.backend = FakeBackend(script, **options)
        self.client = client_of(llama.router(FakeBackends(self.backend), Settings(ping_s=0)))

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def whole(self, path: str = "/completion", **body: Any) -> Any:
        answer = self.post(path, **body)
        assert 200 == answer.status_code, answer.text
        return answer.json()

    def steps(self, path: str = "/completion", **body: Any) -> list[dict[str, Any]]:
        answer = self.post(path, **{**body, "stream": True})
        assert 200 == answer.status_code, answer.text
        frames = [frame for frame in answer.text.split("\n\n") if frame]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames]

    @property
    def job(self) -> Job:
        return self.backend.jobs[-1]


def llama_vim(**more: Any) -> dict[str, Any]:
    """A request as the Vim plugin sends it."""
    return {
        "id_slot": 0,
        "input_prefix": "def f(a):\n",
        "input_suffix": "\n    return b\n",
        "input_extra": [{"text": "import os", "time": [1, 2], "filename": "x.py"}],
        "prompt": "    b = ",
        "n_predict": 128,
        "stop": [],
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.90,
        "samplers": ["top_k", "top_p", "infill"],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": [
            "content",
            "timings/prompt_n",
            "timings/predicted_per_second",
            "truncated",
            "tokens_cached",
        ],
        "model": "",
        **more,
    }


def test_a_completion_has_llama_servers_fields() -> None:
    served = Served(say("Hi", " you\n", stop_hit="END"))
    answer = served.whole(prompt="ab", n_predict=9, stop=["END"], return_tokens=True, seed=3)
    assert "Hi you\n" == answer["content"]
    assert list(b"Hi you\n") == answer["tokens"]
    assert ("word", "END") == (answer["stop_type"], answer["stopping_word"])
    assert (True, False, True) == (answer["stop"], answer["truncated"], answer["has_new_line"])
    assert (2, 7, 9) == tuple(
        answer[k] for k in ("tokens_evaluated", "tokens_predicted", "tokens_cached")
    )
    assert "ab" == answer["prompt"]
    settings = answer["generation_settings"]
    assert (9, 3, ["END"]) == (settings["n_predict"], settings["seed"], settings["stop"])
    assert 1 == answer["timings"]["cache_n"]


def test_a_stream_is_steps_and_a_last_one_without_done() -> None:
    served = Served(say("Hi", " you"))
    steps = served.steps(prompt="ab", n_probs=1)
    assert ["Hi", " you", ""] == [step["content"] for step in steps]
    assert [False, False, True] == [step["stop"] for step in steps]
    assert 2 == len(steps[0]["completion_probabilities"])
    assert "eos" == steps[-1]["stop_type"]
    assert "[DONE]" not in served.post("/completion", prompt="ab", stream=True).text


def test_several_prompts_or_choices_give_a_list() -> None:
    answers = Served(echo_prompt).whole(prompt=["a", "b"], n_cmpl=2)
    assert ["a", "a", "b", "b"] == [answer["content"] for answer in answers]
    assert [0, 1, 2, 3] == [answer["index"] for answer in answers]


def test_nothing_to_predict_only_fills_the_cache() -> None:
    served = Served(say(finish="length"))
    answer = served.whole(prompt="ab", n_predict=0)
    assert 0 == served.job.max_tokens
    assert ("", "limit") == (answer["content"], answer["stop_type"])


def test_the_vim_plugin_gets_the_fields_it_names() -> None:
    served = Served(say("a"))
    answer = served.whole("/infill", **llama_vim())
    assert {
        "content": "a",
        "timings/prompt_n": len(served.job.tokens) - 1,
        "timings/predicted_per_second": 500.0,
        "truncated": False,
        "tokens_cached": len(served.job.tokens) + 1,
    } == answer
    text = served.backend.prompt()
    assert text.endswith("<fim_pre>def f(a):\n    b = <fim_suf>\n    return b\n<fim_mid>")
    assert "import os" in text
    assert ("top_k", "top_p", "infill") == served.job.sampling.samplers
    assert 1000 == served.job.max_ms


def test_the_vim_plugins_warm_up_answers_with_nothing() -> None:
    served = Served(say(finish="length"))
    body = llama_vim(n_predict=0, samplers=[], response_fields=[""])
    answer = served.client.post("/infill", json=body, headers={"Authorization": "Bearer "})
    assert (200, {}) == (answer.status_code, answer.json())
    assert "\n" not in answer.text


def test_a_slot_that_does_not_exist_is_a_wish_that_is_not_met() -> None:
    served = Served(say("a"))
    served.whole("/infill", **llama_vim(id_slot=99))
    assert 99 == served.job.slot


def test_a_line_indented_too_little_ends_the_answer() -> None:
    for stream in (False, True):
        served = Served(say("1\n", "    x", " = 2\n  ", "y = 3\n", "    z\n"))
        body = llama_vim(response_fields=None)
        if stream:
            steps = served.steps("/infill", **body)
            text = "".join(step["content"] for step in steps)
            assert "limit" == steps[-1]["stop_type"]
        else:
            text = served.whole("/infill", **body)["content"]
        assert "1\n    x = 2\n" == text.rstrip(" ")
        assert served.backend.tickets[0].cancelled.is_set()


@pytest.mark.parametrize(
    "change",
    [
        {"input_prefix": None},
        {"input_suffix": 5},
        {"input_extra": [{"filename": "x"}]},
        {"input_extra": [{"text": "x", "filename": 5}]},
        {"prompt": ["a"]},
    ],
)
def test_an_infill_that_is_none_is_a_400(change: dict[str, Any]) -> None:
    assert 400 == Served(say("a")).post("/infill", **llama_vim(**change)).status_code


def test_a_model_without_marks_for_it_says_so() -> None:
    answer = Served(say("a"), fim=False).post("/infill", **llama_vim())
    assert 501 == answer.status_code
    assert "fill-in-the-middle" in answer.json()["error"]["message"]


def test_a_gap_larger_than_the_context_is_cut_to_fit() -> None:
    served = Served(say("a"), n_ctx=64)
    body = llama_vim(input_prefix="p" * 500, input_suffix="s" * 500, n_predict=8)
    served.whole("/infill", **body)
    assert len(served.job.tokens) <= 64 - 1 - 8
    text = served.backend.prompt()
    assert text.count("p") > text.count("s") > 0
    assert "import os" not in text


def test_text_goes_to_tokens_and_back() -> None:
    served = Served(say("a"))
    assert [104, 105] == served.whole("/tokenize", content="hi")["tokens"]
    assert [258, 104] == served.whole("/tokenize", content="<|im_start|>h")["tokens"]
    plain = served.whole("/tokenize", content="<|im_start|>", parse_special=False)
    assert 12 == plain["count"]
    pieces = served.whole("/tokenize", content="é", with_pieces=True)["tokens"]
    assert [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}] == pieces
    assert "hi<|im_end|>" == served.whole("/detokenize", tokens=[104, 105, 257])["content"]
    assert [] == served.whole("/tokenize")["tokens"]
    assert 400 == served.post("/detokenize", tokens=[99999]).status_code
    assert 400 == served.post("/tokenize", content=[{}]).status_code


def test_evaluation_harnesses_tokenize_by_other_names() -> None:
    served = Served(say("a"), n_ctx=500)
    found = served.whole("/tokenize", prompt="hi", add_special_tokens=False)
    assert ([104, 105], 2, 500) == (found["tokens"], found["count"], found["max_model_len"])
    info = served.client.get("/tokenizer_info").json()
    assert ("<|im_end|>", "<bos>") == (info["eos_token"], info["bos_token"])


def test_a_conversation_shows_the_prompt_it_makes() -> None:
    served = Served(say("a"))
    found = served.whole("/apply-template", messages=[{"role": "user", "content": "hi"}])
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" == found["prompt"]


def test_health_is_ready_or_loading() -> None:
    assert {"status": "ok"} == Served(say("a")).client.get("/health").json()
    backends = FakeBackends(FakeBackend(say("a")), loading=Loading(0.5))
    answer = client_of(llama.router(backends, Settings())).get("/v1/health")
    assert 503 == answer.status_code
    assert ("loading model", 0.5) == (answer.json()["status"], answer.json()["progress"])
    assert "Loading model" == answer.json()["error"]["message"]


def test_props_say_what_runs_and_how_exactly() -> None:
    client = Served(say("a"), n_ctx=321).client
    props = client.get("/props").json()
    assert 321 == props["default_generation_settings"]["n_ctx"]
    assert (4, "exact", "exact") == (props["total_slots"], props["mode"], props["exactness"])
    assert "<|im_start|>" in props["chat_template"]
    assert props == client.get("/props?model=fake&autoload=false").json()


def test_slots_show_who_is_busy_and_not_with_what() -> None:
    client = Served(say("a")).client
    slots = client.get("/slots").json()
    assert [(i, False) for i in range(4)] == [(s["id"], s["is_processing"]) for s in slots]
    assert 200 == client.get("/slots?fail_on_no_slot=1").status_code
    assert 501 == client.post("/slots/0?action=save", json={}).status_code
    assert [] == client.get("/lora-adapters").json()


def test_settings_reach_the_job() -> None:
    served = Served(say("a"))
    served.whole(
        prompt="a",
        logit_bias=[[5, False], ["A", 1.5]],
        mirostat=2,
        repeat_last_n=-1,
        json_schema={"type": "boolean"},
        n_probs=0,
        ignore_eos=True,
    )
    job = served.job
    assert {5: -math.inf, 65: 1.5} == job.logit_bias
    assert (2, -1) == (job.sampling.mirostat, job.sampling.repeat_last_n)
    assert job.grammar is not None
    assert "true" in job.grammar
    assert job.top_logprobs is None
    assert job.ignore_end


def test_a_lazy_grammar_waits_for_words_and_takes_no_patterns() -> None:
    served = Served(say("a"))
    body = {"prompt": "a", "grammar": 'root ::= "<t>"', "grammar_lazy": True}
    served.whole(**body, grammar_triggers=[{"type": "word", "value": "<t>(x"}])
    assert (r"(<t>\(x)",) == served.job.grammar_triggers
    assert 400 == served.post("/completion", **body).status_code
    pattern = [{"type": "pattern", "value": "(a+)+$"}]
    assert 400 == served.post("/completion", **body, grammar_triggers=pattern).status_code


def test_a_prompt_in_progress_shows_when_asked_for() -> None:
    def script(job: Job) -> Iterable[Step]:
        yield Delta(prompt_done=0.5)
        yield from say("x")(job)

    steps = Served(script).steps(prompt="abcd", return_progress=True)
    assert (4, 2) == tuple(steps[0]["prompt_progress"][k] for k in ("total", "processed"))
    assert ["", "x", ""] == [step["content"] for step in steps]


def test_an_answer_that_fills_the_context_is_truncated() -> None:
    def script(job: Job) -> Iterable[Step]:
        yield Delta(text="x", tokens=(120,), timings=Timings(prompt_n=2, predicted_n=6))
        yield Delta(finish="length", timings=Timings(prompt_n=2, predicted_n=6))

    assert Served(script, n_ctx=8).whole(prompt="ab")["truncated"]


def test_probabilities_after_sampling_are_not_invented() -> None:
    answer = Served(say("x")).post("/completion", prompt="a", n_probs=1, post_sampling_probs=True)
    assert 400 == answer.status_code
