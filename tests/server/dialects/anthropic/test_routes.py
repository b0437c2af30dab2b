"""The Anthropic dialect over a scripted model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from speculoe_local.server.dialects.anthropic import routes as anthropic
from speculoe_local.server.errors import QueueFull
from speculoe_local.server.jobs import Delta, Job
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import CHATML, FakeBackend, FakeBackends, Script, client_of, say

THINK = CHATML + "{# </think> enable_thinking #}"
OPENED = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
TOOL = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'


class Served:
    """A model and a client of it."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.backend = FakeBackend(script, **options)
        self.client = client_of(anthropic.router(FakeBackends(self.backend), Settings(ping_s=0)))

    def post(self, path: str = "/v1/messages", **body: Any) -> Any:
        return self.client.post(path, json={"max_tokens": 99, "messages": USER, **body})

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


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """What each event is, runs of deltas told once."""
    found: list[str] = []
    for event in events:
        kind = event.get("delta", {}).get("type") or event["type"]
        if not found or found[-1] != kind:
            found.append(kind)
    return found


def test_a_message_has_its_text_its_reason_and_its_counts() -> None:
    found = Served(say("Hello")).whole(model="some-name")
    assert [{"type": "text", "text": "Hello"}] == found["content"]
    assert ("message", "assistant", "some-name") == (found["type"], found["role"], found["model"])
    assert ("end_turn", None) == (found["stop_reason"], found["stop_sequence"])
    prompt = len("hi") + len("userassistant\n\n\n") + 3
    assert {
        "input_tokens": prompt - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 5,
    } == found["usage"]


