"""Completions and embeddings of the OpenAI dialect over a scripted model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from speculoe_local.server.dialects.openai import completions, embeddings
from speculoe_local.server.errors import QueueFull
from speculoe_local.server.jobs import Delta, Job, Timings, TokenLogprob
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import (
    FakeBackend,
    FakeBackends,
    FakeTicket,
    Script,
    Step,
    client_of,
    echo_prompt,
    embed,
    say,
)

PATH = "/v1/completions"


class Served:
    """A model and a client of it."""

    def __init__(self, script: Script, backend: FakeBackend | None = None, **options: Any) -> None:
        self.backend = backend or FakeBackend(script, **options)
        backends = FakeBackends(self.backend)
        settings = Settings(ping_s=0)
        self.client = client_of(
            completions.router(backends, settings), embeddings.router(backends, settings)
        )

    def post(self, path: str = PATH, **body: Any) -> Any:
        return self.client.post(path, json=body)

    def whole(self, path: str = PATH, **body: Any) -> dict[str, Any]:
        answer = self.post(path, **body)
        assert 200 == answer.status_code, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def chunks(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(stream=True, **body)
        assert 200 == answer.status_code, answer.text
        frames = [frame for frame in answer.text.split("\n\n") if frame]
        assert "data: [DONE]" == frames[-1]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


def test_a_text_is_continued() -> None:
    answer = Served(say(" you", "!")).whole(prompt="how are", max_tokens=5)
    assert [{"index": 0, "text": " you!", "logprobs": None, "finish_reason": "stop"}] == answer[
        "choices"
    ]
    assert "text_completion" == answer["object"]
    assert answer["id"]
    assert 7 == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        ([[97, "b"], "c"], ["ab", "c"]),
    ],
)
def test_prompts_are_texts_or_tokens_or_lists_of_them(prompt: Any, texts: list[str]) -> None:
    choices = Served(echo_prompt).whole(prompt=prompt)["choices"]
    assert texts == [choice["text"] for choice in choices]
    assert list(range(len(texts))) == [choice["index"] for choice in choices]


def test_choices_of_a_prompt_follow_each_other() -> None:
    choices = Served(echo_prompt).whole(prompt=["a", "b"], n=2)["choices"]
    assert ["a", "a", "b", "b"] == [choice["text"] for choice in choices]


def test_an_echo_is_scored_token_by_token() -> None:
    served = Served(say("!"))
    choice = served.whole(prompt="aé", max_tokens=1, echo=True, logprobs=2)["choices"][0]
    assert "aé!" == choice["text"]
    scores = choice["logprobs"]
    assert ["a", "bytes:\\xc3", "bytes:\\xa9", "!"] == scores["tokens"]
    assert [None, -0.5, -0.5, -0.5] == scores["token_logprobs"]
    assert scores["top_logprobs"][0] is None
    assert {"!": -0.5, '"': -1.5} == scores["top_logprobs"][3]
    assert [0, 1, 1, 2] == scores["text_offset"]
    assert served.backend.jobs[0].echo_logprobs


def test_a_prompt_can_be_scored_without_an_answer() -> None:
    def script(job: Job) -> Iterable[Step]:
        assert 0 == job.max_tokens
        yield from say(finish="length")(job)

    choice = Served(script).whole(prompt=[97, 98], max_tokens=0, echo=True, logprobs=0)
    scores = choice["choices"][0]["logprobs"]
    assert "ab" == choice["choices"][0]["text"]
    assert [None, -0.5] == scores["token_logprobs"]
    assert [None, {}] == scores["top_logprobs"]


def test_a_begin_of_text_that_nobody_wrote_takes_no_place() -> None:
    backend = FakeBackend(say("!"))
    type(backend.vocab).adds_bos = True
    try:
        scores = Served(say("!"), backend).whole(prompt="ab", echo=True, logprobs=1)
    finally:
        type(backend.vocab).adds_bos = False
    choice = scores["choices"][0]
    assert "ab!" == choice["text"]
    assert ["<bos>", "a", "b", "!"] == choice["logprobs"]["tokens"]
    assert [0, 0, 1, 2] == choice["logprobs"]["text_offset"]


def test_a_stream_adds_up_to_the_whole() -> None:
    served = Served(say("x", "yz"))
    body: dict[str, Any] = {"prompt": ["a", "b"], "echo": True, "logprobs": 1}
    whole = served.whole(**body)["choices"]
    chunks = served.chunks(**body, stream_options={"include_usage": True})
    for place, choice in enumerate(whole):
        parts = [c["choices"][0] for c in chunks if c["choices"]]
        mine = [part for part in parts if part["index"] == place]
        assert choice["text"] == "".join(part["text"] for part in mine)
        assert [choice["finish_reason"]] == [p["finish_reason"] for p in mine if p["finish_reason"]]
        for key in ("tokens", "text_offset", "token_logprobs"):
            assert choice["logprobs"][key] == [v for p in mine for v in p["logprobs"][key]]
    assert [] == chunks[-1]["choices"]
    assert 6 == chunks[-1]["usage"]["completion_tokens"]


def test_the_best_of_several_is_the_likeliest() -> None:
    def script(job: Job) -> Iterable[Step]:
        token = job.sampling.seed or 0
        likely = TokenLogprob(token, b"?", -1.0 if token == 50 else -2.0)
        yield Delta(text=chr(token), tokens=(token,), logprobs=(likely,), timings=Timings())
        yield Delta(finish="stop", timings=Timings(predicted_n=1))

    served = Served(script)
    answer = served.whole(prompt="a", n=1, best_of=3, seed=49)
    assert ["2"] == [choice["text"] for choice in answer["choices"]]
    assert 3 == len(served.backend.jobs)
    assert answer["choices"][0]["logprobs"] is None
    assert 400 == served.post(prompt="a", best_of=2, stream=True).status_code


def test_a_suffix_makes_it_fill_the_middle() -> None:
    served = Served(say("x"))
    served.whole(prompt="def f(", suffix="):")
    assert "<fim_pre>def f(<fim_suf>):<fim_mid>" == served.backend.prompt()
    without = Served(say("x"), fim=False).post(prompt="a", suffix="b")
    assert 501 == without.status_code
    assert "not_supported_error" == without.json()["error"]["type"]


def test_many_prompts_do_not_fill_the_queue() -> None:
    class Narrow(FakeBackend):
        """Takes two jobs at a time, fewer than run at once."""

        async def submit(self, job: Job) -> FakeTicket:
            busy = sum(1 for ticket in self.tickets if not ticket.played)
            if busy >= 2:
                raise QueueFull(busy, 1)
            return await super().submit(job)

    served = Served(echo_prompt, Narrow(echo_prompt))
    texts = [chr(97 + i % 26) for i in range(12)]
    choices = served.whole(prompt=texts)["choices"]
    assert texts == [choice["text"] for choice in choices]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": [99999]},
        {"prompt": [-1]},
        {"prompt": [{}]},
        {"prompt": [True]},
        {"prompt": "a", "logprobs": -1},
        {"prompt": "a", "max_tokens": "many"},
        {"prompt": ["a"], "suffix": "b"},
    ],
)
def test_a_wrong_field_is_a_400(body: dict[str, Any]) -> None:
    answer = Served(say("x")).post(**body)
    assert 400 == answer.status_code, answer.text
    assert "invalid_request_error" == answer.json()["error"]["type"]


def test_one_prompt_too_long_among_many_is_refused_before_any_runs() -> None:
    served = Served(echo_prompt, n_ctx=8)
    answer = served.post(prompt=["a", "b" * 9], stream=True)
    assert 400 == answer.status_code
    assert (9, 8) == tuple(answer.json()["error"][k] for k in ("n_prompt_tokens", "n_ctx"))
    assert not served.backend.jobs


def test_embeddings_are_floats_or_base64_of_them() -> None:
    served = Served(embed)
    path = "/v1/embeddings"
    answer = served.whole(path, input=["ab", "c"], model="m")
    assert ["list", "m", 3] == [answer["object"], answer["model"], answer["usage"]["total_tokens"]]
    first = np.array(answer["data"][0]["embedding"], np.float32)
    assert abs(float(np.linalg.norm(first)) - 1) < 1e-6
    packed = served.whole(path, input="ab", encoding_format="base64")["data"][0]["embedding"]
    assert first.tolist() == np.frombuffer(base64.b64decode(packed), "<f4").tolist()
    assert all(job.embeddings for job in served.backend.jobs)


def test_shorter_embeddings_have_unit_length_again() -> None:
    served = Served(embed)
    vector = served.whole("/v1/embeddings", input="ab", dimensions=2)["data"][0]["embedding"]
    assert 2 == len(vector)
    assert abs(sum(v * v for v in vector) - 1) < 1e-6
    assert 400 == served.post("/v1/embeddings", input="ab", dimensions=5).status_code


def test_llama_servers_own_embeddings_are_lists_of_rows() -> None:
    found = Served(embed).post("/embedding", content="ab").json()
    assert 0 == found[0]["index"]
    assert 4 == len(found[0]["embedding"][0])


@pytest.mark.parametrize(
    "given", [{}, {"input": []}, {"input": [None]}, {"input": "a", "encoding_format": "int"}]
)
def test_an_input_that_is_none_is_a_400(given: dict[str, Any]) -> None:
    assert 400 == Served(embed).post("/v1/embeddings", **given).status_code
