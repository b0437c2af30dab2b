"""The Anthropic dialect: /v1/messages, streamed and whole, and /v1/messages/count_tokens.

Content is a list of blocks: text, thinking, tool_use. In a stream one block is open at a time and their
indices count up. Unknown fields and headers are ignored, clients try out new ones. Knows no engine.

API: the Messages API of Anthropic, version 2023-06-01.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from speculoe_local.server.dialects.anthropic.reply import envelope, streamed, whole
from speculoe_local.server.dialects.anthropic.request import conversation_of
from speculoe_local.server.dialects.fields import Common, sampling_of, stops_of
from speculoe_local.server.dialects.turn import Turn, constrained
from speculoe_local.server.errors import BadRequest
from speculoe_local.server.grammar.form import grammar_of_schema
from speculoe_local.server.http.envelopes import route_class
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
from speculoe_local.server.prompt.chat import Prompt, prepare
from speculoe_local.server.settings import Settings

__all__ = ["envelope", "router"]


class MessagesBody(BaseModel):
    """/v1/messages. `max_tokens` may be left out: the context is the limit then."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    messages: list[Any]
    system: str | list[Any] | None = None
    max_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def router(backends: Backends, settings: Settings) -> APIRouter:
    """Routes with and without /v1: base URLs are given in either way."""
    routes = APIRouter(route_class=route_class(envelope), tags=["Anthropic"])
    extra = body_schema(MessagesBody)

    @routes.post("/v1/messages", openapi_extra=extra, response_model=None)
    @routes.post("/messages", openapi_extra=extra, response_model=None, include_in_schema=False)
    async def messages(request: Request) -> Response:
        body = validated(MessagesBody, await body_of(request))
        backend = await backends.get(body.model)
        choice = _choice(body.tool_choice)
        schema = _schema(body)
        asked = conversation_of(body, calls=choice != "none", plain=schema is not None)
        prompt = await prepare(backend, asked, merge_system=settings.merge_system)
        job = await _job(body, settings, prompt, choice, schema)
        tickets = Tickets()
        turn = Turn(
            backend,
            prompt,
            job,
            tickets,
            budget=_budget(body.thinking),
            one_call=not _parallel(body.tool_choice),
        )
        name = body.model or backend.info.name
        if body.stream:
            await attended(request, tickets, turn.start())
            events = streamed(turn, name)
            return event_stream(
                request, events, tickets, ping_s=settings.ping_s, grace_s=settings.grace_s
            )
        return json_response(await attended(request, tickets, whole(turn, name)))

    @routes.post("/v1/messages/count_tokens", openapi_extra=extra, response_model=None)
    @routes.post(
        "/messages/count_tokens", openapi_extra=extra, response_model=None, include_in_schema=False
    )
    async def count_tokens(request: Request) -> Response:
        body = validated(MessagesBody, await body_of(request))
        backend = await backends.get(body.model)
        asked = conversation_of(body, calls=_choice(body.tool_choice) != "none", plain=False)
        prompt = await prepare(backend, asked, merge_system=settings.merge_system)
        return json_response({"input_tokens": len(prompt.tokens)})

    return routes


async def _job(
    body: MessagesBody,
    settings: Settings,
    prompt: Prompt,
    choice: str,
    schema: Mapping[str, Any] | None,
) -> Job:
    fields = {key: getattr(body, key) for key in ("temperature", "top_k", "top_p")}
    common = validated(Common, fields)
    job = Job(
        tokens=(),
        sampling=sampling_of(common, settings.sampling),
        max_tokens=body.max_tokens,
        stop=stops_of(body.stop_sequences),
    )
    name = (body.tool_choice or {}).get("name") if choice == "tool" else None

    def constrain() -> Job:
        text, triggers = constrained(
            prompt,
            answer=None if schema is None else grammar_of_schema(schema),
            forced=choice in ("any", "tool"),
            only=name,
            parallel=_parallel(body.tool_choice),
        )
        return replace(job, grammar=text, grammar_triggers=triggers)

    return await asyncio.to_thread(constrain)


def _choice(tool_choice: Mapping[str, Any] | None) -> str:
    kind = (tool_choice or {}).get("type", "auto")
    if kind not in ("auto", "any", "tool", "none"):
        raise BadRequest(
            f"tool_choice.type {str(kind)[:40]!r} is not known; use auto, any, tool or none",
            "tool_choice",
        )
    if kind == "tool" and not isinstance((tool_choice or {}).get("name"), str):
        raise BadRequest("tool_choice has no name; name the tool", "tool_choice")
    return str(kind)


def _parallel(tool_choice: Mapping[str, Any] | None) -> bool:
    return (tool_choice or {}).get("disable_parallel_tool_use") is not True


def _budget(thinking: Mapping[str, Any] | None) -> int | None:
    """The most tokens of reasoning, where the client sets a bound."""
    budget = (thinking or {}).get("budget_tokens")
    if budget is None or (thinking or {}).get("type") != "enabled":
        return None
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise BadRequest("thinking.budget_tokens is no positive number", "thinking")
    return budget


def _schema(body: MessagesBody) -> Mapping[str, Any] | None:
    """The JSON schema that the answer must follow, by either of its names."""
    form = body.output_format or (body.output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise BadRequest("output_format is not known; use type json_schema", "output_format")
    schema = form.get("schema")
    if not isinstance(schema, Mapping):
        raise BadRequest("output_format has no schema", "output_format")
    return schema