def test_a_stream_opens_one_block_at_a_time_and_ends_with_the_reason() -> None:
    served = Served(say("<think>", "hm", "</think>", "Let me see.", *CALL), template=THINK)
    events = served.events(tools=[TOOL])
    assert [
        "message_start",
        "content_block_start",
        "thinking_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "content_block_start",
        "input_json_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ] == kinds(events)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [0, 1, 2] == [event["index"] for event in starts]
    assert "now" == starts[2]["content_block"]["name"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert {"zone": "UTC"} == json.loads("".join(d.get("partial_json", "") for d in deltas))
    assert "hm" == "".join(d.get("thinking", "") for d in deltas)
    end = events[-2]
    assert "tool_use" == end["delta"]["stop_reason"]
    assert end["usage"]["output_tokens"] > 0
    whole = served.whole(tools=[TOOL])
    assert ["thinking", "text", "tool_use"] == [block["type"] for block in whole["content"]]
    assert {"zone": "UTC"} == whole["content"][2]["input"]
    assert whole["content"][2]["id"].startswith("toolu_")


def test_an_empty_answer_still_has_a_block() -> None:
    served = Served(say(finish="length"))
    assert [{"type": "text", "text": ""}] == served.whole()["content"]
    events = served.events()
    assert "content_block_start" in kinds(events)
    assert "max_tokens" == events[-2]["delta"]["stop_reason"]


def test_a_stop_sequence_is_named() -> None:
    found = Served(say("a", stop_hit="END")).whole(stop_sequences=["END"])
    assert ("stop_sequence", "END") == (found["stop_reason"], found["stop_sequence"])


def test_a_stop_that_only_the_template_calls_for_is_the_end_of_the_turn() -> None:
    found = Served(say("a", stop_hit="<|im_end|>"), template=None).whole()
    assert ("end_turn", None) == (found["stop_reason"], found["stop_sequence"])


def test_a_call_that_was_cut_off_is_text() -> None:
    served = Served(say(CALL[:50], finish="length"))
    found = served.whole(tools=[TOOL])
    assert [{"type": "text", "text": CALL[:50]}] == found["content"]
    assert "max_tokens" == found["stop_reason"]
    assert "max_tokens" == served.events(tools=[TOOL])[-2]["delta"]["stop_reason"]


def test_blocks_become_what_the_template_knows() -> None:
    served = Served(say("ok"))
    served.whole(
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=9f3a;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            *USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "UTC"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "12:00"}],
                    },
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    assert (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "now", "arguments": '
        '{"zone": "UTC"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response>\n"
        "<tool_response>\nError: no\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    ) == served.backend.prompt()


def test_a_number_drawn_anew_does_not_change_the_prompt() -> None:
    served = Served(say("ok"))
    for nonce in ("1", "2"):
        served.whole(system=f"x-anthropic-billing-header: cch={nonce};\nBe brief.")
    assert served.backend.jobs[0].tokens == served.backend.jobs[1].tokens


def test_an_answer_that_was_begun_is_continued() -> None:
    served = Served(say("ok"))
    served.whole(messages=[*USER, {"role": "assistant", "content": "Well"}])
    assert served.backend.prompt().endswith("<|im_start|>assistant\nWell")


@pytest.mark.parametrize(
    ("choice", "grammar", "triggers"),
    [
        (None, True, True),
        ({"type": "auto"}, True, True),
        ({"type": "any"}, True, False),
        ({"type": "tool", "name": "now"}, True, False),
        ({"type": "none"}, False, False),
    ],
)
def test_a_choice_of_tools_constrains_the_answer(
    choice: Any, grammar: bool, triggers: bool
) -> None:
    served = Served(say("ok"))
    served.whole(tools=[TOOL], tool_choice=choice)
    job = served.backend.jobs[0]
    assert grammar == (job.grammar is not None)
    assert triggers == bool(job.grammar_triggers)


def test_tools_of_a_vendors_servers_are_left_out() -> None:
    served = Served(say("ok"))
    served.whole(tools=[{"type": "web_search_20250305", "name": "web_search"}, TOOL])
    assert "web_search" not in served.backend.prompt()


def test_one_call_alone_ends_the_answer_where_no_more_are_wanted() -> None:
    served = Served(say(CALL, CALL))
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = served.whole(tools=[TOOL], tool_choice=choice)
    assert ["tool_use"] == [block["type"] for block in found["content"]]
    assert served.backend.tickets[0].cancelled.is_set()
    assert "tool_use" == found["stop_reason"]


def test_reasoning_that_spends_its_budget_is_closed_and_the_answer_goes_on() -> None:
    def script(job: Job) -> Any:
        if len(served.backend.jobs) == 1:
            return say("abcd", "efgh", "ijkl", "mnop")(job)
        return say("Answer.")(job)

    served = Served(script, template=OPENED)
    found = served.whole(thinking={"type": "enabled", "budget_tokens": 8})
    assert ["abcdefgh", "Answer."] == [
        block.get("thinking") or block["text"] for block in found["content"]
    ]
    assert served.backend.prompt().endswith("<think>\nabcdefgh\n</think>\n\n")
    assert served.backend.tickets[0].cancelled.is_set()
    assert 99 - 8 == served.backend.jobs[1].max_tokens
    assert 8 + len("Answer.") == found["usage"]["output_tokens"]
    prompt = len(served.backend.jobs[0].tokens)
    assert prompt == found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"]


def test_reasoning_within_its_budget_is_left_alone() -> None:
    served = Served(say("abcd", "</think>", "ok"), template=OPENED)
    served.whole(thinking={"type": "enabled", "budget_tokens": 8})
    assert 1 == len(served.backend.jobs)


def test_a_schema_constrains_the_answer_behind_its_reasoning() -> None:
    served = Served(say("{}"), template=OPENED)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    served.whole(output_config={"format": {"type": "json_schema", "schema": schema}})
    grammar = served.backend.jobs[0].grammar
    assert grammar is not None
    assert () == served.backend.jobs[0].grammar_triggers


def test_tokens_are_counted_as_they_would_be_run() -> None:
    served = Served(say("ok"))
    answer = served.post("/v1/messages/count_tokens", tools=[TOOL], system="Be brief.")
    served.whole(tools=[TOOL], system="Be brief.")
    assert {"input_tokens": len(served.backend.jobs[0].tokens)} == answer.json()


def test_paths_without_version_and_with_queries_are_the_same() -> None:
    served = Served(say("ok"))
    assert 200 == served.post("/messages").status_code
    assert 200 == served.post("/v1/messages?beta=true").status_code


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hi"},
        {"messages": []},
        {"messages": [3]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        {"max_tokens": -1},
        {"temperature": "hot"},
        {"tools": [3]},
        {"tools": [{"input_schema": {}}]},
        {"tool_choice": {"type": "maybe"}},
        {"tool_choice": {"type": "tool"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"thinking": {"type": "enabled", "budget_tokens": "many"}},
        {"output_format": {"type": "xml"}},
        {"output_format": {"type": "json_schema"}},
        {"chat_template_kwargs": {"messages": []}},
    ],
)
def test_what_cannot_be_used_is_refused_in_the_envelope(body: dict[str, Any]) -> None:
    answer = Served(say("")).post(**body)
    assert 400 == answer.status_code, answer.text
    found = answer.json()
    assert ("error", "invalid_request_error") == (found["type"], found["error"]["type"])


def test_errors_before_the_first_word_have_a_status_also_in_streams() -> None:
    answer = Served(say(""), refuse=QueueFull(64, 3)).post(stream=True)
    assert 503 == answer.status_code
    assert "overloaded_error" == answer.json()["error"]["type"]
    assert "3" == answer.headers["retry-after"]


def test_an_error_in_the_middle_is_an_event() -> None:
    def script(_job: Job) -> Any:
        yield Delta(text="a", tokens=(97,))
        yield RuntimeError("secret")

    events = Served(script).events()
    assert "error" == events[-1]["type"]
    assert "api_error" == events[-1]["error"]["type"]
    assert "secret" not in events[-1]["error"]["message"]
