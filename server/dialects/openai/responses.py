"""/v1/responses of the OpenAI dialect, stateless: each request brings the whole conversation.

    input items -> messages -> Conversation -> Prompt -> Turn -> responses_reply

Tools that only a vendor's servers could run are left out, never refused: agents offer them unasked. Knows
nothing of how answers are written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from speculoe_local.server.dialects.fields import Common, job_of, ping_of
from speculoe_local.server.dialects.openai.chat import Choice, choice_of, strict_names
from speculoe_local.server.dialects.openai.common import OpenAIRoute, add_route, model_name
from speculoe_local.server.dialects.openai.responses_reply import ResponseWriter, streamed, whole
from speculoe_local.server.dialects.turn import Turn, constrained
from speculoe_local.server.errors import BadRequest, GrammarError
from speculoe_local.server.grammar.form import form_of
from speculoe_local.server.http.wire import (
    Tickets,
    attended,
    body_of,
    body_schema,
    event_stream,
    json_response,
    validated,
)
from speculoe_local.server.jobs import Backends
from speculoe_local.server.prompt.chat import Conversation, prepare
from speculoe_local.server.settings import Settings

__all__ = ["ResponsesBody", "messages_of", "router"]


class ResponsesBody(Common):
    """/v1/responses."""

    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    top_logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    include: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def router(backends: Backends, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])

    async def responses(request: Request) -> Response:
        body = validated(ResponsesBody, await body_of(request))
        asked, choice = _conversation(body)
        backend = await backends.get(body.model)
        job = job_of(body, settings, backend.vocab, max_tokens=body.max_output_tokens)
        if _wants_logprobs(body):
            job = replace(job, top_logprobs=body.top_logprobs or 0)
        form = (body.text or {}).get("format")
        strict = frozenset(strict_names(body.tools))
        prompt = await prepare(backend, asked, merge_system=settings.merge_system)

        def constrain() -> tuple[str | None, tuple[str, ...]]:
            try:
                return constrained(
                    prompt,
                    answer=None if form is None else form_of(form),
                    forced=choice.forced,
                    only=choice.only,
                    parallel=body.parallel_tool_calls is not False,
                    strict=strict,
                )
            except GrammarError as error:
                raise GrammarError(str(error), "text" if form is not None else "tools") from None

        grammar, triggers = await asyncio.to_thread(constrain)
        job = replace(job, grammar=grammar, grammar_triggers=triggers)
        tickets = Tickets()
        turn = Turn(backend, prompt, job, tickets, one_call=body.parallel_tool_calls is False)
        writer = ResponseWriter(
            turn, backend.vocab, _echo(body, model_name(body.model, backend), job.sampling)
        )
        if body.stream:
            await attended(request, tickets, turn.start())
            return event_stream(
                request,
                streamed(turn, writer),
                tickets,
                ping_s=ping_of(body, settings),
                grace_s=settings.grace_s,
            )
        return json_response(await attended(request, tickets, whole(turn, writer)))

    async def input_tokens(request: Request) -> Response:
        body = validated(ResponsesBody, await body_of(request))
        asked, _ = _conversation(body)
        backend = await backends.get(body.model)
        prompt = await prepare(backend, asked, merge_system=settings.merge_system)
        found = {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}
        return json_response(found)

    extra = body_schema(ResponsesBody)
    add_route(routes, "/v1/responses", responses, openapi=extra, summary="Answer a conversation")
    add_route(
        routes,
        "/v1/responses/input_tokens",
        input_tokens,
        openapi=extra,
        summary="Count its tokens",
    )
    return routes


def _conversation(body: ResponsesBody) -> tuple[Conversation, Choice]:
    if body.previous_response_id or body.conversation:
        field = "previous_response_id" if body.previous_response_id else "conversation"
        raise BadRequest(f"{field}: nothing is kept here; send the whole conversation", field)
    choice = choice_of(body.tool_choice)
    effort = (body.reasoning or {}).get("effort")
    asked = Conversation(
        messages=messages_of(body.input, body.instructions),
        tools=body.tools,
        calls=choice.calls,
        variables=body.chat_template_kwargs,
        think=effort if isinstance(effort, str) else None,
        continue_last=False,
    )
    return asked, choice


def messages_of(given: str | list[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Input items as messages of chat completions. Raises BadRequest for references to what was not kept.

    Calls, and the reasoning before them, join the assistant's message they belong to. Kinds of items that
    are not known are left out.
    """
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    thought: list[str] = []
    for i, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise BadRequest(f"input[{i}] is no object", "input")
        kind = item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role", "user"), "content": item.get("content")}
            if message["role"] == "assistant" and thought:
                message["reasoning_content"] = "\n\n".join(thought)
            thought = []
            found.append(message)
        elif kind == "reasoning":
            thought += _texts(item.get("content")) or _texts(item.get("summary"))
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(found, item, thought)
            thought = []
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item.get("output")
            text = output if isinstance(output, str) else "\n".join(_texts(output))
            found.append(
                {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text}
            )
        elif kind == "item_reference":
            raise BadRequest(f"input[{i}] refers to an item that is not kept; send it", "input")
    return found


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], thought: list[str]) -> None:
    arguments = item.get("arguments", item.get("input"))
    call = {
        "id": str(item.get("call_id", item.get("id", ""))),
        "type": "function",
        "function": {"name": str(item.get("name", "")), "arguments": arguments},
    }
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant":
        last = {"role": "assistant", "content": None}
        messages.append(last)
    if thought:
        last["reasoning_content"] = "\n\n".join(
            [*([last["reasoning_content"]] if "reasoning_content" in last else []), *thought]
        )
    last.setdefault("tool_calls", []).append(call)


def _texts(parts: Any) -> list[str]:
    if isinstance(parts, str):
        return [parts]
    if not isinstance(parts, list):
        return []
    return [p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)]


def _wants_logprobs(body: ResponsesBody) -> bool:
    included = "message.output_text.logprobs" in (body.include or ())
    return included or body.top_logprobs is not None


def _echo(body: ResponsesBody, model: str, sampling: Any) -> dict[str, Any]:
    """Fields of a response that say what was asked for."""
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": sampling.temp,
        "top_p": sampling.top_p,
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool for tool in body.tools or () if isinstance(tool, dict)],
        "truncation": "disabled",
        "metadata": body.metadata or {},
    }
