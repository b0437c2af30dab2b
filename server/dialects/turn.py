"""One answer of a conversation, from job to events: what conversations of all dialects share.

    job -> Backend.submit -> deltas -> parser -> events, counted

A budget for reasoning is kept here: where it is spent, the job is left, the reasoning closed in the model's
stead, and a second job goes on from there; all but the closing tag is in the cache. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.tools import Function, answer_grammar
from speculoe_local.server.http.wire import PATIENCE_S, Tickets, deltas
from speculoe_local.server.jobs import Backend, Delta, Finish, Job, Ticket, Timings
from speculoe_local.server.prompt.chat import Prompt
from speculoe_local.server.toolcalls import CallEnd, CallStart, Content, Event, Reasoning

__all__ = ["Step", "Turn", "Usage", "constrained"]


def constrained(
    prompt: Prompt,
    *,
    answer: str | None = None,
    forced: bool = False,
    only: str | None = None,
    parallel: bool = True,
    strict: Container[str] = (),
) -> tuple[str | None, tuple[str, ...]]:
    """Grammar and triggers of a job for `prompt`: whatever calls it makes are whole.

    `answer`: GBNF that the answer must follow (or be a call, where some are offered and not `forced`).
    `forced`: it must be calls, of the function `only` where one is named. `strict` are functions whose
    arguments must be valid, not only whole. Takes a while: call it on a thread. Raises GrammarError.
    """
    offered = [tool["function"] for tool in prompt.offered]
    functions = [
        Function(f["name"], f["parameters"], f["name"] in strict)
        for f in offered
        if only is None or f["name"] == only
    ]
    if only is not None and not functions:
        raise GrammarError(f"tool_choice names {only[:64]!r}, which is not among the tools")
    if not functions and answer is None and not forced:
        return None, ()
    try:
        return answer_grammar(
            prompt.form,
            functions=functions,
            parallel=parallel,
            answer=None if forced else answer,
            tags=prompt.tags if prompt.may_reason else None,
            inside=prompt.inside,
            forced=forced,
        )
    except GrammarError:
        if forced or answer is not None or any(function.strict for function in functions):
            raise
        return None, ()  # nothing was promised: calls are read all the same


@dataclass(frozen=True, slots=True)
class Step:
    """What one delta brought; `done` with the last."""

    events: tuple[Event, ...]
    delta: Delta
    done: bool = False


@dataclass(slots=True)
class Usage:
    """Tokens so far, and how the answer ended. `calls` counts whole calls."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    calls: int = 0
    finish: Finish | None = None
    stop_hit: str | None = None
    timings: Timings = Timings()  # noqa: RUF009  # frozen


