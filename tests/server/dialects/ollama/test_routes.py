"""The Ollama dialect over a scripted model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from speculoe_local.server.dialects.ollama import routes as ollama
from speculoe_local.server.errors import Loading, QueueFull
from speculoe_local.server.jobs import Delta, Job
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import (
    CHATML,
    FakeBackend,
    FakeBackends,
    Script,
    client_of,
    embed,
    say,
)

THINK = CHATML + "{# </think> enable_thinking #}"
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


class Served:
    """A model and a client of it."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.backend = FakeBackend(script, **options)
        self.client = client_of(ollama.router(FakeBackends(self.backend), Settings()))

    def post(self, path: str, **body: Any) -> Any:
        return self.client.post(f"/api/{path}", json=body)

    def whole(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, stream=False, **body)
        assert 200 == answer.status_code, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def lines(self, path: str, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(path, **body)
        assert 200 == answer.status_code, answer.text
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        return [json.loads(line) for line in answer.text.splitlines()]


def test_a_stream_is_the_default_and_its_last_line_has_counts_and_no_text() -> None:
    lines = Served(say("Hel", "lo")).lines("chat", model="m", messages=USER)
    assert ["Hel", "lo", ""] == [line["message"]["content"] for line in lines]
    assert [False, False, True] == [line["done"] for line in lines]
    last = lines[-1]
    assert "stop" == last["done_reason"]
    assert 5 == last["eval_count"]
    assert 10_000_000 == last["prompt_eval_duration"] == last["eval_duration"]
    assert last["total_duration"] >= last["load_duration"] >= 0
    assert {"m"} == {line["model"] for line in lines}
    assert all(line["created_at"].endswith("Z") for line in lines)


def test_an_answer_in_one_piece_equals_the_stream_joined() -> None:
    served = Served(say("<think>a", "b</think>", "c ", "d"), template=THINK)
    lines = served.lines("chat", messages=USER)
    whole = served.whole("chat", messages=USER)["message"]
    assert "ab" == "".join(line["message"].get("thinking", "") for line in lines)
    assert {"role": "assistant", "content": "c d", "thinking": "ab"} == whole


def test_arguments_are_objects_and_a_call_is_one_line() -> None:
    served = Served(say(*CALL))
    lines = served.lines("chat", messages=USER, tools=[TOOL])
    calls = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [{"index": 0, "name": "now", "arguments": {"zone": "UTC"}}] == [
        call["function"] for call in calls
    ]
    whole = served.whole("chat", messages=USER, tools=[TOOL])
    assert {"zone": "UTC"} == whole["message"]["tool_calls"][0]["function"]["arguments"]
    assert "" == whole["message"]["content"]
    assert "stop" == whole["done_reason"]


def test_a_call_that_was_cut_off_is_text() -> None:
    served = Served(say(CALL[:40], finish="length"))
    lines = served.lines("chat", messages=USER, tools=[TOOL])
    assert CALL[:40] == "".join(line["message"]["content"] for line in lines)
    assert "length" == lines[-1]["done_reason"]


def test_results_of_calls_go_back_to_the_model() -> None:
    served = Served(say("ok"))
    call = {"function": {"name": "now", "arguments": {"zone": "UTC"}}}
    served.whole(
        "chat",
        messages=[
            *USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "now", "content": "12:00"},
        ],
        tools=[TOOL],
    )
    prompt = served.backend.prompt()
    assert '"arguments": {"zone": "UTC"}' in prompt
    assert "12:00" in prompt


def test_options_reach_the_job_and_those_of_the_machine_are_ignored() -> None:
    served = Served(say("ok"))
    options = {
        "temperature": 0,
        "top_k": 5,
        "seed": 7,
        "num_predict": 3,
        "num_ctx": 1_000_000,
        "num_gpu": 99,
        "stop": ["\n", ""],
        "repeat_penalty": 1.2,
    }
    served.whole("chat", messages=USER, options=options)
    job = served.backend.jobs[0]
    assert (0, 5, 7, 1.2) == (
        job.sampling.temp,
        job.sampling.top_k,
        job.sampling.seed,
        job.sampling.repeat_penalty,
    )
    assert 3 == job.max_tokens
    assert ("\n",) == job.stop


