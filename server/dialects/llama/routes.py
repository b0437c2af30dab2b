"""llama-server's own routes: /completion, /infill, /tokenize, /detokenize, /apply-template, /props, /slots,
/health. Knows how they are asked; `generate` knows how answers are written.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

import speculoe_local
from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.dialects.fields import ping_of
from speculoe_local.server.dialects.llama.generate import (
    CompletionBody,
    InfillBody,
    generations,
    selected,
    settings_of,
    streamed,
)
from speculoe_local.server.dialects.many_prompts import run_batch
from speculoe_local.server.dialects.openai.common import OpenAIRoute, add_route
from speculoe_local.server.errors import BadRequest, Unsupported
from speculoe_local.server.http.wire import (
    Tickets,
    attended,
    begun,
    body_of,
    body_schema,
    event_stream,
    json_response,
    validated,
)
from speculoe_local.server.jobs import Backend, BackendInfo, Backends, Job, LaneView, ModelEntry
from speculoe_local.server.prompt.chat import Conversation, prepare
from speculoe_local.server.settings import Settings

__all__ = ["router"]


class TokenizeBody(BaseModel):
    """/tokenize, by llama-server's names or vLLM's (`prompt`, `add_special_tokens`)."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    content: str | list[Any] | None = None
    prompt: str | list[Any] | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(BaseModel):
    """/detokenize."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    tokens: list[int]


class TemplateBody(BaseModel):
    """/apply-template."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    messages: list[Any]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


def router(backends: Backends, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=OpenAIRoute, tags=["llama-server"])
    _add_generating(routes, backends, settings)
    _add_tokenizing(routes, backends, settings)
    _add_state(routes, backends, settings)
    return routes


def _add_generating(routes: APIRouter, backends: Backends, settings: Settings) -> None:
    async def completion(request: Request) -> Response:
        body = validated(CompletionBody, await body_of(request))
        return await _generate(request, body, await backends.get(body.model), settings)

    async def infill(request: Request) -> Response:
        body = validated(InfillBody, await body_of(request))
        return await _generate(request, body, await backends.get(body.model), settings)

    add_route(
        routes,
        "/completion",
        completion,
        openapi=body_schema(CompletionBody),
        summary="Continue a text, llama-server's way",
    )
    add_route(
        routes, "/infill", infill, openapi=body_schema(InfillBody), summary="Fill a gap in code"
    )


async def _generate(
    request: Request, body: CompletionBody, backend: Backend, settings: Settings
) -> Response:
    tickets = Tickets()
    found = await generations(body, backend, settings, tickets)
    jobs = [one.job for one in found]
    for one in found:
        one.tickets = tickets.part()
    source = run_batch(backend, jobs, tickets, parts=[one.tickets for one in found])
    if body.stream:
        items = await attended(request, tickets, begun(source))
        return event_stream(
            request,
            streamed(items, found),
            tickets,
            ping_s=ping_of(body, settings),
            grace_s=settings.grace_s,
        )

    async def whole() -> None:
        async for place, delta in source:
            if not found[place].done:
                found[place].see(delta)

    await attended(request, tickets, whole())
    answers = [selected(one.last(stream=False), body.response_fields) for one in found]
    return json_response(answers if len(answers) > 1 else answers[0])


def _add_tokenizing(routes: APIRouter, backends: Backends, settings: Settings) -> None:
    async def tokenize(request: Request) -> Response:
        body = validated(TokenizeBody, await body_of(request))
        backend = await backends.get(body.model)
        vocab = backend.vocab
        # vLLM's clients count on special tokens unless they say otherwise, llama-server's do not.
        if body.prompt is not None and body.content is None:
            text, special = body.prompt, body.add_special_tokens is not False
        else:
            text, special = body.content or "", bool(body.add_special)
        parse = body.parse_special is not False
        tokens = await asyncio.to_thread(_tokens, text, vocab, special, parse=parse)
        shown = [_piece(token, vocab) for token in tokens] if body.with_pieces else tokens
        return json_response(
            {"tokens": shown, "count": len(tokens), "max_model_len": backend.info.n_ctx}
        )

    async def detokenize(request: Request) -> Response:
        body = validated(DetokenizeBody, await body_of(request))
        vocab = (await backends.get(body.model)).vocab
        for token in body.tokens:
            _check(token, vocab)
        pieces = b"".join(vocab.piece(token, special=True) for token in body.tokens)
        text = pieces.decode("utf-8", "replace")
        return json_response({"content": text, "prompt": text})

    async def tokenizer_info(request: Request) -> Response:
        backend = await backends.get(request.query_params.get("model"))
        vocab = backend.vocab
        return json_response(
            {
                "bos_token": vocab.text_of(vocab.bos),
                "eos_token": vocab.text_of(vocab.eos),
                "pad_token": vocab.text_of(vocab.eos),
                "vocab_size": vocab.size,
                "model_max_length": backend.info.n_ctx,
                "chat_template": backend.info.template,
            }
        )

    async def apply_template(request: Request) -> Response:
        body = validated(TemplateBody, await body_of(request))
        asked = Conversation(
            messages=body.messages,
            tools=body.tools,
            variables=body.chat_template_kwargs,
            think=body.reasoning_effort,
        )
        backend = await backends.get(body.model)
        prompt = await prepare(backend, asked, merge_system=settings.merge_system)
        return json_response({"prompt": prompt.text})

    add_route(
        routes, "/tokenize", tokenize, openapi=body_schema(TokenizeBody), summary="Text to tokens"
    )
    add_route(
        routes,
        "/detokenize",
        detokenize,
        openapi=body_schema(DetokenizeBody),
        summary="Tokens to text",
    )
    add_route(
        routes, "/tokenizer_info", tokenizer_info, method="GET", summary="Special tokens, as vLLM"
    )
    add_route(
        routes,
        "/apply-template",
        apply_template,
        openapi=body_schema(TemplateBody),
        summary="The prompt that a conversation makes",
    )