class Turn:
    """Runs a job and reads its answer. Await `start`, then iterate once.

    `budget` bounds the tokens of reasoning, None: no bound. `one_call` ends the answer behind its first
    whole call.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Prompt,
        job: Job,
        tickets: Tickets,
        *,
        budget: int | None = None,
        one_call: bool = False,
    ) -> None:
        self.usage = Usage(prompt=len(prompt.tokens))
        self._backend = backend
        self._prompt = prompt
        self._job = replace(
            job,
            tokens=prompt.tokens,
            stop=(*job.stop, *prompt.stops),
            special=job.special or prompt.special,
        )
        self._tickets = tickets
        self._parser = prompt.parser()
        # A grammar over the whole answer would not know where the second job begins.
        bounded = prompt.split_reasoning and prompt.form.name != "harmony"
        whole = job.grammar is not None and not job.grammar_triggers
        self._budget = budget if bounded and not whole else None
        self._one_call = one_call
        self._enough = False  # the call that was wanted is there
        self._mine: list[Ticket] = []
        self._reasons = prompt.inside and prompt.split_reasoning
        self._undecided = 0  # tokens of which it is not certain yet what they are
        self._tokens: list[int] = []
        self._spent = Timings()  # of the job that was left
        self._source: AsyncIterator[tuple[int, Delta]] | None = None

    async def start(self, *, patience_s: float = PATIENCE_S) -> None:
        """Submit, and wait for the first delta as `wire.deltas` does. Raises what either raises."""
        self._source = await self._submit(self._job, patience_s)

    async def __aiter__(self) -> AsyncIterator[Step]:
        assert self._source is not None
        while (source := self._source) is not None:
            self._source = None
            async with aclosing(source) as running:  # type: ignore[type-var]
                async for _, delta in running:
                    if self._enough:
                        if delta.timings is not None:
                            self._count(delta.timings)
                        if delta.finish is not None:
                            self.usage.finish = "stop"
                            yield Step((), delta, True)
                        continue
                    events = self._read(delta)
                    ended = delta.finish is not None
                    if ended:
                        self.usage.finish = delta.finish
                        if delta.stop_hit not in self._prompt.stops:
                            self.usage.stop_hit = delta.stop_hit
                        events += self._note(self._parser.finish())
                    elif self._one_call and self.usage.calls:
                        self._enough = True
                        self._cancel()  # its last delta still has the figures
                    elif self._overspent():
                        events += self._note(self._parser.feed(self._closing))
                        self._source = await self._go_on()
                    yield Step(tuple(events), delta, ended)
                    if ended or self._source is not None:
                        break

    @property
    def _closing(self) -> str:
        return f"\n{self._prompt.tags.end}\n\n"

    async def _submit(self, job: Job, patience_s: float) -> AsyncIterator[tuple[int, Delta]]:
        self._mine = await self._tickets.submit(self._backend, [job])
        return await deltas(self._mine, patience_s=patience_s)

    def _cancel(self) -> None:
        """Leave this turn's job; other choices of the request go on."""
        for ticket in self._mine:
            ticket.cancel()

    def _read(self, delta: Delta) -> list[Event]:
        self._tokens += delta.tokens
        self._undecided += len(delta.tokens)
        if delta.timings is not None:
            self._count(delta.timings)
        return self._note(self._parser.feed(delta.text))

    def _count(self, timings: Timings) -> None:
        before = self._spent
        first = timings if before.predicted_n == 0 else before
        total = replace(
            timings,
            prompt_n=first.prompt_n,
            cached_n=first.cached_n,
            prompt_ms=timings.prompt_ms + before.prompt_ms,
            queue_ms=timings.queue_ms + before.queue_ms,
            predicted_n=timings.predicted_n + before.predicted_n,
            predicted_ms=timings.predicted_ms + before.predicted_ms,
        )
        self.usage.timings = total
        self.usage.cached = total.cached_n
        self.usage.completion = total.predicted_n

    def _note(self, events: Sequence[Event]) -> list[Event]:
        """Count by what the events say the tokens before them were."""
        for event in events:
            if isinstance(event, Reasoning):
                self._reasons = True
            elif isinstance(event, Content | CallStart):
                self._reasons = False
            elif isinstance(event, CallEnd) and event.whole:
                self.usage.calls += 1
        if events or self._reasons:
            self.usage.reasoning += self._undecided if self._reasons else 0
            self._undecided = 0
        return list(events)

    def _overspent(self) -> bool:
        spent = self.usage.reasoning
        return self._budget is not None and spent >= self._budget and self._parser.reasons

    async def _go_on(self) -> AsyncIterator[tuple[int, Delta]]:
        """Leave the job and continue behind the closing tag."""
        self._cancel()
        self._budget = None
        self._spent = self.usage.timings
        closing = self._backend.vocab.tokenize(self._closing, add_bos=False)
        limit = self._job.max_tokens
        left = None if limit is None else max(0, limit - self.usage.completion)
        tokens = (*self._prompt.tokens, *self._tokens, *closing)
        self._reasons = False
        return await self._submit(replace(self._job, tokens=tokens, max_tokens=left), 0.0)
