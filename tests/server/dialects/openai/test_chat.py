"""Chat completions over a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from speculoe_local.server.dialects.openai import chat
from speculoe_local.server.errors import Loading, QueueFull
from speculoe_local.server.jobs import Delta, Job
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import (
    CHATML,
    FakeBackend,
    FakeBackends,
    Script,
    Step,
    client_of,
    echo_prompt,
    say,
)

THINK = CHATML + "{# </think> enable_thinking #}"
USER = [{"role": "user", "content": "hi"}]
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
PATH = "/v1/chat/completions"


class Served:
    """A model and a client of it."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.backend = FakeBackend(script, **options)
        backends = FakeBackends(self.backend)
        self.client = client_of(chat.router(backends, Settings(ping_s=0)))

    def post(self, path: str = PATH, **body: Any) -> Any:
        return self.client.post(path, json={"messages": USER, **body})

    def whole(self, **body: Any) -> dict[str, Any]:
        answer = self.post(**body)
        assert 200 == answer.status_code, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chunks(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(stream=True, **body)
        assert 200 == answer.status_code, answer.text
        frames = [frame for frame in answer.text.split("\n\n") if frame]
        assert "data: [DONE]" == frames[-1]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]

    @property
    def job(self) -> Job:
        return self.backend.jobs[-1]


def joined(chunks: list[dict[str, Any]], key: str) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get(key) or "" for choice in choices)


def test_an_answer_comes_whole_with_usage_and_timings() -> None:
    served = Served(say("Hello", " world"))
    answer = served.whole(model="anything")
    message = {"role": "assistant", "content": "Hello world", "refusal": None}
    assert [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}] == answer[
        "choices"
    ]
    assert "anything" == answer["model"]
    assert "chat.completion" == answer["object"]
    n = len(served.job.tokens)
    usage = answer["usage"]
    assert (n, 11, n + 11) == tuple(
        usage[k] for k in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    assert 1 == usage["prompt_tokens_details"]["cached_tokens"]
    assert "exact" == answer["timings"]["experts"]["mode"]
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" == served.backend.prompt()


def test_a_stream_is_role_then_text_then_one_finish_then_done() -> None:
    chunks = Served(say("Hel", "lo")).chunks()
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [
        {"role": "assistant", "content": None},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ] == deltas
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert [None, None, None, "stop"] == reasons
    assert 1 == len({chunk["id"] for chunk in chunks})
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_streams_only_when_asked_for_and_without_choices() -> None:
    chunks = Served(say("x")).chunks(stream_options={"include_usage": True})
    assert [] == chunks[-1]["choices"]
    assert 1 == chunks[-1]["usage"]["completion_tokens"]
    assert {"cached_tokens": 1, "audio_tokens": 0} == chunks[-1]["usage"]["prompt_tokens_details"]
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_choices_are_jobs_with_seeds_of_their_own() -> None:
    served = Served(say("a", "b"))
    answer = served.whole(n=3, seed=7)
    assert [0, 1, 2] == [choice["index"] for choice in answer["choices"]]
    assert [7, 8, 9] == [job.sampling.seed for job in served.backend.jobs]
    assert 6 == answer["usage"]["completion_tokens"]
    assert len(served.job.tokens) == answer["usage"]["prompt_tokens"]
    chunks = served.chunks(n=2)
    finished = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert {0, 1} == set(finished)
    assert 2 == len(finished)


def test_reasoning_is_told_apart_and_counted() -> None:
    served = Served(say("<think>\nhm", "m</think>\n\n", "yes"), template=THINK)
    message = served.whole()["choices"][0]["message"]
    assert "hmm" == message["reasoning_content"]
    assert "yes" == message["content"]
    chunks = served.chunks(stream_options={"include_usage": True})
    assert "hmm" == joined(chunks, "reasoning_content")
    assert "yes" == joined(chunks, "content")
    assert chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    left = served.whole(reasoning_format="none")["choices"][0]["message"]
    assert "<think>\nhmm</think>\n\nyes" == left["content"]


def test_calls_come_as_text_of_json_with_ids() -> None:
    served = Served(say("Let me see.\n", CALL))
    choice = served.whole(tools=[NOW])["choices"][0]
    assert "tool_calls" == choice["finish_reason"]
    assert "Let me see." == choice["message"]["content"]
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert "function" == call["type"]
    assert {"zone": "UTC"} == json.loads(call["function"]["arguments"])


def test_streamed_calls_name_id_and_function_once() -> None:
    pieces = [CALL[i : i + 7] for i in range(0, len(CALL), 7)]
    chunks = Served(say(*pieces)).chunks(tools=[NOW])
    deltas = [
        call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert "now" == deltas[0]["function"]["name"]
    assert deltas[0]["id"]
    for later in deltas[1:]:
        assert {"index", "function"} == later.keys()
        assert {"arguments"} == later["function"].keys()
    text = "".join(call["function"]["arguments"] for call in deltas)
    assert {"zone": "UTC"} == json.loads(text)
    assert "tool_calls" == chunks[-1]["choices"][0]["finish_reason"]
    assert "" == joined(chunks, "content")


def test_tool_calls_are_left_out_where_there_are_none() -> None:
    message = Served(say("x")).whole(tools=[NOW])["choices"][0]["message"]
    assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("auto", False),
        ("required", True),
        ({"type": "function", "function": {"name": "now"}}, True),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, True),
    ],
)
def test_tool_choice_decides_whether_a_call_must_come(choice: Any, forced: bool) -> None:
    served = Served(say(CALL))
    served.whole(tools=[NOW], tool_choice=choice)
    assert served.job.grammar is not None
    assert forced == (served.job.grammar_triggers == ())


