"""The openai package, and llama-server's clients, against live servers."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import Live

USER: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    """What an answer must look like."""

    coastal: bool
    climate: Literal["cold", "mild", "hot"]


@pytest.fixture(scope="module")
def client(embedded_server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0
    ) as found:
        yield found


@pytest.fixture(scope="module")
def tiny(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "m", "messages": USER, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "assistant" == chunks[0].choices[0].delta.role
    assert text == "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole.usage is not None
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage.completion_tokens == usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_a_forced_call_has_valid_arguments(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "What is 2+3?"}],
        "tools": [ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 60,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert "tool_calls" == choice.finish_reason
    (call,) = choice.message.tool_calls or ()
    assert "add" == call.function.name
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls or ()
    assert call.function.arguments == streamed.function.arguments
    # The result goes back, and is answered.
    done = client.chat.completions.create(
        model="m",
        messages=[
            *asked["messages"],
            choice.message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ],
        tools=[ADD],
        temperature=0,
        max_tokens=4,
    )
    assert done.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_an_answer_parses_as_the_class_it_was_asked_as(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": "Describe Oslo as JSON."}],
        response_format=City,
        temperature=0,
        max_tokens=60,
    )
    city = parsed.choices[0].message.parsed
    assert isinstance(city, City)


def test_responses_answer_stream_and_parse(client: openai.OpenAI) -> None:
    asked: Any = {"model": "m", "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=24)
    assert "Paris" in whole.output_text
    with client.responses.stream(**asked, max_output_tokens=24) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert whole.output_text == final.output_text
    assert "response.output_text.delta" in kinds
    parsed = client.responses.parse(**asked, text_format=City, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, City)


def test_echoed_scores_are_those_of_the_answer_itself(tiny: openai.OpenAI, live: Live) -> None:
    body = {"prompt": [10, 20, 30], "n_predict": 4, "temperature": 0, "ignore_eos": True}
    answer = live.post("/completion", {**body, "return_tokens": True, "n_probs": 1}).json()
    said = [each["logprob"] for each in answer["completion_probabilities"]]
    prompt = [*body["prompt"], *answer["tokens"]]
    echoed = tiny.completions.create(
        model="m", prompt=[prompt, [10, 20]], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    scores, others = (choice.logprobs for choice in echoed.choices)
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.top_logprobs is not None
    assert scores.token_logprobs[0] is None
    assert np.allclose(said, scores.token_logprobs[3:7], atol=2e-2)
    for logprob, best in zip(scores.token_logprobs[3:7], scores.top_logprobs[3:7], strict=True):
        assert logprob == max(best.values())
    assert others is not None
    assert others.token_logprobs is not None
    assert np.allclose(scores.token_logprobs[1:2], others.token_logprobs[1:2], atol=2e-2)


def test_an_echo_that_ends_at_once_has_a_score_for_its_end(tiny: openai.OpenAI, live: Live) -> None:
    """lm-eval drops the last score as the answer's: without one it would drop the prompt's last token."""
    (end,) = live.post("/tokenize", {"content": "<|im_end|>"}).json()["tokens"]
    echoed = tiny.completions.create(
        model="m",
        prompt=[10, 20, 30],
        max_tokens=1,
        echo=True,
        logprobs=1,
        logit_bias={str(end): 100},
    )
    (choice,) = echoed.choices
    assert ("stop", 1) == (choice.finish_reason, echoed.usage and echoed.usage.completion_tokens)
    assert choice.logprobs is not None
    assert "<|im_end|>" == (choice.logprobs.tokens or [])[-1]
    assert [4] * 3 == [
        len(each or ())
        for each in (
            choice.logprobs.tokens,
            choice.logprobs.token_logprobs,
            choice.logprobs.top_logprobs,
        )
    ]
    assert "<|im_end|>" not in choice.text


def test_embeddings_are_decoded_by_the_client(tiny: openai.OpenAI) -> None:
    found = tiny.embeddings.create(model="m", input=["hello", "hello", "other words"])
    one, same, other = (np.array(each.embedding) for each in found.data)
    assert abs(float(np.linalg.norm(one)) - 1) < 1e-5
    assert np.allclose(one, same, atol=1e-4)
    assert not np.allclose(one, other, atol=1e-2)
    plain = tiny.embeddings.create(model="m", input="hello", encoding_format="float")
    assert np.allclose(one, plain.data[0].embedding, atol=1e-4)


def test_models_are_listed(tiny: openai.OpenAI) -> None:
    (model,) = tiny.models.list()
    assert "tiny" == model.id
    assert model.id == tiny.models.retrieve("tiny").id


def test_errors_are_the_clients_own(tiny: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.completions.create(model="m", prompt=[5] * 600)
    body: Any = caught.value.body
    assert (600, 512) == (body["n_prompt_tokens"], body["n_ctx"])
    with pytest.raises(openai.BadRequestError):
        tiny.chat.completions.create(
            model="m",
            messages=USER,
            stream=True,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"not": {}}},
            },
        )


def test_grammars_hold_whatever_a_random_model_wants(tiny: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    done = 0
    for seed in range(6):
        answer = tiny.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "go"}],
            seed=seed,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        ).choices[0]
        if "stop" == answer.finish_reason:
            done += 1
            jsonschema.validate(json.loads(answer.message.content or ""), schema)
    assert done


def test_a_grammar_of_ones_own_is_followed(live: Live) -> None:
    body = {"prompt": "x", "grammar": 'root ::= "ab"{3}', "n_predict": 20}
    answer = live.post("/completion", body).json()
    assert ("ababab", "eos") == (answer["content"], answer["stop_type"])


def test_choices_of_one_seed_differ_and_repeat(tiny: openai.OpenAI) -> None:
    def ask() -> list[str]:
        found = tiny.completions.create(
            model="m", prompt="go", n=2, seed=5, max_tokens=8, temperature=1
        )
        return [choice.text for choice in found.choices]

    first = ask()
    assert first[0] != first[1]
    assert first == ask()


def test_a_client_that_leaves_ends_its_answer(embedded_server: Live) -> None:
    """The answer would take thousands of tokens: whoever sees it ended saw it cancelled."""
    served = embedded_server
    body = {"prompt": "go", "n_predict": 100_000, "ignore_eos": True, "stream": True}

    def cancelled() -> int:
        return served.models.loaded()[0].snapshot().finished["cancel"]

    before = cancelled()
    with served.client() as client, client.stream("POST", "/completion", json=body) as answer:
        next(answer.iter_lines())
    _until(lambda: cancelled() == before + 1)
    # Also one that waits for its answer whole.
    with served.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("/completion", json={**body, "stream": False}, timeout=0.2)
    _until(lambda: cancelled() == before + 2)
    assert not any(slot["is_processing"] for slot in served.get("/slots").json())


def _until(holds: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_answers_of_many_at_once_are_those_of_each_alone(live: Live) -> None:
    bodies = [
        {
            "prompt": f"prompt {i} " * (1 + i % 3),
            "n_predict": 12,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(6)
    ]
    alone = [live.post("/completion", body).json()["content"] for body in bodies]
    together: dict[int, str] = {}

    def ask(i: int) -> None:
        together[i] = live.post("/completion", bodies[i]).json()["content"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone == [together[i] for i in range(len(bodies))]


def test_the_vim_plugins_requests_are_served(live: Live) -> None:
    """A tiny model has no tokens for it: that is said, in the plugin's own request."""
    body = {
        "id_slot": 0,
        "input_prefix": "def f():\n",
        "input_suffix": "\n",
        "input_extra": [],
        "prompt": "    ",
        "n_predict": 0,
        "samplers": [],
        "response_fields": [""],
        "model": "",
    }
    host = live.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)  # httpx refuses to send this header
    connection.request("POST", "/infill", json.dumps(body), {"Authorization": "Bearer "})
    answer = connection.getresponse()
    assert 501 == answer.status
    assert "not_supported_error" == json.loads(answer.read())["error"]["type"]
    connection.close()


def test_completion_probabilities_are_log_probabilities(live: Live) -> None:
    body = {"prompt": "go", "n_predict": 3, "n_probs": 300, "temperature": 0}
    for each in live.post("/completion", body).json()["completion_probabilities"]:
        total = sum(math.exp(top["logprob"]) for top in each["top_logprobs"])
        assert 0.99 < total < 1.001
        assert each["logprob"] == each["top_logprobs"][0]["logprob"]


def test_a_live_server_says_what_it_is(live: Live) -> None:
    props = live.get("/props").json()
    assert ("exact", 512) == (props["mode"], props["default_generation_settings"]["n_ctx"])
    assert {"status": "ok"} == live.get("/health").json()
    text = "héllo wörld <|im_end|>"
    tokens = live.post("/tokenize", {"content": text}).json()["tokens"]
    assert text == live.post("/detokenize", {"tokens": tokens}).json()["content"]
