"""The anthropic package against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.conftest import Live

USER: list[Any] = [{"role": "user", "content": "What is 2+2?"}]
ADD: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(embedded_server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=embedded_server.url, api_key="none", max_retries=0) as found:
        yield found


def test_a_stream_adds_up_to_the_message(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m", "max_tokens": 10, "messages": USER, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    assert "text" == whole.content[0].type
    assert whole.content[0].text
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text == text
    assert whole.stop_reason == final.stop_reason
    assert whole.usage.output_tokens == final.usage.output_tokens
    prompts = {
        usage.input_tokens + (usage.cache_read_input_tokens or 0)
        for usage in (whole.usage, final.usage)
    }
    counted = client.messages.count_tokens(model="m", messages=USER)
    assert {counted.input_tokens} == prompts


def test_the_second_turn_finds_the_first_in_the_cache(client: anthropic.Anthropic) -> None:
    first = client.messages.create(model="m", max_tokens=4, messages=USER, extra_body=GREEDY)
    assert "text" == first.content[0].type
    again = [
        *USER,
        {"role": "assistant", "content": first.content[0].text},
        {"role": "user", "content": "And 3+3?"},
    ]
    second = client.messages.create(model="m", max_tokens=2, messages=again, extra_body=GREEDY)
    assert (second.usage.cache_read_input_tokens or 0) > 20


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_that_must_be_called_is_called_with_what_its_schema_asks_for(
    client: anthropic.Anthropic, streamed: bool
) -> None:
    asked: Any = {
        "model": "m",
        "max_tokens": 120,
        "messages": [{"role": "user", "content": "Add 2 and 3."}],
        "tools": [ADD],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "extra_body": GREEDY,
    }
    if streamed:
        with client.messages.stream(**asked) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**asked)
    assert ["tool_use"] == [block.type for block in message.content]
    call: Any = message.content[0]
    assert ("add", {"a": int, "b": int}) == (
        call.name,
        {key: type(value) for key, value in call.input.items()},
    )
    assert "tool_use" == message.stop_reason


def test_a_stop_sequence_ends_the_message_and_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="m",
        max_tokens=40,
        messages=[*USER, {"role": "assistant", "content": "1 2 3 4 5"}],
        stop_sequences=["8"],
        extra_body=GREEDY,
    )
    assert ("stop_sequence", "8") == (message.stop_reason, message.stop_sequence)
    assert "text" == message.content[0].type
    assert "8" not in message.content[0].text


def test_errors_have_the_classes_that_clients_know(client: anthropic.Anthropic) -> None:
    long = "word " * 3000
    with pytest.raises(anthropic.BadRequestError, match="2048") as caught:
        client.messages.create(
            model="m", max_tokens=4, messages=[{"role": "user", "content": long}]
        )
    body: Any = caught.value.body
    assert "invalid_request_error" == body["error"]["type"]
    assert 2048 == body["error"]["n_ctx"]


def test_requests_as_a_coding_agent_sends_them(embedded_server: Live) -> None:
    with embedded_server.client() as http:
        assert 200 == http.head("/").status_code
        body = {
            "model": "some-model-20990101",
            "max_tokens": 4,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
            "thinking": {"type": "adaptive"},
            "stream": True,
        }
        found: httpx.Response = http.post(
            "/v1/messages?beta=true",
            json=body,
            headers={"anthropic-version": "2023-06-01", "anthropic-beta": "x-1,y-2"},
        )
    assert 200 == found.status_code
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.text.rstrip().endswith('data: {"type":"message_stop"}')
    assert "some-model-20990101" in found.text
