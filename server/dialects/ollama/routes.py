"""The Ollama dialect: /api/chat, /api/generate, /api/embed, and what is asked before them.

A line of JSON per step, never a comment between them; durations in nanoseconds; arguments of calls as
objects. A prompt that does not fit is refused with numbers, not cut. Knows no engine.

API: docs/api.md of ollama/ollama.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from speculoe_local.server.dialects.fields import Common, sampling_of, stops_of
from speculoe_local.server.dialects.ollama import models
from speculoe_local.server.dialects.ollama.reply import Clock, Reply, answer, envelope, message
from speculoe_local.server.dialects.turn import Turn, constrained
from speculoe_local.server.errors import BadRequest, Unsupported
from speculoe_local.server.grammar.form import grammar_of_schema
from speculoe_local.server.grammar.json_rules import JSON_OBJECT
from speculoe_local.server.http.envelopes import route_class
from speculoe_local.server.http.wire import (
    Tickets,
    attended,
    body_of,
    body_schema,
    deltas,
    json_response,
    validated,
)
from speculoe_local.server.jobs import Backend, Backends, Job
from speculoe_local.server.prompt.chat import Conversation, Prompt, bare, prepare
from speculoe_local.server.prompt.fim import fim_tokens
from speculoe_local.server.settings import Settings

__all__ = ["envelope", "router"]

_Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    name: str | None = None  # what older clients call it
    stream: bool | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class ChatBody(_Body):
    """/api/chat."""

    messages: list[Any] | None = None
    tools: list[Any] | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class GenerateBody(_Body):
    """/api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    images: list[Any] | None = None
    raw: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    context: list[int] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class EmbedBody(_Body):
    """/api/embed; `prompt` is what /api/embeddings has in place of `input`."""

    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1)


