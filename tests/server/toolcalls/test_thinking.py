"""How reasoning is asked for, and how it is known that it was begun."""

from __future__ import annotations

from typing import Any

import pytest

from speculoe_local.server.toolcalls.thinking import (
    TAGS,
    begins_inside,
    supported,
    switches,
    tags_of,
)

QWEN = "{% if enable_thinking is false %}<think>\n\n</think>{% endif %}"
HARMONY = "<|start|><|channel|><|message|>{{ reasoning_effort }}"
DEEPSEEK = "{% if thinking %}<think>{% else %}</think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "think", "found"),
    [
        (QWEN, None, {}),
        (QWEN, True, {"enable_thinking": True}),
        (QWEN, False, {"enable_thinking": False}),
        (QWEN, "high", {"enable_thinking": True}),
        (QWEN, "none", {"enable_thinking": False}),
        (HARMONY, None, {}),
        (HARMONY, True, {}),
        (HARMONY, False, {"reasoning_effort": "low"}),
        (HARMONY, "medium", {"reasoning_effort": "medium"}),
        (HARMONY, "xhigh", {"reasoning_effort": "high"}),
        (HARMONY, "minimal", {"reasoning_effort": "low"}),
        (HARMONY, "whatever", {}),
        (DEEPSEEK, True, {"thinking": True}),
        (DEEPSEEK, False, {"thinking": False}),
        ("plain", True, {}),
        (None, True, {}),
    ],
)
def test_each_template_is_asked_in_its_own_words(
    template: str | None, think: bool | str | None, found: dict[str, Any]
) -> None:
    assert found == switches(template, think)


def test_a_template_shows_whether_its_model_reasons() -> None:
    assert all(supported(template) for template in (QWEN, HARMONY, DEEPSEEK))
    assert not supported("{{ messages }}")
    assert not supported(None)


def test_tags_are_those_of_the_template() -> None:
    assert TAGS[0] == tags_of(None) == tags_of("{{ messages }}") == tags_of(QWEN)
    assert TAGS[1] == tags_of("x</seed:think>")
    assert TAGS[2] == tags_of("x[/THINK]")


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("I said <think> once", False),
    ],
)
def test_a_prompt_that_ends_in_an_open_tag_has_begun_the_reasoning(
    prompt: str, inside: bool
) -> None:
    assert inside == begins_inside(prompt, TAGS[0])
