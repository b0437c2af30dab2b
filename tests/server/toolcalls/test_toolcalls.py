"""Answers as models write them, cut at every place: the same content, reasoning and calls each time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculoe_local.server.toolcalls import (
    CallArguments,
    CallEnd,
    CallStart,
    Collected,
    Content,
    Event,
    Parser,
    Reasoning,
    collect,
)
from speculoe_local.server.toolcalls.formats import FORMATS, format_of, make_parser
from speculoe_local.server.toolcalls.thinking import TAGS

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "where": {"type": "object"},
        "tags": {"type": ["array", "null"]},
        "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
}
TOOLS: dict[str, Any] = {"weather": WEATHER, "now": {}, "write": {"properties": {}}}


@dataclass(frozen=True)
class Case:
    """What a model wrote, and what it comes to; calls as (name, arguments)."""

    form: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    inside: bool = False


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CASES = {
    "plain text": Case("hermes", "Hello, world.\n", "Hello, world.\n"),
    "leading space stays": Case("hermes", " Hello", " Hello"),
    "one call": Case(
        "hermes", hermes("weather", '{"city": "Köln"}'), calls=[("weather", {"city": "Köln"})]
    ),
    "text, then two calls": Case(
        "hermes",
        f"Let me see.\n\n{hermes('weather', '{}')}\n{hermes('now', '{}')}\n",
        "Let me see.",
        calls=[("weather", {}), ("now", {})],
    ),
    "text between and after calls": Case(
        "hermes",
        f"a {hermes('now', '{}')} b {hermes('now', '{}')} c",
        "a\nb\nc",
        "",
        [("now", {})] * 2,
    ),
    "reasoning, then a call": Case(
        "hermes",
        f"<think>\nFirst\nthe weather.\n</think>\n\n{hermes('now', '{}')}",
        reasoning="First\nthe weather.",
        calls=[("now", {})],
    ),
    "reasoning the prompt has opened": Case(
        "hermes", "thinking\n</think>\n\nDone.", "Done.", "thinking", inside=True
    ),
    "empty reasoning": Case("hermes", "<think>\n\n</think>\n\nDone.", "Done."),
    "reasoning that never ends": Case("hermes", "<think>on and on ", "", "on and on"),
    "a tag inside text is text": Case("hermes", "Use <think> to think.", "Use <think> to think."),
    "a call inside reasoning that goes on": Case(
        "hermes",
        f"<think>maybe {hermes('now', '{}')}?</think>No.",
        "No.",
        f"maybe {hermes('now', '{}')}?",
    ),
    "a call ends reasoning that was not closed": Case(
        "hermes", f"<think>so I call\n{hermes('now', '{}')}", "", "so I call", [("now", {})]
    ),
    "arguments before the name": Case(
        "hermes",
        '<tool_call>{"arguments": {"a": [1, "}"]}, "name": "now"}</tool_call>',
        calls=[("now", {"a": [1, "}"]})],
    ),
    "arguments in a string": Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
        calls=[("now", {"a": 1})],
    ),
    "no arguments, other keys": Case(
        "hermes",
        '<tool_call>{"id": 7, "x": [{}], "name": "now", "y": null}</tool_call>',
        calls=[("now", {})],
    ),
    "null arguments": Case("hermes", hermes("now", "null"), calls=[("now", {})]),
    "parameters as key": Case(
        "hermes",
        '<tool_call>{"name": "now", "parameters": {"a": 1}}</tool_call>',
        calls=[("now", {"a": 1})],
    ),
    "a brace too many": Case("hermes", hermes("now", '{"a": 1}}'), calls=[("now", {"a": 1})]),
    "no closing tag": Case(
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}}', calls=[("now", {"a": 1})]
    ),
    "no closing brace either": Case(
        "hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}', calls=[("now", {"a": 1})]
    ),
    "line breaks inside a string": Case(
        "hermes", hermes("write", '{"text": "a\n\tb"}'), calls=[("write", {"text": "a\n\tb"})]
    ),
    "escapes in strings": Case(
        "hermes",
        hermes("write", r'{"text": "q\" \\ é ​</tool_call>"}'),
        calls=[("write", {"text": 'q" \\ é ​</tool_call>'})],
    ),
    "a list of calls": Case(
        "hermes",
        '<tool_call>[{"name": "now"}, {"name": "weather", "arguments": {"days": 2}}]</tool_call>',
        calls=[("now", {}), ("weather", {"days": 2})],
    ),
    "talk about the tag": Case("hermes", "A <tool_call> is a tag.", "A <tool_call> is a tag."),
    "not JSON": Case("hermes", "<tool_call>now()</tool_call>", "<tool_call>now()</tool_call>"),
    "single quotes": Case(
        "hermes",
        "<tool_call>{'name': 'now'}</tool_call> ok",
        "<tool_call>{'name': 'now'}</tool_call> ok",
    ),
    "cut off within the arguments": Case(
        "hermes",
        'On it. <tool_call>{"name": "now", "arguments": {"a": "b',
        'On it.\n<tool_call>{"name": "now", "arguments": {"a": "b',
    ),
    "cut off within the tag": Case("hermes", "see <tool_ca", "see <tool_ca"),
    "arguments go astray": Case(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {a: 1}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {a: 1}}',
    ),
    "coder: types by schema": Case(
        "qwen3-coder",
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew\nYork\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        "<parameter=where>\n{'x': 1}\n</parameter>\n<parameter=tags>\nnull\n</parameter>\n"
        "<parameter=limit>\n2.5\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        calls=[
            (
                "weather",
                {
                    "city": "New\nYork",
                    "days": 3,
                    "exact": True,
                    "where": {"x": 1},
                    "tags": None,
                    "limit": 2.5,
                },
            )
        ],
    ),
    "coder: a string that looks like a number": Case(
        "qwen3-coder",
        "<tool_call><function=weather><parameter=city>\n007\n</parameter></function></tool_call>",
        calls=[("weather", {"city": "007"})],
    ),
    "coder: what does not fit stays text": Case(
        "qwen3-coder",
        "<tool_call><function=weather><parameter=days>\nmany\n</parameter></function></tool_call>",
        calls=[("weather", {"days": "many"})],
    ),
    "coder: an unknown parameter": Case(
        "qwen3-coder",
        "<tool_call><function=write><parameter=n>5</parameter><parameter=s>a b</parameter>"
        "</function></tool_call>",
        calls=[("write", {"n": 5, "s": "a b"})],
    ),
    "coder: no parameters": Case(
        "qwen3-coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=[("now", {})],
    ),
    "coder: no outer tag": Case(
        "qwen3-coder",
        "<function=now>\n</function>\n</tool_call>",
        calls=[("now", {})],
    ),
    "coder: a value not closed": Case(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n<parameter=days>\n1\n</function>\n"
        "</tool_call>",
        calls=[("weather", {"city": "Rome", "days": 1})],
    ),
    "coder: the function not closed": Case(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=days>\n1\n</parameter>\n</tool_call>",
        calls=[("weather", {"days": 1})],
    ),
    "coder: markup in a value": Case(
        "qwen3-coder",
        '<tool_call><function=weather><parameter=city>\n<b>"x"</b> </param\n\n</parameter>'
        "</function></tool_call>",
        calls=[("weather", {"city": '<b>"x"</b> </param\n'})],
    ),
    "coder: two calls": Case(
        "qwen3-coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls=[("now", {}), ("now", {})],
    ),
    "coder: JSON all the same": Case(
        "qwen3-coder", hermes("now", '{"a": 1}'), calls=[("now", {"a": 1})]
    ),
    "coder: cut off": Case(
        "qwen3-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo",
    ),
    "coder: prose about the tag": Case(
        "qwen3-coder", "<function=my own name> is odd", "<function=my own name> is odd"
    ),
    "glm: line breaks between": Case(
        "glm",
        "\n<think>hm</think>\nOk.\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        '<arg_value>Tōkyō "x"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n'
        "</tool_call>",
        "Ok.",
        "hm",
        [("weather", {"city": 'Tōkyō "x"', "days": 2})],
    ),
    "glm: all on one line": Case(
        "glm",
        "hm</think><tool_call>weather<arg_key>tags</arg_key><arg_value>[1, 2]</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        "",
        "hm",
        [("weather", {"tags": [1, 2]}), ("now", {})],
        inside=True,
    ),
    "glm: no arguments": Case("glm", "<tool_call>now\n</tool_call>", calls=[("now", {})]),
    "glm: no closing tag": Case(
        "glm",
        "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n",
        calls=[("weather", {"days": 2})],
    ),
    "glm: nothing but a known name": Case("glm", "<tool_call>now", calls=[("now", {})]),
    "glm: a value not closed": Case(
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome<arg_key>days</arg_key>"
        "<arg_value>1</tool_call>",
        calls=[("weather", {"city": "Rome", "days": 1})],
    ),
    "glm: prose about the tag": Case(
        "glm", "<tool_call> is what I write", "<tool_call> is what I write"
    ),
    "glm: a key without value": Case(
        "glm",
        "<tool_call>now<arg_key>a</arg_key>oops",
        "<tool_call>now<arg_key>a</arg_key>oops",
    ),
    "harmony: reasoning and answer": Case(
        "harmony",
        "<|channel|>analysis<|message|>User greets.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Hello!",
        "Hello!",
        "User greets.",
    ),
    "harmony: a call": Case(
        "harmony",
        "<|channel|>analysis<|message|>Look up.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        "",
        "Look up.",
        [("weather", {"city": "Oslo"})],
    ),
    "harmony: the receiver before the channel": Case(
        "harmony",
        ' to=functions.weather<|channel|>commentary json<|message|>{"days":1}',
        calls=[("weather", {"days": 1})],
    ),
    "harmony: a call on the analysis channel": Case(
        "harmony",
        "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
        calls=[("now", {})],
    ),
    "harmony: words before a call": Case(
        "harmony",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary"
        " to=functions.now<|message|><|call|>",
        "I will look.",
        calls=[("now", {})],
    ),
    "harmony: two paragraphs": Case(
        "harmony",
        "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
        "One.\n\nTwo.",
    ),
    "harmony: no header": Case("harmony", "Just text.", "Just text."),
    "harmony: a header without message": Case("harmony", "<|channel|>final", ""),
    "harmony: not a header": Case(
        "harmony", "<|channel|>these are words of text", "<|channel|>these are words of text"
    ),
    "harmony: arguments that are no JSON": Case(
        "harmony",
        "<|channel|>commentary to=functions.now<|message|>print(1)<|call|>",
        "print(1)",
    ),
    "harmony: a tool not offered": Case(
        "harmony",
        "<|channel|>analysis to=python<|message|>1+1<|call|>",
        "",
        "1+1",
    ),
    "harmony: cut off within the arguments": Case(
        "harmony",
        '<|channel|>commentary to=functions.now<|message|>{"a": "b',
        '{"a": "b',
    ),
}


def parser_of(case: Case) -> Parser:
    return make_parser(FORMATS[case.form], tools=TOOLS, inside=case.inside)


def events_of(parser: Parser, pieces: list[str]) -> list[Event]:
    return [event for piece in pieces for event in parser.feed(piece)] + parser.finish()


def read(case: Case, pieces: list[str]) -> Collected:
    return collect(events_of(parser_of(case), pieces))


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_told_apart_wherever_it_is_cut(name: str) -> None:
    case = CASES[name]
    whole = read(case, [case.text])
    assert case.content == whole.content
    assert case.reasoning == whole.reasoning
    assert case.calls == [(call.name, json.loads(call.arguments)) for call in whole.calls]
    assert whole == read(case, list(case.text))
    for at in range(1, len(case.text)):
        assert whole == read(case, [case.text[:at], case.text[at:]]), case.text[:at]


def test_arguments_come_while_they_are_written() -> None:
    parser = make_parser(FORMATS["hermes"], tools=TOOLS)
    assert [] == parser.feed('<tool_call>{"name": "wri')
    assert [CallStart(0, "write"), CallArguments(0, '{"te')] == parser.feed(
        'te", "arguments": {"te'
    )
    assert [CallArguments(0, 'xt": "long')] == parser.feed('xt": "long')
    assert [CallArguments(0, '"}'), CallEnd(0, True, "")] == parser.feed('"}}')
    assert [] == parser.feed("</tool_call>")
    assert [] == parser.finish()


@pytest.mark.parametrize("form", ["qwen3-coder", "glm"])
def test_strings_written_bare_come_while_they_are_written(form: str) -> None:
    begin = {
        "qwen3-coder": "<tool_call><function=weather><parameter=city>\n",
        "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>",
    }
    parser = make_parser(FORMATS[form], tools=TOOLS)
    parser.feed(begin[form])
    assert [CallArguments(0, 'a \\"b\\"')] == parser.feed('a "b"')


def test_a_call_that_was_cut_off_is_not_whole_and_keeps_its_text() -> None:
    parser = make_parser(FORMATS["hermes"], tools=TOOLS)
    text = '<tool_call>{"name": "now", "arguments": {"a": '
    assert CallEnd(0, False, text) == events_of(parser, [text])[-1]


def test_without_tools_nothing_is_a_call() -> None:
    text = hermes("now", "{}")
    parser = make_parser(FORMATS["hermes"], tools=None)
    assert [Content(text)] == parser.feed(text)


def test_reasoning_stays_in_the_content_when_no_tags_are_looked_for() -> None:
    parser = make_parser(FORMATS["hermes"], tags=None)
    assert [Content("<think>a</think>b")] == parser.feed("<think>a</think>b")


def test_other_tags_of_reasoning() -> None:
    parser = make_parser(FORMATS["hermes"], tags=TAGS[1])
    assert [Reasoning("a"), Content("b")] == parser.feed("<seed:think>a</seed:think>b")


def test_the_same_text_in_one_piece_and_many_gives_calls_of_one_order() -> None:
    text = f"{hermes('now', '{}')}{hermes('weather', '{}')}"
    events = events_of(make_parser(FORMATS["hermes"], tools=TOOLS), list(text))
    assert [0, 1] == [event.index for event in events if isinstance(event, CallStart)]
    ends = [i for i, event in enumerate(events) if isinstance(event, CallEnd)]
    starts = [i for i, event in enumerate(events) if isinstance(event, CallStart)]
    assert starts[0] < ends[0] < starts[1] < ends[1]


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": ', '{"a": 1}', "}", "["),
        *("<function=now>", "</function>", "<parameter=city>", "</parameter>", "now", "\n", " "),
        *("<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "text"),
        *("<|channel|>", "analysis", "final", "<|message|>", "<|start|>", "assistant", "<|end|>"),
        *(" to=functions.now", "<|constrain|>", "json", "<|call|>", '"', "\\", "]", ",", ":", "é"),
    ]
)


@given(
    st.lists(FRAGMENTS, max_size=14).map("".join),
    st.sampled_from(list(FORMATS)),
    st.booleans(),
    st.data(),
)
def test_any_text_is_read_without_error_and_independent_of_its_pieces(
    text: str, form: str, inside: bool, data: st.DataObject
) -> None:
    case = Case(form, text, inside=inside)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    whole = read(case, [text])
    assert whole == read(case, pieces)
    assert whole == read(case, list(text))
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(st.lists(FRAGMENTS, max_size=14).map("".join))
def test_plain_content_loses_no_character(text: str) -> None:
    parser = make_parser(FORMATS["hermes"], tags=None)
    assert text == collect(events_of(parser, list(text))).content


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} <tool_call> <function= <parameter=", "qwen3-coder"),
        ("{{ tools }} <tool_call> <arg_key>", "glm"),
        ("<|start|>x<|channel|>y<|message|>", "harmony"),
    ],
)
def test_the_template_decides_the_format(template: str | None, form: str) -> None:
    assert form == format_of(template).name


def test_a_template_that_knows_no_tools_is_told_about_them_in_words() -> None:
    assert not format_of("{{ messages }}").native
    assert format_of("{{ tools }} <tool_call>").native