def router(backends: Backends, settings: Settings) -> APIRouter:
    """All routes under /api."""
    routes = APIRouter(route_class=route_class(envelope), tags=["Ollama"])

    def post(path: str, body: type[BaseModel]) -> Callable[[_Endpoint], _Endpoint]:
        return routes.post(f"/api/{path}", openapi_extra=body_schema(body), response_model=None)

    @routes.get("/api/version")
    async def version() -> Response:
        return json_response({"version": models.API_VERSION})

    @routes.get("/api/tags")
    async def tags() -> Response:
        return json_response({"models": [models.tag(e) for e in backends.entries()]})

    @routes.get("/api/ps")
    async def ps() -> Response:
        return json_response({"models": [models.ps_row(b) for b in backends.loaded()]})

    @post("show", _Body)
    async def show(request: Request) -> Response:
        body = validated(_Body, await body_of(request))
        backend = await _loaded(backends, _name(body))
        if backend is not None:
            return json_response(models.shown(backend.info.entry, backend, backend.info.n_ctx))
        entry = next((e for e in backends.entries() if e.name == _name(body)), None)
        if entry is None:  # raises UnknownModel, or loads the default one
            found = await backends.get(_name(body))
            return json_response(models.shown(found.info.entry, found, found.info.n_ctx))
        n_ctx = min(settings.engine.ctx, entry.n_ctx_train or settings.engine.ctx)
        return json_response(models.shown(entry, None, n_ctx))

    @post("chat", ChatBody)
    async def chat(request: Request) -> Response:
        body = validated(ChatBody, await body_of(request))
        clock = Clock()
        if not body.messages:
            return await _load_or_unload(backends, body, {"message": message("")}, clock)
        backend = await backends.get(_name(body))
        clock.loaded()
        grammar = await _grammar(body.format)
        asked = Conversation(
            messages=[_incoming(m, i) for i, m in enumerate(body.messages)],
            tools=body.tools,
            think=_think(body.think, grammar),
        )
        prompt = await prepare(backend, asked, merge_system=settings.merge_system)
        job = await _constrain(_job(body, settings, backend), prompt, grammar)
        reply = Reply(_name(body) or backend.info.name, clock, chat=True)
        return await answer(
            request, reply, partial(Turn, backend, prompt, job), stream=body.stream is not False
        )

    @post("generate", GenerateBody)
    async def generate(request: Request) -> Response:
        body = validated(GenerateBody, await body_of(request))
        clock = Clock()
        if not body.prompt and not body.suffix and not body.context:
            return await _load_or_unload(backends, body, {"response": ""}, clock)
        if body.images:
            raise BadRequest("images are given; this server reads text", "images")
        if body.template and not body.raw:
            raise BadRequest("template is Ollama's own notation; leave it out", "template")
        backend = await backends.get(_name(body))
        clock.loaded()
        grammar = await _grammar(body.format)
        prompt = await _generate_prompt(backend, body, settings, grammar)
        job = await _constrain(_job(body, settings, backend), prompt, grammar)
        context = None if body.raw or body.suffix else prompt.tokens
        reply = Reply(_name(body) or backend.info.name, clock, context=context)
        return await answer(
            request, reply, partial(Turn, backend, prompt, job), stream=body.stream is not False
        )

    @post("embed", EmbedBody)
    async def embed(request: Request) -> Response:
        body = validated(EmbedBody, await body_of(request))
        clock = Clock()
        texts = [body.input] if isinstance(body.input, str) else list(body.input or ())
        backend = await backends.get(_name(body))
        clock.loaded()
        vectors, count = await _embed(request, backend, texts, body)
        return json_response(
            {
                "model": _name(body) or backend.info.name,
                "embeddings": vectors,
                "total_duration": clock.total_ns(),
                "load_duration": clock.load_ns,
                "prompt_eval_count": count,
            }
        )

    @post("embeddings", EmbedBody)
    async def embeddings(request: Request) -> Response:
        body = validated(EmbedBody, await body_of(request))
        backend = await backends.get(_name(body))
        vectors, _ = await _embed(request, backend, [body.prompt or ""], body)
        return json_response({"embedding": vectors[0]})

    @post("pull", _Body)
    async def pull(request: Request) -> Response:
        body = validated(_Body, await body_of(request))
        name = _name(body)
        if name in {entry.name for entry in backends.entries()}:
            return json_response({"status": "success"})
        raise Unsupported(
            f"model {str(name)[:200]!r} is not here and HTTP cannot fetch it; "
            "use `speculoe-local pull`, then serve it"
        )

    return routes


def _incoming(message: Any, at: int) -> Any:
    """A message as Ollama's clients send it, in OpenAI's form."""
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{at}] is no object", "messages")
    if message.get("images"):
        raise BadRequest(f"messages[{at}] has images; this server reads text", "messages")
    found = dict(message)
    name = message.get("tool_name")
    if isinstance(name, str):
        found["name"] = name
    return found


def _name(body: _Body) -> str | None:
    return body.model or body.name


def _think(think: bool | str | None, grammar: str | None) -> bool | str | None:
    """An answer in a set form comes without reasoning, unless that was asked for."""
    return False if think is None and grammar is not None else think


async def _grammar(form: str | dict[str, Any] | None) -> str | None:
    if form is None or form == "":
        return None
    if form == "json":
        return JSON_OBJECT
    if isinstance(form, str):
        raise BadRequest(f"format {form[:40]!r} is not known; use json or a schema", "format")
    return await asyncio.to_thread(grammar_of_schema, form)


