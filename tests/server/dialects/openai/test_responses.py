"""/v1/responses over a scripted model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from speculoe_local.server.dialects.openai import responses
from speculoe_local.server.dialects.openai.responses import messages_of
from speculoe_local.server.jobs import Delta, Job
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import CHATML, FakeBackend, FakeBackends, Script, client_of, say

THINK = CHATML + "{# </think> enable_thinking #}"
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PATH = "/v1/responses"


class Served:
    """A model and a client of it."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.backend = FakeBackend(script, **options)
        self.client = client_of(responses.router(FakeBackends(self.backend), Settings(ping_s=0)))

    def post(self, path: str = PATH, **body: Any) -> Any:
        return self.client.post(path, json={"input": "hi", **body})

    def whole(self, **body: Any) -> dict[str, Any]:
        answer = self.post(**body)
        assert 200 == answer.status_code, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def events(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.post(stream=True, **body)
        assert 200 == answer.status_code, answer.text
        found = []
        for frame in answer.text.split("\n\n"):
            if frame:
                name, data = frame.split("\n")
                found.append(json.loads(data.removeprefix("data: ")))
                assert found[-1]["type"] == name.removeprefix("event: ")
        return found

    @property
    def job(self) -> Job:
        return self.backend.jobs[-1]


def test_an_answer_is_a_message_with_usage() -> None:
    served = Served(say("Hel", "lo"))
    answer = served.whole(model="m", instructions="Be brief.", max_output_tokens=9)
    assert ("response", "completed", "m") == (
        answer["object"],
        answer["status"],
        answer["model"],
    )
    (item,) = answer["output"]
    assert ("message", "completed") == (item["type"], item["status"])
    assert "Hello" == item["content"][0]["text"]
    usage = answer["usage"]
    assert len(served.job.tokens) == usage["input_tokens"]
    assert (1, 5, 0) == (
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
    )
    assert 9 == served.job.max_tokens
    assert served.backend.prompt().startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_events_come_in_order_and_number_themselves() -> None:
    events = Served(say("Hel", "lo")).events()
    assert [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ] == [event["type"] for event in events]
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    assert "Hello" == events[6]["text"]
    assert [] == events[2]["item"]["content"]
    assert "in_progress" == events[2]["item"]["status"]
    assert events[8]["item"] == events[9]["response"]["output"][0]


def test_reasoning_and_calls_are_items_that_do_not_overlap() -> None:
    served = Served(say("<think>\nhm</think>\n\nLet me see.\n", CALL, CALL), template=THINK)
    answer = served.whole(tools=[NOW])
    assert ["reasoning", "message", "function_call", "function_call"] == [
        item["type"] for item in answer["output"]
    ]
    assert "hm" == answer["output"][0]["content"][0]["text"]
    calls = answer["output"][2:]
    assert 2 == len({call["call_id"] for call in calls})
    assert {} == json.loads(calls[0]["arguments"])
    events = served.events(tools=[NOW])
    open_item: int | None = None
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_item is None
            open_item = event["output_index"]
        elif event["type"] == "response.output_item.done":
            assert open_item == event["output_index"]
            open_item = None
        elif "output_index" in event:
            assert open_item == event["output_index"]
    arguments = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert ["{}", "{}"] == [event["arguments"] for event in arguments]


def test_an_answer_cut_off_is_incomplete() -> None:
    answer = Served(say("Hel", finish="length")).whole()
    assert "incomplete" == answer["status"]
    assert {"reason": "max_output_tokens"} == answer["incomplete_details"]
    events = Served(say("Hel", finish="length")).events()
    assert "response.incomplete" == events[-1]["type"]


def test_a_call_cut_off_is_text_and_no_call() -> None:
    answer = Served(say(CALL[:-25], finish="length")).whole(tools=[NOW])
    assert ["message"] == [item["type"] for item in answer["output"]]
    assert "now" in answer["output"][0]["content"][0]["text"]


def test_nothing_said_is_an_empty_message() -> None:
    answer = Served(say()).whole()
    assert "" == answer["output"][0]["content"][0]["text"]


def test_tools_that_only_vendors_run_are_left_out() -> None:
    served = Served(say("x"))
    tools = [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": []},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "image_generation"},
        NOW,
    ]
    served.whole(tools=tools)
    assert "now" in served.backend.prompt()
    assert "apply_patch" not in served.backend.prompt()


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "R"}], "content": None},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "not json"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"text": "2"}]},
        {"type": "web_search_call", "id": "w"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    ]
    messages = messages_of(items, "I")
    assert ["system", "developer", "user", "assistant", "tool", "tool", "assistant"] == [
        message["role"] for message in messages
    ]
    assert ["c1", "c2"] == [call["id"] for call in messages[3]["tool_calls"]]
    assert "R" == messages[3]["reasoning_content"]
    assert ["1", "2"] == [message["content"] for message in messages[4:6]]


@pytest.mark.parametrize(
    "body",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [5]},
        {"input": []},
        {"input": None},
        {"max_output_tokens": 0},
        {"tool_choice": "perhaps"},
        {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
    ],
)
def test_what_cannot_be_done_is_a_400(body: dict[str, Any]) -> None:
    answer = Served(say("x")).post(**body)
    assert 400 == answer.status_code, answer.text
    assert "invalid_request_error" == answer.json()["error"]["type"]


def test_a_text_format_constrains_the_answer() -> None:
    served = Served(say("true"))
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "boolean"}}
    answer = served.whole(text={"format": form})
    assert served.job.grammar is not None
    assert form == answer["text"]["format"]


def test_an_error_in_a_stream_is_its_last_event() -> None:
    events = Served(lambda _job: [Delta(text="a", tokens=(97,)), RuntimeError("x")]).events()
    assert "error" == events[-1]["type"]
    assert 500 == events[-1]["code"]


def test_logprobs_come_with_the_text() -> None:
    served = Served(say("ab"))
    answer = served.whole(include=["message.output_text.logprobs"], top_logprobs=1)
    assert 2 == len(answer["output"][0]["content"][0]["logprobs"])


def test_tokens_can_be_counted_without_an_answer() -> None:
    served = Served(say("x"))
    answer = served.post(f"{PATH}/input_tokens").json()
    served.whole()
    assert len(served.job.tokens) == answer["input_tokens"]
