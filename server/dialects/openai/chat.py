"""/v1/chat/completions of the OpenAI dialect, with what llama-server adds to it; /v1/models beside it.

    body -> Conversation -> Prompt -> a Turn per choice -> openai_reply

Knows what fields mean, nothing of how answers are written or made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from speculoe_local.server.dialects.fields import Common, choices_of, job_of, ping_of
from speculoe_local.server.dialects.openai.chat_reply import Reply, start_all, streamed, whole
from speculoe_local.server.dialects.openai.common import OpenAIRoute, add_route, model_name
from speculoe_local.server.dialects.openai.models import add_models
from speculoe_local.server.dialects.turn import Turn, constrained
from speculoe_local.server.errors import BadRequest
from speculoe_local.server.grammar.form import requested
from speculoe_local.server.http.wire import (
    Tickets,
    attended,
    body_of,
    body_schema,
    event_stream,
    json_response,
    validated,
)
from speculoe_local.server.jobs import Backends, Job
from speculoe_local.server.prompt.chat import Conversation, Prompt, prepare
from speculoe_local.server.settings import Settings

__all__ = ["ChatBody", "Choice", "choice_of", "router", "strict_names"]

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 1000

_Limit = Annotated[int, Field(ge=-2, le=2**31 - 1)]


class ChatBody(Common):
    """/v1/chat/completions."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    n_predict: _Limit | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    json_schema: Any = None
    grammar: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    reasoning_format: str | None = None
    reasoning_budget_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    return_progress: bool | None = None


class Choice:
    """What `tool_choice` comes to: `calls` offered at all, `forced`, of the function `only`."""

    __slots__ = ("calls", "forced", "only")

    def __init__(self, calls: bool, forced: bool, only: str | None) -> None:
        self.calls = calls
        self.forced = forced
        self.only = only


def router(backends: Backends, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])

    async def chat_completions(request: Request) -> Response:
        body = validated(ChatBody, await body_of(request))
        backend = await backends.get(body.model)
        choice = choice_of(body.tool_choice)
        # What is refused is refused before a template is run.
        answer = await requested(body.model_dump(include=_FORMS))
        vocab = backend.vocab
        job = job_of(body, settings, vocab, max_tokens=_limit(body))
        prompt = await prepare(
            backend, _conversation(body, choice), merge_system=settings.merge_system
        )
        job = await _constrain(body, job, prompt, choice, answer)
        if body.logprobs or body.top_logprobs is not None:
            job = replace(job, top_logprobs=body.top_logprobs or 0)
        tickets = Tickets()
        one_call = body.parallel_tool_calls is False
        budget = body.reasoning_budget_tokens
        turns = [
            Turn(
                backend,
                prompt,
                each,
                tickets.part(),
                budget=budget if budget is not None and budget > 0 else None,
                one_call=one_call,
            )
            for each in choices_of(job, body.n or 1)
        ]
        options = body.stream_options or {}
        reply = Reply(
            model=model_name(body.model, backend),
            vocab=vocab,
            mode=backend.info.mode,
            usage=bool(options.get("include_usage")),
            progress=bool(body.return_progress),
        )
        if body.stream:
            await attended(request, tickets, start_all(turns))
            return event_stream(
                request,
                streamed(turns, reply),
                tickets,
                ping_s=ping_of(body, settings),
                grace_s=settings.grace_s,
            )
        return json_response(await attended(request, tickets, whole(turns, reply)))

    async def input_tokens(request: Request) -> Response:
        body = validated(ChatBody, await body_of(request))
        backend = await backends.get(body.model)
        asked = _conversation(body, choice_of(body.tool_choice))
        prompt = await prepare(backend, asked, merge_system=settings.merge_system)
        return json_response({"object": "chat.input_tokens", "input_tokens": len(prompt.tokens)})

    extra = body_schema(ChatBody)
    path = "/v1/chat/completions"
    add_route(routes, path, chat_completions, openapi=extra, summary="Answer a conversation")
    add_route(
        routes, f"{path}/input_tokens", input_tokens, openapi=extra, summary="Count its tokens"
    )
    add_models(routes, backends)
    return routes


_FORMS = {"response_format", "json_schema", "grammar"}


def choice_of(tool_choice: Any) -> Choice:
    """Raises BadRequest for what is none of auto, none, required and a function's name."""
    if tool_choice in (None, "auto", ""):
        return Choice(True, False, None)
    if tool_choice == "none":
        return Choice(False, False, None)
    if tool_choice in ("required", "any"):
        return Choice(True, True, None)
    if isinstance(tool_choice, Mapping):
        kind = tool_choice.get("type")
        if kind in ("auto", "none", "required"):
            return choice_of(kind)
        if kind == "allowed_tools":
            inner = tool_choice.get("allowed_tools", tool_choice)
            return choice_of(inner.get("mode") if isinstance(inner, Mapping) else None)
        function = tool_choice.get("function", tool_choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if kind in ("function", "tool", "custom", None) and isinstance(name, str) and name:
            return Choice(True, True, name)
    raise BadRequest(
        f"tool_choice {str(tool_choice)[:60]!r} is not known; use auto, none, required or "
        "{'type': 'function', 'function': {'name': ...}}",
        "tool_choice",
    )


def _conversation(body: ChatBody, choice: Choice) -> Conversation:
    think: bool | str | None = body.reasoning_effort
    if body.reasoning_budget_tokens == 0:
        think = False
    return Conversation(
        messages=body.messages,
        tools=body.tools,
        calls=choice.calls,
        variables=body.chat_template_kwargs,
        think=think,
        split_reasoning=body.reasoning_format != "none",
        continue_last=body.continue_final_message is not False,
    )


async def _constrain(
    body: ChatBody, job: Job, prompt: Prompt, choice: Choice, answer: str | None
) -> Job:
    strict = frozenset(strict_names(body.tools))

    def work() -> Job:
        try:
            text, triggers = constrained(
                prompt,
                answer=answer,
                forced=choice.forced,
                only=choice.only,
                parallel=body.parallel_tool_calls is not False,
                strict=strict,
            )
        except BadRequest as error:
            raise type(error)(str(error), error.param or "tools") from None
        return replace(job, grammar=text, grammar_triggers=triggers)

    return await asyncio.to_thread(work)


def strict_names(tools: list[Any] | None) -> list[str]:
    found = []
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("strict") is True:
            found.append(str(function.get("name")))
    return found


def _limit(body: ChatBody) -> int | None:
    for given in (body.max_completion_tokens, body.max_tokens, body.n_predict):
        if given is not None:
            return given
    return None