def test_no_tool_is_offered_where_none_may_be_called() -> None:
    served = Served(say(CALL))
    message = served.whole(tools=[NOW], tool_choice="none")["choices"][0]["message"]
    assert CALL == message["content"]
    assert served.job.grammar is None
    assert "now" not in served.backend.prompt()


def test_fields_reach_the_job() -> None:
    served = Served(say("x"))
    served.whole(
        temperature=0,
        top_k=5,
        min_p=0.1,
        dry_multiplier=0.5,
        samplers=["temp", "top_k", "unheard-of"],
        seed=-1,
        stop=["END", "", "END"],
        logit_bias={"5": -100, "A": 2, "7": False},
        ignore_eos=True,
        cache_prompt=False,
        id_slot=-1,
        max_completion_tokens=9,
        t_max_predict_ms=50,
        logprobs=True,
        top_logprobs=2,
    )
    job = served.job
    assert 0 == job.sampling.temp
    assert 5 == job.sampling.top_k
    assert 0.1 == job.sampling.min_p
    assert 0.5 == job.sampling.dry_multiplier
    assert ("temperature", "top_k") == job.sampling.samplers
    assert job.sampling.seed is None
    assert ("END",) == job.stop
    assert {5: -100.0, 65: 2.0, 7: float("-inf")} == job.logit_bias
    assert (True, False, None) == (job.ignore_end, job.cache_prompt, job.slot)
    assert (9, 50.0, 2) == (job.max_tokens, job.max_ms, job.top_logprobs)


def test_logprobs_have_bytes_and_alternatives() -> None:
    served = Served(say("hé"))
    found = served.whole(logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [104, 0xC3, 0xA9] == [each["bytes"][0] for each in found]
    assert -0.5 == found[0]["logprob"]
    assert 1 == len(found[0]["top_logprobs"])
    chunks = served.chunks(logprobs=True)
    streamed = [
        each
        for chunk in chunks
        for each in (chunk["choices"][0]["logprobs"] or {"content": ()})["content"]
    ]
    assert 3 == len(streamed)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            None,
        ),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "grammar"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stop": [1]}, "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_a_400_that_names_it(body: Any, param: str | None, stream: bool) -> None:
    served = Served(say("x"))
    answer = served.post(**{"stream": stream, **body})
    assert 400 == answer.status_code
    error = answer.json()["error"]
    assert ("invalid_request_error", 400) == (error["type"], error["code"])
    assert param is None or param == error["param"]
    assert not served.backend.jobs


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"a": NaN}', b""])
def test_a_body_that_is_no_json_object_is_a_400(raw: bytes) -> None:
    answer = Served(say("x")).client.post(PATH, content=raw)
    assert 400 == answer.status_code
    assert "invalid_request_error" == answer.json()["error"]["type"]


def test_an_overflow_says_both_numbers_also_in_a_stream() -> None:
    served = Served(say("x"), n_ctx=8)
    for stream in (False, True):
        answer = served.post(stream=stream)
        assert 400 == answer.status_code
        error = answer.json()["error"]
        assert "exceed_context_size_error" == error["type"]
        assert 8 == error["n_ctx"]
        assert error["n_prompt_tokens"] > 8


def test_a_full_queue_is_a_503_that_says_when() -> None:
    answer = Served(say("x"), refuse=QueueFull(9, 4)).post(stream=True)
    assert 503 == answer.status_code
    assert "4" == answer.headers["retry-after"]


def test_a_model_on_its_way_is_a_503() -> None:
    backends = FakeBackends(FakeBackend(say("x")), loading=Loading(0.5))
    client = client_of(chat.router(backends, Settings()))
    answer = client.post(PATH, json={"messages": USER})
    assert 503 == answer.status_code
    assert "Loading model" == answer.json()["error"]["message"]