def _job(body: ChatBody | GenerateBody, settings: Settings, backend: Backend) -> Job:
    options = dict(body.options or {})
    common = validated(Common, {key: options[key] for key in options if key in Common.model_fields})
    limit = options.get("num_predict")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise BadRequest("options.num_predict is no whole number", "options")
    return Job(
        tokens=(),
        sampling=sampling_of(common, settings.sampling),
        max_tokens=limit if limit is not None and limit >= 0 else None,
        stop=stops_of(common.stop),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


async def _constrain(job: Job, prompt: Prompt, grammar: str | None) -> Job:
    text, triggers = await asyncio.to_thread(constrained, prompt, answer=grammar)
    return replace(job, grammar=text, grammar_triggers=triggers)


async def _generate_prompt(
    backend: Backend, body: GenerateBody, settings: Settings, grammar: str | None
) -> Prompt:
    text = body.prompt or ""
    if body.suffix:
        room = backend.info.n_ctx - max(64, min(1024, backend.info.n_ctx // 4))
        tokens = fim_tokens(backend.vocab, text, body.suffix, room=room)
        return bare(backend.vocab, tokens=tokens)
    if body.raw:
        return await asyncio.to_thread(bare, backend.vocab, text)
    messages = [{"role": "user", "content": text}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    asked = Conversation(messages=messages, think=_think(body.think, grammar))
    prompt = await prepare(backend, asked, merge_system=settings.merge_system)
    if not body.context:
        return prompt
    begins = backend.vocab.adds_bos and prompt.tokens[:1] == (backend.vocab.bos,)
    return replace(prompt, tokens=(*body.context, *prompt.tokens[int(begins) :]))


async def _embed(
    request: Request, backend: Backend, texts: Sequence[str], body: EmbedBody
) -> tuple[list[list[float]], int]:
    """Unit vectors of texts, and how many tokens these have."""
    lists = [await asyncio.to_thread(backend.vocab.tokenize, text) for text in texts]
    if body.truncate is not False:
        lists = [tokens[: backend.info.n_ctx - 1] for tokens in lists]
    if body.dimensions is not None and body.dimensions > backend.info.entry.n_embd:
        raise BadRequest(
            f"dimensions {body.dimensions} exceed the model's {backend.info.entry.n_embd}",
            "dimensions",
        )
    tickets = Tickets()

    async def run() -> list[list[float]]:
        found: list[list[float]] = []
        for at in range(0, len(lists), backend.info.n_parallel):
            some = lists[at : at + backend.info.n_parallel]
            jobs = [Job(tokens=tuple(tokens), embeddings=True, max_tokens=0) for tokens in some]
            vectors: dict[int, list[float]] = {}
            async for place, delta in await deltas(await tickets.submit(backend, jobs)):
                if delta.embedding is not None:
                    vectors[place] = _unit(delta.embedding[: body.dimensions])
            found += [vectors[place] for place in range(len(some))]
        return found

    return await attended(request, tickets, run()), sum(map(len, lists))


async def _loaded(backends: Backends, name: str | None) -> Backend | None:
    """The model of that name if it is in memory."""
    for backend in backends.loaded():
        if name == backend.info.name or (not backends.strict and name not in _names(backends)):
            return backend
    return None


def _names(backends: Backends) -> set[str]:
    return {entry.name for entry in backends.entries()}


async def _load_or_unload(
    backends: Backends, body: _Body, empty: dict[str, Any], clock: Clock
) -> Response:
    """What a request without words means: get the model ready, or drop it (`keep_alive` 0)."""
    name = _name(body)
    backend = await _loaded(backends, name)
    dropped = str(body.keep_alive).strip().rstrip("smh") in ("0", "0.0")
    if dropped:
        if backend is not None:
            await backends.unload(backend.info.name)
    else:
        backend = await backends.get(name)
        clock.loaded()
    shown = name or (backend.info.name if backend is not None else "")
    found = {
        "model": shown,
        "created_at": models.iso(time.time()),
        **empty,
        "done": True,
        "done_reason": "unload" if dropped else "load",
        "total_duration": clock.total_ns(),
        "load_duration": clock.load_ns,
    }
    return json_response(found)


def _unit(vector: npt.NDArray[np.float32]) -> list[float]:
    length = float(np.linalg.norm(vector)) or 1.0
    return [float(x) / length for x in vector]