@pytest.mark.parametrize("limit", [-1, -2, None])
def test_no_limit_is_none(limit: int | None) -> None:
    served = Served(say("ok"))
    served.whole("chat", messages=USER, options={"num_predict": limit})
    assert served.backend.jobs[0].max_tokens is None


@pytest.mark.parametrize(
    "form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}]
)
def test_a_format_constrains_the_answer(form: Any) -> None:
    served = Served(say("{}"))
    served.whole("chat", messages=USER, format=form)
    job = served.backend.jobs[0]
    assert job.grammar is not None
    assert () == job.grammar_triggers


def test_tools_constrain_only_what_begins_like_a_call() -> None:
    served = Served(say("ok"))
    served.whole("chat", messages=USER, tools=[TOOL])
    job = served.backend.jobs[0]
    assert job.grammar is not None
    assert job.grammar_triggers
    served.whole("chat", messages=USER, tools=[])
    assert served.backend.jobs[1].grammar is None


def test_thinking_is_switched_by_think_and_off_where_a_form_is_set() -> None:
    template = CHATML + "{{ 'ON' if enable_thinking | default(true) else 'OFF' }}{# </think> #}"
    served = Served(say("{}"), template=template)
    for body, shown in (
        ({}, "ON"),
        ({"think": False}, "OFF"),
        ({"think": "high"}, "ON"),
        ({"format": "json"}, "OFF"),
        ({"format": "json", "think": True}, "ON"),
    ):
        served.whole("chat", messages=USER, **body)
        assert served.backend.prompt().endswith(shown)


def test_log_probabilities_come_with_their_tokens() -> None:
    served = Served(say("ab", "c"))
    whole = served.whole("chat", messages=USER, logprobs=True, top_logprobs=2)
    assert ["a", "b", "c"] == [each["token"] for each in whole["logprobs"]]
    assert 2 == len(whole["logprobs"][0]["top_logprobs"])
    lines = served.lines("chat", messages=USER, logprobs=True)
    assert ["a", "b", "c"] == [e["token"] for line in lines for e in line.get("logprobs", ())]


def test_generate_renders_a_conversation_and_hands_its_tokens_back() -> None:
    served = Served(say("ok"))
    whole = served.whole("generate", prompt="hi", system="Be brief.")
    assert "ok" == whole["response"]
    assert served.backend.prompt().startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    again = served.whole("generate", prompt="more", context=whole["context"])
    assert "okmore" not in served.backend.prompt()
    assert tuple(whole["context"]) == served.backend.jobs[1].tokens[: len(whole["context"])]
    assert len(again["context"]) > len(whole["context"])


def test_generate_raw_uses_no_template() -> None:
    served = Served(say("<think>x"))
    whole = served.whole("generate", prompt="a<|im_end|>", raw=True)
    assert "a<|im_end|>" == served.backend.prompt()
    assert "<think>x" == whole["response"]
    assert "context" not in whole


def test_generate_with_a_suffix_fills_in_the_middle() -> None:
    served = Served(say("mid"))
    served.whole("generate", prompt="pre", suffix="suf")
    assert "<fim_pre>pre<fim_suf>suf<fim_mid>" == served.backend.prompt()
    refused = Served(say(""), fim=False).post("generate", prompt="pre", suffix="suf")
    assert 501 == refused.status_code
    assert "fill-in-the-middle" in refused.json()["error"]


@pytest.mark.parametrize(("path", "key"), [("chat", "message"), ("generate", "response")])
def test_a_request_without_words_loads_or_unloads(path: str, key: str) -> None:
    served = Served(say("x"))
    loaded = served.whole(path, model="fake")
    assert ("load", True) == (loaded["done_reason"], loaded["done"])
    assert key in loaded
    assert "unload" == served.whole(path, model="fake", keep_alive=0)["done_reason"]
    assert "unload" == served.whole(path, model="fake", keep_alive="0s")["done_reason"]
    assert [] == served.backend.jobs


def test_vectors_have_unit_length_and_may_be_shortened() -> None:
    served = Served(embed)
    whole = served.whole("embed", input=["a", "bcd"])
    assert 2 == len(whole["embeddings"])
    assert all(1.0 == pytest.approx(sum(x * x for x in v)) for v in whole["embeddings"])
    assert 4 == whole["prompt_eval_count"]
    assert 2 == len(served.whole("embed", input="a", dimensions=2)["embeddings"][0])
    assert [] == served.whole("embed", input=[])["embeddings"]
    assert 4 == len(served.whole("embeddings", prompt="a")["embedding"])
    assert 400 == served.post("embed", input="a", dimensions=99).status_code


