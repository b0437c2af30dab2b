"""Chat templates render as the models' authors meant, and bad ones end in one line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

import psutil
import pytest

from speculoe_local.runtime import template as module
from speculoe_local.runtime.errors import TemplateError
from speculoe_local.runtime.template import CHATML, CHATML_STOP, choose, prewarm, render

HELLO = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


def rendered(template, messages=HELLO, **variables):
    return render(template, messages, bos="<s>", eos="</s>", **variables)


def refusal(template, messages=HELLO):
    with pytest.raises(TemplateError) as caught:
        rendered(template, messages)
    message = str(caught.value)
    assert message == " ".join(message.split()), "an error is one line"
    return message


def test_chatml_renders_turns_and_opens_the_answer():
    turns = [Turn("system", "Be <kind>."), Turn("user", "hé\n{{ 1 + 1 }}")]

    assert (
        "<|im_start|>system\nBe <kind>.<|im_end|>\n<|im_start|>user\nhé\n{{ 1 + 1 }}<|im_end|>\n"
        "<|im_start|>assistant\n"
    ) == rendered(CHATML, turns)
    assert rendered(CHATML, turns, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_a_gguf_without_template_gets_chatml_with_a_notice_and_its_stop_string():
    assert ("{{ x }}", None, ()) == choose("{{ x }}")
    for missing in (None, "", " \n"):
        assert (CHATML, (CHATML_STOP,)) == (choose(missing).source, choose(missing).stops)
        assert "chat template" in (choose(missing).notice or "")


def test_bos_eos_tools_and_extra_variables_reach_the_template():
    template = "{{ bos_token }}{{ tools[0].name }}{{ enable_thinking }}{{ eos_token }}"

    assert "<s>f1False</s>" == rendered(template, tools=[{"name": "f1"}], enable_thinking=False)
    assert "True" == rendered("{{ tools is none and documents is none }}")


def test_tojson_keeps_text_as_it_is():
    assert '{"b": "<é&\'>", "a": 1}' == rendered("{{ x | tojson }}", x={"b": "<é&'>", "a": 1})
    assert '{\n  "a": 1\n}' == rendered("{{ x | tojson(indent=2) }}", x={"a": 1})


def test_loop_controls_generation_tag_and_block_trimming_work_as_in_transformers():
    template = (
        "{% for i in [1, 2, 3] %}\n"
        "    {% if i == 3 %}{% break %}{% endif %}\n"
        "{% generation %}\n{{ i }}\n{% endgeneration %}\n"
        "{% endfor %}"
    )

    assert "1\n2\n" == rendered(template)


def test_the_date_is_available():
    before = datetime.now().year

    assert rendered("{{ strftime_now('%Y') }}") in {str(before), str(before + 1)}


def test_lone_surrogates_in_a_message_survive_the_way_to_the_worker_and_back():
    assert "a\udc80🙂" == rendered("{{ messages[0].content }}", [Turn("user", "a\udc80🙂")])


def test_the_template_s_own_refusal_is_told():
    template = "{{ raise_exception('System message must be\n at the beginning') }}"

    assert (
        "chat template refuses this conversation: System message must be at the beginning"
    ) == refusal(template)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("\n{% if %}", "is malformed at line 2"),
        ("\n\n{{ messages[0].x.y }}", "fails at line 3"),
        ("{{ ''.__class__.__mro__ }}", "reaches for what it may not at line 1"),
        ("{{ messages.append(1) }}", "reaches for what it may not"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x' * 9000000 }}", "more than the limit"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ raise_exception('z' * 9000) }}", "…"),
    ],
)
def test_a_faulty_template_is_named_in_one_line(template, part):
    assert part in refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ '%9999999999d' % 1 }}",
        "{% set n = namespace(s='a' * 99) %}"
        "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set x = ['a' * 10**6] * 10**5 %}{{ x | string }}",
    ],
)
def test_a_template_that_grows_without_bound_ends_early_and_leaves_memory_alone(template):
    before = psutil.Process().memory_info().rss

    assert "memory" in refusal(template) or "MiB" in refusal(template)
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_template_that_loops_is_ended_and_the_next_one_renders(monkeypatch):
    monkeypatch.setattr(module, "CPU_LIMIT_S", 0.3)
    nested = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    rendered(CHATML)
    began = time.monotonic()

    assert "it loops" in refusal(nested)
    assert time.monotonic() - began < 10
    assert "hi" == rendered("{{ messages[0].content }}")


def test_a_variable_that_is_no_json_is_refused():
    with pytest.raises(TemplateError, match="does not fit in JSON"):
        rendered("{{ x }}", x=object())


def test_a_warm_worker_renders_many_prompts_quickly():
    prewarm()
    rendered(CHATML)
    began = time.monotonic()
    for _ in range(100):
        rendered(CHATML)

    assert time.monotonic() - began < 2
