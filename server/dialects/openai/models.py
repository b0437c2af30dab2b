"""/v1/models: what can be asked for, and with how much context it runs. Knows no chat."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from speculoe_local.server.dialects.openai.common import add_route
from speculoe_local.server.errors import UnknownModel
from speculoe_local.server.http.wire import json_response
from speculoe_local.server.jobs import Backends, ModelEntry

__all__ = ["add_models"]


def add_models(routes: APIRouter, backends: Backends) -> None:
    """GET /v1/models and /v1/models/NAME. Neither loads a model."""

    async def models() -> Response:
        running = {backend.info.name: backend.info.n_ctx for backend in backends.loaded()}
        listed = [_entry(each, running.get(each.name)) for each in backends.entries()]
        return json_response({"object": "list", "data": listed, "models": _named(listed)})

    async def model(name: str) -> Response:
        running = {backend.info.name: backend.info.n_ctx for backend in backends.loaded()}
        known = backends.entries()
        for each in known:
            if each.name == name:
                return json_response(_entry(each, running.get(name)))
        raise UnknownModel(name, tuple(each.name for each in known))

    add_route(routes, "/v1/models", models, method="GET", summary="Models that are served")
    add_route(routes, "/v1/models/{name:path}", model, method="GET", summary="One of them")


def _entry(entry: ModelEntry, n_ctx: int | None) -> dict[str, Any]:
    """`n_ctx` is what it runs with: clients size their prompts by it, not by the training's."""
    meta = {
        "n_ctx": n_ctx,
        "n_ctx_train": entry.n_ctx_train,
        "n_embd": entry.n_embd,
        "n_vocab": entry.n_vocab,
        "n_params": entry.n_params,
        "n_expert": entry.n_expert,
        "n_expert_used": entry.n_expert_used,
        "size": entry.size_bytes,
        "architecture": entry.architecture,
        "quantization": entry.quantization,
    }
    return {
        "id": entry.name,
        "object": "model",
        "created": int(entry.modified),
        "owned_by": "llamacpp",  # what clients look for before they use llama-server's own routes
        "meta": {key: value for key, value in meta.items() if value is not None},
        **({"max_model_len": n_ctx} if n_ctx is not None else {}),
        "status": {"value": "loaded" if entry.loaded else "unloaded"},
    }


def _named(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same list as llama-server gives it a second time, by name."""
    return [
        {"name": each["id"], "model": each["id"], "capabilities": ["completion"]} for each in listed
    ]
