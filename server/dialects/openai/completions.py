"""/v1/completions of the OpenAI dialect: texts or tokens continued, echoed and scored.

`echo` with `logprobs` scores a prompt token by token, which is what evaluation harnesses ask for; `suffix`
fills a gap. Knows nothing of chat.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.dialects.fields import Common, choices_of, job_of, ping_of
from speculoe_local.server.dialects.many_prompts import Tokens, prompts_of, run_batch
from speculoe_local.server.dialects.openai.chat_reply import DONE
from speculoe_local.server.dialects.openai.common import (
    OpenAIRoute,
    add_route,
    error_event,
    finite,
    identifier,
    model_name,
    now,
    token_text,
    usage_of,
)
from speculoe_local.server.errors import BadRequest
from speculoe_local.server.grammar.form import requested
from speculoe_local.server.http.wire import (
    Tickets,
    attended,
    begun,
    body_of,
    body_schema,
    event,
    event_stream,
    json_response,
    validated,
)
from speculoe_local.server.jobs import Backend, Backends, Delta, Finish, Job, Timings, TokenLogprob
from speculoe_local.server.prompt.fim import fim_tokens
from speculoe_local.server.settings import Settings

__all__ = ["CompletionBody", "router"]

MAX_CHOICES = 64
MAX_LOGPROBS = 1000


class CompletionBody(Common):
    """/v1/completions."""

    prompt: str | list[Any]
    suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    n_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    json_schema: Any = None
    grammar: str | None = None


@dataclass(slots=True)
class _Choice:
    """One choice as it grows. `echo` is what goes in front, None once it is out, or where nothing does.

    `logprobs` None: scores are not shown, whether there are some or not.
    """

    job: Job
    logprobs: _Legacy | None
    echo: str | None
    text: str = ""
    scored: list[tuple[int, TokenLogprob | None]] = field(default_factory=list)
    finish: Finish | None = None
    timings: Timings = Timings()  # noqa: RUF009  # frozen

    def see(self, delta: Delta) -> str:
        """Take a delta; the text that is new."""
        self.scored += [(self.job.tokens[i], each) for i, each in enumerate(delta.prompt_logprobs)]
        self.scored += [(each.token, each) for each in delta.logprobs]
        self.timings = delta.timings or self.timings
        self.finish = delta.finish
        text = delta.text
        if self.echo is not None and (delta.timings is not None or delta.prompt_logprobs):
            text, self.echo = self.echo + text, None
        self.text += text
        return text

    def take_scored(self) -> dict[str, Any] | None:
        """`logprobs` of what was not given out yet."""
        if self.logprobs is None:
            return None
        found, self.scored = self.logprobs.of(self.scored), []
        return found

    @property
    def likelihood(self) -> float:
        """Mean log probability of the answer's tokens."""
        found = [each.logprob for _, each in self.scored if each is not None]
        return sum(found) / len(found) if found else float("-inf")


def router(backends: Backends, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])

    async def completions(request: Request) -> Response:
        body = validated(CompletionBody, await body_of(request))
        backend = await backends.get(body.model)
        n = body.n or 1
        each_n = max(n, body.best_of or n)
        if each_n > n and body.stream:
            raise BadRequest("best_of above n cannot stream: which are best shows last", "best_of")
        job = await _job(body, backend, settings)
        choices: list[_Choice] = []
        for tokens, text in await _prompts(body, backend, each_n):
            prompted = replace(job, tokens=tokens)
            choices += [
                _choice(body, each, text, backend.vocab) for each in choices_of(prompted, each_n)
            ]
        tickets = Tickets()
        source = run_batch(backend, [choice.job for choice in choices], tickets)
        head = {
            "id": identifier("cmpl-"),
            "object": "text_completion",
            "created": now(),
            "model": model_name(body.model, backend),
            "system_fingerprint": f"speculoe-local-{backend.info.mode}",
        }
        if body.stream:
            wants_usage = bool((body.stream_options or {}).get("include_usage"))
            deltas = await attended(request, tickets, begun(source))
            return event_stream(
                request,
                _streamed(deltas, choices, n, head, wants_usage),
                tickets,
                ping_s=ping_of(body, settings),
                grace_s=settings.grace_s,
            )

        async def whole() -> None:
            async for place, delta in source:
                choices[place].see(delta)

        await attended(request, tickets, whole())
        best = _best(choices, each_n, n)
        response = {
            **head,
            "choices": [_written(i, each, each.text) for i, each in enumerate(best)],
            "usage": _usage(choices, each_n),
            "timings": choices[0].timings.to_json(),
        }
        return json_response(response)

    add_route(
        routes,
        "/v1/completions",
        completions,
        openapi=body_schema(CompletionBody),
        summary="Continue texts",
    )
    return routes


