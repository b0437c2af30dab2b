"""What clients send as messages and tools, and what templates get."""

from __future__ import annotations

from typing import Any

import pytest

from speculoe_local.server.errors import BadRequest
from speculoe_local.server.prompt.messages import (
    arrangements,
    functions,
    normalise,
    parse_arguments,
    text_of,
)
from speculoe_local.server.toolcalls.formats import FORMATS, format_of

CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def plain(
    messages: Any, *, template: str = "", form: str = "hermes", tools: Any = ()
) -> list[dict[str, Any]]:
    return normalise(messages, template=template, form=FORMATS[form], tools=tools)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "a\nb\nc"),
        ([{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "something new"}], ""),
    ],
)
def test_content_is_text_whatever_its_form(content: Any, text: str) -> None:
    assert text == text_of(content, "content")


@pytest.mark.parametrize("content", [3, {"text": "a"}, [3], [{"type": "image_url"}]])
def test_content_that_cannot_be_read_is_refused(content: Any) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\]\.content"):
        plain([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "messages",
    [None, "hi", [], ["hi"], [{}], [{"role": ""}], [{"role": "assistant", "tool_calls": [{}]}]],
)
def test_messages_that_are_none_are_refused(messages: Any) -> None:
    with pytest.raises(BadRequest):
        plain(messages)


def test_a_developer_speaks_as_system_unless_the_template_knows_the_role() -> None:
    message = {"role": "developer", "content": "x"}
    assert "system" == plain([message])[0]["role"]
    assert "developer" == plain([message], template="role == 'developer'")[0]["role"]


def test_empty_lists_of_calls_are_no_calls() -> None:
    found = plain(
        [{"role": "assistant", "content": "x", "tool_calls": calls} for calls in ([], None)]
    )
    assert [{"role": "assistant", "content": "x"}] * 2 == found


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_earlier_answers_has_one_name(key: str) -> None:
    found = plain([{"role": "assistant", "content": "x", key: "r"}])
    assert "r" == found[0]["reasoning_content"]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("null", {}),
        ("{bad", {"raw_arguments": "{bad"}),
        ("[1]", {"raw_arguments": [1]}),
        ("[" * 100_000, {"raw_arguments": "[" * 100_000}),
    ],
)
def test_arguments_of_earlier_calls_are_an_object(arguments: Any, found: dict[str, Any]) -> None:
    assert found == parse_arguments(arguments)


def test_a_result_gets_the_name_of_its_function() -> None:
    found = plain(
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        ]
    )
    assert "now" == found[1]["name"]
    assert {"zone": "UTC"} == found[0]["tool_calls"][0]["function"]["arguments"]


def test_harmony_gets_one_call_per_message_each_with_its_result() -> None:
    other = {**CALL, "id": "c2"}
    found = plain(
        [
            {"role": "assistant", "content": "w", "reasoning": "r", "tool_calls": [CALL, other]},
            {"role": "tool", "tool_call_id": "c2", "content": "second"},
            {"role": "tool", "tool_call_id": "c1", "content": "first"},
            {"role": "assistant", "content": "done", "reasoning": "r2"},
        ],
        form="harmony",
    )
    assert ["assistant", "tool", "assistant", "tool", "assistant"] == [m["role"] for m in found]
    assert ["first", "second"] == [m["content"] for m in found if m["role"] == "tool"]
    assert ["r\n\nw", None, "r2"] == [m.get("thinking") for m in found if m["role"] != "tool"]
    assert "" == found[0]["content"]


def test_where_a_template_knows_no_functions_all_is_said_in_words() -> None:
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        {"role": "tool", "tool_call_id": "c2", "content": "13:00"},
    ]
    found = normalise(messages, template="", form=format_of(None), tools=[TOOL])
    assert ["system", "user", "assistant", "user"] == [m["role"] for m in found]
    assert '"name": "now"' in found[0]["content"]
    assert (
        '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
        == (found[2]["content"])
    )
    assert (
        "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n13:00\n</tool_response>"
        == found[3]["content"]
    )
    assert all({"role", "content"} >= set(m) for m in found)


def test_the_systems_words_and_the_tools_share_one_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]
    found = normalise(messages, template="", form=format_of(None), tools=[TOOL])
    assert 2 == len(found)
    assert found[0]["content"].startswith("Be brief.\n\n")


def test_functions_are_found_in_either_form_and_other_tools_left_out() -> None:
    found, skipped = functions(
        [
            TOOL,
            {"type": "function", "name": "flat", "parameters": None},
            {"type": "web_search"},
            {"name": "bare"},
        ]
    )
    assert ["now", "flat", "bare"] == [tool["function"]["name"] for tool in found]
    assert ["web_search"] == skipped
    assert {"type": "object", "properties": {}} == found[1]["function"]["parameters"]


@pytest.mark.parametrize(
    "tools", ["x", [3], [{"type": "function"}], [{"name": "a", "parameters": []}]]
)
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(BadRequest, match="tools"):
        functions(tools)


def test_no_tools_are_no_tools() -> None:
    assert ([], []) == functions(None) == functions([])


def test_a_template_that_refuses_is_offered_one_system_message_then_none() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "s1"},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "s2"},
    ]
    first, second = arrangements(messages)
    assert ["system", "user", "user"] == [m["role"] for m in first]
    assert "s1\n\ns2" == first[0]["content"]
    assert [{"role": "user", "content": "s1\n\ns2\n\na\n\nb"}] == second


def test_nothing_else_is_offered_where_nothing_can_be_rearranged() -> None:
    assert [] == list(arrangements([{"role": "user", "content": "a"}]))
