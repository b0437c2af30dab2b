"""The page at `/`: a chat, and a live view of where experts are. Its files lie in static/ as they are served.

`/page/state` is what it looks at every second. Knows no dialect: the page itself talks to
`/v1/chat/completions` like any client.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import speculoe_local
from speculoe_local.server.dialects.openai.common import envelope
from speculoe_local.server.http.envelopes import route_class
from speculoe_local.server.http.wire import json_response
from speculoe_local.server.jobs import Backend, Backends, Snapshot
from speculoe_local.server.settings import Settings

__all__ = ["router"]

_FOLDER = Path(__file__).with_name("static")
_FILES = {
    "page.css": "text/css; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, and no other page may frame it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def router(backends: Backends, settings: Settings) -> APIRouter:
    """`/`, its files, and what it asks."""
    routes = APIRouter(route_class=route_class(envelope), include_in_schema=False)

    @routes.get("/")
    async def page() -> Response:
        return Response(_read("index.html"), media_type="text/html", headers=_HEADERS)

    @routes.get("/favicon.ico")
    async def icon() -> Response:
        return Response(_read("icon.svg"), media_type=_FILES["icon.svg"], headers=_HEADERS)

    for name, media_type in _FILES.items():
        routes.add_api_route(f"/page/static/{name}", _file(name, media_type), methods=["GET"])

    @routes.get("/page/state")
    async def state() -> Response:
        loaded = backends.loaded()
        # A look waits for whoever holds the engine's lock; the event loop must not.
        shots = await asyncio.to_thread(lambda: [each.snapshot(layers=True) for each in loaded])
        found = {
            "version": speculoe_local.__version__,
            "loading": backends.progress(),
            "served": [entry.name for entry in backends.entries()],
            "models": [_model(b, shot) for b, shot in zip(loaded, shots, strict=True)],
        }
        return json_response(found, headers={"Cache-Control": "no-store"})

    return routes


def _file(name: str, media_type: str) -> Any:
    async def file() -> Response:
        return Response(_read(name), media_type=media_type, headers=_HEADERS)

    return file


@lru_cache(maxsize=8)
def _read(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def _model(backend: Backend, shot: Snapshot) -> dict[str, Any]:
    """A loaded model as the page shows it. Counters since loading, durations in seconds."""
    info = backend.info
    return {
        "name": info.name,
        "architecture": info.entry.architecture,
        "quantization": info.entry.quantization,
        "mode": info.mode,
        "exactness": info.exactness,
        "tier": info.tier,
        "residency": shot.residency,
        "n_expert": info.entry.n_expert,
        "n_expert_used": info.entry.n_expert_used,
        "n_ctx": shot.n_ctx,
        "lanes": [
            {"busy": lane.job is not None, "held": lane.n_past, "decoded": lane.n_decoded}
            for lane in shot.lanes
        ],
        "queued": shot.queued,
        "kv_tokens": shot.kv_tokens,
        "kv_size": shot.kv_size,
        "prompt_tokens": shot.prompt_tokens,
        "cached_tokens": shot.cached_tokens,
        # Answers count once they are over; those under way are still in their lanes.
        "tokens": shot.predicted_tokens + sum(lane.n_decoded for lane in shot.lanes),
        "predicted_s": shot.predicted_s,
        "experts": {
            **asdict(shot.slots),
            "recall": shot.slots.recall,
            "precision_nonresident": shot.slots.precision_nonresident,
        },
        "layers": [asdict(layer) for layer in shot.layers],
    }
