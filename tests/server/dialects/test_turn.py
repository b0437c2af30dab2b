"""One answer: what it is constrained by, how its tokens are counted, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from speculoe_local.server.dialects.turn import Turn, constrained
from speculoe_local.server.errors import GrammarError, QueueFull
from speculoe_local.server.http.wire import Tickets
from speculoe_local.server.jobs import Delta, Job
from speculoe_local.server.prompt.chat import Conversation, Prompt, build
from speculoe_local.server.toolcalls import CallEnd, Event, Reasoning, collect
from tests.server.fake_backend import CHATML, FakeBackend, Script, say

OPENED = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def prompt_of(backend: FakeBackend, **asked: Any) -> Prompt:
    messages = [{"role": "user", "content": "hi"}]
    return build(backend.vocab, backend.info.template, Conversation(messages, **asked))


def run(
    script: Script,
    *,
    template: str = CHATML,
    job: Job | None = None,
    tools: Any = None,
    **turn: Any,
) -> tuple[Turn, FakeBackend, list[Event]]:
    """A whole turn; its events."""
    backend = FakeBackend(script, template=template)
    prompt = prompt_of(backend, tools=tools)
    made = Turn(backend, prompt, job or Job(tokens=()), Tickets(), **turn)

    async def steps() -> list[Event]:
        await made.start()
        found: list[Event] = []
        done = []
        async for step in made:
            found += step.events
            done.append(step.done)
        assert [False] * (len(done) - 1) + [True] == done
        return found

    return made, backend, asyncio.run(steps())


def test_tokens_of_reasoning_are_counted_apart() -> None:
    turn, _, events = run(say("abc", "</think>", "\n\n", "Hello"), template=OPENED)
    assert ("Hello", "abc") == (collect(events).content, collect(events).reasoning)
    assert 3 + 8 + 2 + 5 == turn.usage.completion
    assert 3 <= turn.usage.reasoning <= 3 + 8 + 2
    assert "stop" == turn.usage.finish


def test_an_answer_without_reasoning_has_no_tokens_of_it() -> None:
    turn, _, events = run(say(" ", "Hello"))
    assert " Hello" == collect(events).content
    assert 0 == turn.usage.reasoning


def test_an_answer_cut_off_while_reasoning_says_so() -> None:
    turn, _, events = run(say("abc", finish="length"), template=OPENED)
    assert [Reasoning("abc")] == events
    assert ("length", 3, 3) == (turn.usage.finish, turn.usage.reasoning, turn.usage.completion)


def test_the_templates_stops_are_the_jobs_and_no_clients_stop() -> None:
    turn, backend, _ = run(say("a", stop_hit="X"), job=Job(tokens=(), stop=("X",)))
    assert ("X",) == backend.jobs[0].stop
    assert "X" == turn.usage.stop_hit


def test_a_call_that_is_enough_ends_the_turn_with_its_figures() -> None:
    def script(job: Job) -> Iterable[Any]:
        yield from say(CALL, "more", "and more", experts={"hit_rate": 0.5})(job)

    turn, backend, events = run(script, tools=[TOOL], one_call=True)
    assert 1 == turn.usage.calls == sum(isinstance(event, CallEnd) for event in events)
    assert "" == collect(events).content
    assert "stop" == turn.usage.finish
    assert backend.tickets[0].cancelled.is_set()


def test_leaving_one_turn_leaves_the_others_of_its_request_alone() -> None:
    async def both() -> None:
        backend = FakeBackend(say(CALL, CALL), template=CHATML)
        prompt = prompt_of(backend, tools=[TOOL])
        tickets = Tickets()
        first = Turn(backend, prompt, Job(tokens=()), tickets, one_call=True)
        other = Turn(backend, prompt, Job(tokens=()), tickets)
        for turn in (first, other):
            await turn.start()
        for turn in (first, other):
            async for _ in turn:
                pass
        assert [1, 2] == [first.usage.calls, other.usage.calls]

    asyncio.run(both())


def test_a_grammar_over_the_whole_answer_keeps_the_budget_away() -> None:
    job = Job(tokens=(), grammar='root ::= "x"')
    _, backend, _ = run(say("abcdefgh", "i"), template=OPENED, job=job, budget=2)
    assert 1 == len(backend.jobs)


def test_a_spent_budget_waits_for_a_tag_that_may_be_the_end() -> None:
    _, backend, events = run(say("abcd</thi", "nk>ok"), template=OPENED, budget=2)
    assert 1 == len(backend.jobs)
    assert ("ok", "abcd") == (collect(events).content, collect(events).reasoning)


def test_what_refuses_the_job_refuses_the_turn() -> None:
    backend = FakeBackend(say("x"), refuse=QueueFull(1, 1))
    turn = Turn(backend, prompt_of(backend), Job(tokens=()), Tickets())
    with pytest.raises(QueueFull):
        asyncio.run(turn.start())


def test_an_error_on_the_way_ends_the_turn() -> None:
    def script(_job: Job) -> Iterable[Any]:
        yield Delta(text="a", tokens=(97,))
        yield QueueFull(1, 1)

    with pytest.raises(QueueFull):
        run(script)


def test_calls_are_constrained_once_they_begin() -> None:
    backend = FakeBackend(say(""))
    grammar, triggers = constrained(prompt_of(backend, tools=[TOOL]))
    assert grammar is not None
    assert "now" in grammar
    assert triggers
    assert (None, ()) == constrained(prompt_of(backend))


def test_a_forced_call_is_the_whole_answer_and_of_the_function_that_was_named() -> None:
    other = {"type": "function", "function": {"name": "later", "parameters": {}}}
    prompt = prompt_of(FakeBackend(say("")), tools=[TOOL, other])
    grammar, triggers = constrained(prompt, forced=True, only="later")
    assert grammar is not None
    assert "later" in grammar
    assert "now" not in grammar
    assert () == triggers
    with pytest.raises(GrammarError, match="nobody"):
        constrained(prompt, forced=True, only="nobody")
    with pytest.raises(GrammarError):
        constrained(prompt_of(FakeBackend(say(""))), forced=True)