def _add_state(routes: APIRouter, backends: Backends, settings: Settings) -> None:
    async def health() -> Response:
        progress = backends.progress()
        if progress is None:
            return json_response({"status": "ok"})
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
        body = {"status": "loading model", "progress": round(progress, 4), "error": error}
        return json_response(body, 503, {"Retry-After": "2"})

    async def props(request: Request) -> Response:
        name = request.query_params.get("model") or None
        load = request.query_params.get("autoload", "true").lower() not in ("false", "0")
        entry, info, vocab = await _looked_up(backends, name, load=load)
        return json_response(_props(entry, info, vocab, settings))

    async def slots(request: Request) -> Response:
        name = request.query_params.get("model") or None
        running = [b for b in backends.loaded() if name is None or b.info.name == name]
        if name is not None and not running and backends.strict:
            await backends.get(name)  # says that it is unknown
        lanes = [
            _lane(lane, backend.info)
            for backend in running[:1] or ()
            for lane in backend.snapshot().lanes
        ]
        if "fail_on_no_slot" in request.query_params and all(
            lane["is_processing"] for lane in lanes
        ):
            error = {"message": "no slot available", "type": "unavailable_error", "code": 503}
            return json_response({"error": error}, 503)
        return json_response(lanes)

    async def refused(request: Request) -> Response:
        raise Unsupported(
            f"{request.method} {request.url.path[:80]} is not offered; restart the server to change it"
        )

    async def adapters() -> Response:
        return json_response([])

    for path in ("/health", "/v1/health"):
        add_route(routes, path, health, method="GET", bare=False, summary="Whether it is ready")
    add_route(routes, "/props", props, method="GET", summary="What runs, and how")
    add_route(routes, "/slots", slots, method="GET", summary="Where answers run")
    add_route(routes, "/slots/{slot}", refused, listed=False)
    add_route(routes, "/lora-adapters", adapters, method="GET", summary="There are none")


async def _looked_up(
    backends: Backends, name: str | None, *, load: bool
) -> tuple[ModelEntry, BackendInfo | None, Vocabulary | None]:
    """A model by name; with `load` False one that rests is not woken for it."""
    if not load:
        for entry in backends.entries():
            if entry.name == name or (name is None and entry == backends.entries()[0]):
                for backend in backends.loaded():
                    if backend.info.name == entry.name:
                        return entry, backend.info, backend.vocab
                return entry, None, None
    backend = await backends.get(name)
    return backend.info.entry, backend.info, backend.vocab


def _props(
    entry: ModelEntry, info: BackendInfo | None, vocab: Vocabulary | None, settings: Settings
) -> dict[str, Any]:
    params = settings_of(Job(tokens=(), sampling=settings.sampling), CompletionBody())
    found: dict[str, Any] = {
        "default_generation_settings": {
            "params": params,
            "n_ctx": info.n_ctx if info is not None else 0,
        },
        "total_slots": info.n_parallel if info is not None else settings.parallel,
        "model_alias": entry.name,
        "model_path": str(entry.path),
        "modalities": {"vision": False, "audio": False},
        "chat_template": entry.template or "",
        # Zed shows no tools without them; a template that knows none is taught by instructions.
        "chat_template_caps": {"supports_tools": True, "supports_tool_calls": True},
        "bos_token": vocab.text_of(vocab.bos) if vocab is not None else "",
        "eos_token": vocab.text_of(vocab.eos) if vocab is not None else "",
        "build_info": f"speculoe-local {speculoe_local.__version__}",
        "is_sleeping": info is None,
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
    }
    if info is not None:
        found |= {
            "mode": info.mode,
            "exactness": info.exactness,
            "tier": info.tier,
            "residency": round(info.residency, 4),
            "budget_bytes": info.budget_bytes,
        }
    return found


def _lane(lane: LaneView, info: BackendInfo) -> dict[str, Any]:
    """A slot as llama-server shows it, without what is being said in it."""
    limit = lane.job.max_tokens if lane.job is not None else None
    return {
        "id": lane.id,
        "id_task": lane.ticket,
        "n_ctx": info.n_ctx,
        "speculative": False,
        "is_processing": lane.job is not None,
        "n_prompt_tokens": lane.n_prompt,
        "n_prompt_tokens_processed": min(lane.n_past, lane.n_prompt),
        "params": _shown_settings(lane.job) if lane.job is not None else {},
        "next_token": [
            {
                "has_next_token": lane.job is not None,
                "n_remain": -1 if limit is None else max(limit - lane.n_decoded, 0),
                "n_decoded": lane.n_decoded,
            }
        ],
    }


def _shown_settings(job: Job) -> dict[str, Any]:
    found = settings_of(job, CompletionBody())
    return {key: value for key, value in found.items() if key not in ("grammar", "stop")}


def _tokens(text: Any, vocab: Vocabulary, special: bool, *, parse: bool) -> list[int]:
    parts = [text] if isinstance(text, str) else text
    found: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            found += vocab.tokenize(part, special=parse, add_bos=special and i == 0)
        elif isinstance(part, int) and not isinstance(part, bool):
            _check(part, vocab)
            found.append(part)
        else:
            raise BadRequest("content has an entry that is no text and no token", "content")
    return found


def _check(token: int, vocab: Vocabulary) -> None:
    if not 0 <= token < vocab.size:
        raise BadRequest(f"token {token} is unknown, the model's are 0..{vocab.size - 1}", "tokens")


def _piece(token: int, vocab: Vocabulary) -> dict[str, Any]:
    piece = vocab.piece(token, special=True)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}