async def _job(body: CompletionBody, backend: Backend, settings: Settings) -> Job:
    grammar = await requested(
        body.model_dump(include={"response_format", "json_schema", "grammar"})
    )
    limit = body.max_tokens if body.max_tokens is not None else body.n_predict
    job = job_of(body, settings, backend.vocab, max_tokens=limit)
    top = body.logprobs
    if (body.best_of or 1) > (body.n or 1):
        top = top or 0  # to tell which are best
    echo_logprobs = bool(body.echo) and body.logprobs is not None
    return replace(job, grammar=grammar, top_logprobs=top, echo_logprobs=echo_logprobs)


async def _prompts(
    body: CompletionBody, backend: Backend, each: int
) -> list[tuple[Tokens, str | None]]:
    if not body.suffix:
        return await prompts_of(body.prompt, backend.vocab, field="prompt", each=each)
    if not isinstance(body.prompt, str):
        raise BadRequest("suffix needs a prompt that is one text", "suffix")
    room = backend.info.n_ctx - 1 - min(max(body.max_tokens or 0, 0), backend.info.n_ctx // 2)
    tokens = await asyncio.to_thread(fim_tokens, backend.vocab, body.prompt, body.suffix, room=room)
    return [(tokens, body.prompt)]


def _choice(body: CompletionBody, job: Job, text: str | None, vocab: Vocabulary) -> _Choice:
    echo = None
    if body.echo:
        echo = text
        if echo is None:
            pieces = b"".join(vocab.piece(token, special=True) for token in job.tokens)
            echo = pieces.decode("utf-8", "replace")
    silent = _added_bos(job.tokens, text, vocab)
    legacy = _Legacy(vocab, silent=silent) if body.logprobs is not None else None
    return _Choice(job, legacy, echo)


def _added_bos(tokens: Sequence[int], text: str | None, vocab: Vocabulary) -> bool:
    """Whether the first token is a begin of text that the prompt did not spell out."""
    begins = text is not None and text.startswith(vocab.text_of(vocab.bos) or "\0")
    return text is not None and bool(tokens) and tokens[0] == vocab.bos and not begins


class _Legacy:
    """`logprobs` as this route has them, with places of tokens in the text, in characters."""

    def __init__(self, vocab: Vocabulary, *, silent: bool) -> None:
        """`silent`: the first token is not part of the text."""
        self._vocab = vocab
        self._silent = silent
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, scored: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        offsets = []
        for token, _ in scored:
            offsets.append(self._offset)
            if self._silent:
                self._silent = False
                continue
            piece = self._vocab.piece(token, special=True)
            self._offset += len(self._characters.decode(piece))
        return {
            "tokens": [token_text(self._vocab, token) for token, _ in scored],
            "token_logprobs": [
                None if each is None else finite(each.logprob) for _, each in scored
            ],
            "top_logprobs": [None if each is None else self._top(each) for _, each in scored],
            "text_offset": offsets,
        }

    def _top(self, scored: TokenLogprob) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, _, logprob in scored.top:
            # Likeliest first: of two tokens with one text the likelier counts.
            found.setdefault(token_text(self._vocab, token), finite(logprob))
        return found


async def _streamed(
    deltas: AsyncIterator[tuple[int, Delta]],
    choices: Sequence[_Choice],
    n: int,
    head: dict[str, Any],
    wants_usage: bool,
) -> AsyncIterator[bytes]:
    try:
        async for place, delta in deltas:
            choice = choices[place]
            text = choice.see(delta)
            if text or delta.finish is not None:
                part = _written(place, choice, text)
                timings = {"timings": choice.timings.to_json()} if delta.finish is not None else {}
                yield event({**head, "choices": [part], **timings})
        if wants_usage:
            yield event({**head, "choices": [], "usage": _usage(choices, n)})
        yield DONE
    except Exception as error:
        yield event(error_event(error))


def _written(index: int, choice: _Choice, text: str) -> dict[str, Any]:
    finish = choice.finish
    return {
        "index": index,
        "text": text,
        "logprobs": choice.take_scored(),
        "finish_reason": "stop" if finish == "cancel" else finish,
    }


def _best(choices: Sequence[_Choice], each_n: int, n: int) -> list[_Choice]:
    """The `n` likeliest of each prompt's `each_n` choices."""
    found: list[_Choice] = []
    for at in range(0, len(choices), each_n):
        group = list(choices[at : at + each_n])
        if each_n > n:
            group.sort(key=lambda choice: choice.likelihood, reverse=True)
        found += group[:n]
    return found


def _usage(choices: Sequence[_Choice], each_n: int) -> dict[str, Any]:
    """Prompts count once each, whatever the number of their choices."""
    total = usage_of([])
    for at in range(0, len(choices), each_n):
        one = usage_of([choice.timings for choice in choices[at : at + each_n]])
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            total[key] += one[key]
        details = total["prompt_tokens_details"]
        details["cached_tokens"] += one["prompt_tokens_details"]["cached_tokens"]
    return total