def test_what_editors_ask_before_they_start() -> None:
    served = Served(say(""), n_ctx=2048, template=THINK)
    version = served.client.get("/api/version").json()["version"]
    assert (0, 6, 4) <= tuple(map(int, version.split(".")))
    tag = served.client.get("/api/tags").json()["models"][0]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= set(tag)
    shown = served.whole("show", model="fake")
    arch = shown["model_info"]["general.architecture"]
    assert 2048 == shown["model_info"][f"{arch}.context_length"]
    assert "fake" == shown["model_info"]["general.basename"]
    assert ["completion", "tools", "insert", "thinking"] == shown["capabilities"]
    running = served.client.get("/api/ps").json()["models"][0]
    assert (2048, "fake") == (running["context_length"], running["name"])
    assert "success" == served.whole("pull", model="fake")["status"]
    assert 501 == served.post("pull", model="other").status_code


def test_an_unknown_model_is_not_found_where_names_count() -> None:
    backends = FakeBackends(FakeBackend(say("a"), name="a"), FakeBackend(say("b"), name="b"))
    client = client_of(ollama.router(backends, Settings()))
    for path in ("chat", "show"):
        answer = client.post(f"/api/{path}", json={"model": "c", "messages": USER})
        assert 404 == answer.status_code
        assert "'c'" in answer.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", {"messages": "hi"}),
        ("chat", {"messages": [{"role": "user", "content": 3}]}),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
        ("chat", {"messages": USER, "format": "xml"}),
        ("chat", {"messages": USER, "format": {"type": "object", "properties": 3}}),
        ("chat", {"messages": USER, "options": {"temperature": "hot"}}),
        ("chat", {"messages": USER, "options": {"num_predict": "many"}}),
        ("chat", {"messages": USER, "tools": [{"type": "function"}]}),
        ("generate", {"prompt": "x", "images": ["aGk="]}),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}),
        ("generate", {"prompt": 3}),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(path: str, body: dict[str, Any]) -> None:
    answer = Served(say("")).post(path, **body)
    assert 400 == answer.status_code, answer.text
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe", b"[]", b"3", b"[" * 10_000])
def test_bodies_that_are_no_json_object_are_refused(raw: bytes) -> None:
    answer = Served(say("")).client.post("/api/chat", content=raw)
    assert 400 == answer.status_code
    assert "error" in answer.json()


@pytest.mark.parametrize(
    ("refuse", "status"), [(QueueFull(64, 3), 503), (Loading(0.5), 503), (RuntimeError("x"), 500)]
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_before_the_first_word_have_a_status_also_in_streams(
    refuse: Exception, status: int, stream: bool
) -> None:
    answer = Served(say(""), refuse=refuse).post("chat", messages=USER, stream=stream)
    assert status == answer.status_code
    assert isinstance(answer.json()["error"], str)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_prompt_that_does_not_fit_is_refused_with_numbers() -> None:
    answer = Served(say(""), n_ctx=20).post("chat", messages=USER * 3)
    assert 400 == answer.status_code
    assert {"n_prompt_tokens", "n_ctx"} <= set(answer.json())


def test_an_error_in_the_middle_is_the_last_line() -> None:
    def script(_job: Job) -> Any:
        yield Delta(text="a", tokens=(97,))
        yield RuntimeError("secret")

    lines = Served(script).lines("chat", messages=USER)
    assert "a" == lines[0]["message"]["content"]
    assert ["error"] == list(lines[-1])
    assert "secret" not in lines[-1]["error"]


def test_a_client_that_leaves_takes_its_job_along() -> None:
    async def run() -> None:
        backend = FakeBackend(say("a", before=[asyncio.Event()]))
        app = ollama.router(FakeBackends(backend), Settings())
        body = json.dumps({"messages": USER}).encode()
        gone = asyncio.Event()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            return None

        from fastapi import FastAPI

        api = FastAPI()
        api.include_router(app)
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/api/chat",
            "raw_path": b"/api/chat",
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        task = asyncio.create_task(api(scope, receive, send))  # type: ignore[arg-type]
        while not backend.tickets:
            await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait_for(task, 10)
        assert backend.tickets[0].cancelled.is_set()

    asyncio.run(run())
