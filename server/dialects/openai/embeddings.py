"""/v1/embeddings, and llama-server's /embedding: texts as vectors of unit length. Knows no answers."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from speculoe_local.server.dialects.many_prompts import prompts_of, run_batch
from speculoe_local.server.dialects.openai.common import OpenAIRoute, add_route, model_name
from speculoe_local.server.errors import BadRequest
from speculoe_local.server.http.wire import (
    Tickets,
    attended,
    body_of,
    body_schema,
    json_response,
    validated,
)
from speculoe_local.server.jobs import Backend, Backends, Job
from speculoe_local.server.settings import Settings

__all__ = ["EmbeddingBody", "router"]

Vectors = list[npt.NDArray[np.float32]]


class EmbeddingBody(BaseModel):
    """/v1/embeddings."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class ContentBody(BaseModel):
    """/embedding."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    content: str | list[Any]


def router(backends: Backends, settings: Settings) -> APIRouter:
    routes = APIRouter(route_class=OpenAIRoute, tags=["OpenAI"])

    async def embeddings(request: Request) -> Response:
        body = validated(EmbeddingBody, await body_of(request))
        backend = await backends.get(body.model)
        n_embd = backend.info.entry.n_embd
        if body.dimensions is not None and body.dimensions > n_embd:
            raise BadRequest(
                f"dimensions {body.dimensions} is above the model's {n_embd}", "dimensions"
            )
        vectors, n_tokens = await _vectors(request, backend, body.input, "input")
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": _encoded(_cut(vector, body.dimensions), body.encoding_format),
            }
            for i, vector in enumerate(vectors)
        ]
        return json_response(
            {
                "object": "list",
                "data": data,
                "model": model_name(body.model, backend),
                "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            }
        )

    async def embedding(request: Request) -> Response:
        body = validated(ContentBody, await body_of(request))
        backend = await backends.get(body.model)
        vectors, _ = await _vectors(request, backend, body.content, "content")
        found = [{"index": i, "embedding": [v.tolist()]} for i, v in enumerate(vectors)]
        return json_response(found)

    extra = body_schema(EmbeddingBody)
    add_route(routes, "/v1/embeddings", embeddings, openapi=extra, summary="Texts as vectors")
    add_route(
        routes, "/embedding", embedding, openapi=body_schema(ContentBody), summary="The same, bare"
    )
    return routes


async def _vectors(
    request: Request, backend: Backend, texts: Any, field: str
) -> tuple[Vectors, int]:
    """One vector [n_embd] per text, and the tokens of all."""
    prompts = await prompts_of(texts, backend.vocab, field=field, special=False)
    jobs = [Job(tokens=tokens, embeddings=True, max_tokens=0) for tokens, _ in prompts]
    found: dict[int, npt.NDArray[np.float32]] = {}
    tickets = Tickets()

    async def work() -> None:
        async for place, delta in run_batch(backend, jobs, tickets):
            if delta.embedding is not None:
                found[place] = delta.embedding

    await attended(request, tickets, work())
    return [found[i] for i in range(len(jobs))], sum(len(job.tokens) for job in jobs)


def _cut(vector: npt.NDArray[np.float32], n: int | None) -> npt.NDArray[np.float32]:
    """The first `n` values, of unit length again."""
    if n is None or n == len(vector):
        return vector
    short = vector[:n]
    length = float(np.linalg.norm(short))
    return (short / length if length else short).astype(np.float32)


def _encoded(vector: npt.NDArray[np.float32], encoding: str | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