def test_an_error_before_the_first_token_has_a_status_and_one_after_it_an_event() -> None:
    early = Served(lambda _job: [RuntimeError("secret")])
    answer = early.post(stream=True)
    assert 500 == answer.status_code
    assert "secret" not in answer.text
    late = Served(lambda _job: [Delta(text="a", tokens=(97,)), RuntimeError("secret")])
    answer = late.post(stream=True)
    assert 200 == answer.status_code
    frames = [f for f in answer.text.split("\n\n") if f]
    assert "server_error" == json.loads(frames[-1].removeprefix("data: "))["error"]["type"]
    assert "[DONE]" not in answer.text
    assert "secret" not in answer.text


def test_several_models_are_told_apart_and_unknown_ones_refused() -> None:
    one, two = FakeBackend(say("1"), name="one"), FakeBackend(say("2"), name="two")
    client = client_of(chat.router(FakeBackends(one, two), Settings()))
    answer = client.post(PATH, json={"messages": USER, "model": "two"})
    assert "2" == answer.json()["choices"][0]["message"]["content"]
    answer = client.post(PATH, json={"messages": USER, "model": "three"})
    assert 404 == answer.status_code
    assert "not_found_error" == answer.json()["error"]["type"]


def test_every_request_gets_the_answer_to_its_own_prompt() -> None:
    served = Served(echo_prompt)
    for text in ("alpha", "beta"):
        answer = served.whole(messages=[{"role": "user", "content": text}])
        assert text in answer["choices"][0]["message"]["content"]


def test_fields_and_paths_of_other_servers_are_let_pass() -> None:
    served = Served(say("x"))
    body = {
        "user": "me",
        "store": None,
        "prompt_cache_key": "k",
        "tools": [],
        "stream_options": None,
    }
    for path in (PATH, "/chat/completions"):
        assert 200 == served.post(path, **body).status_code


def test_a_prompt_in_progress_shows_when_asked_for() -> None:
    def script(job: Job) -> Iterable[Step]:
        yield Delta(prompt_done=0.5)
        yield from say("x")(job)

    chunks = Served(script).chunks(return_progress=True)
    progress = next(chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk)
    assert progress["processed"] == round(progress["total"] / 2)
    assert all("prompt_progress" not in chunk for chunk in Served(script).chunks())


def test_a_request_for_json_is_sampled_under_a_grammar() -> None:
    served = Served(say("{}"))
    served.whole(response_format={"type": "json_object"})
    assert served.job.grammar is not None
    assert "object" in served.job.grammar
    served.whole(response_format={"type": "text"})
    assert served.job.grammar is None


def test_an_answer_cut_off_says_length_and_keeps_its_text() -> None:
    empty = Served(say(finish="length")).whole()["choices"][0]
    assert ("length", "") == (empty["finish_reason"], empty["message"]["content"])
    half = Served(say(CALL[:30], finish="length")).whole(tools=[NOW])["choices"][0]
    assert "length" == half["finish_reason"]
    assert "tool_calls" not in half["message"]


def test_tokens_of_a_conversation_can_be_counted_without_an_answer() -> None:
    served = Served(say("x"))
    answer = served.post(f"{PATH}/input_tokens").json()
    served.whole()
    assert len(served.job.tokens) == answer["input_tokens"]


def test_models_are_listed_with_the_context_they_run_with() -> None:
    client = Served(say("x"), n_ctx=777).client
    listed = client.get("/v1/models").json()
    (model,) = listed["data"]
    assert ("fake", "model", "llamacpp") == (model["id"], model["object"], model["owned_by"])
    assert isinstance(model["created"], int)
    assert 777 == model["meta"]["n_ctx"]
    assert listed == client.get("/models").json()
    assert model == client.get("/v1/models/fake").json()
    assert 404 == client.get("/v1/models/none").status_code


def test_a_silent_stream_is_kept_alive_by_bare_comments() -> None:
    release = asyncio.Event()

    def script(job: Job) -> Iterable[Step]:
        yield Delta(prompt_done=0.1)
        yield release
        yield from say("x")(job)

    app = FastAPI()
    app.include_router(chat.router(FakeBackends(FakeBackend(script)), Settings()))

    async def run() -> bytes:
        asyncio.get_running_loop().call_later(0.3, release.set)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"messages": USER, "stream": True, "sse_ping_interval": 0.05}
            return (await client.post(PATH, json=body)).content

    raw = asyncio.run(run())
    assert b"\n: \n\n" in raw
    assert raw.endswith(b"data: [DONE]\n\n")
