"""All dialects on one address: routes, errors of what has no route, and 503 until the model is there.

Knows which dialects there are, nothing of what they say.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.responses import Response

import speculoe_local
from speculoe_local.server.dialects.anthropic import routes as anthropic
from speculoe_local.server.dialects.by_path import envelope_for
from speculoe_local.server.dialects.llama import routes as llama
from speculoe_local.server.dialects.ollama import routes as ollama
from speculoe_local.server.dialects.openai import chat, completions, embeddings, responses
from speculoe_local.server.errors import Fault, Loading
from speculoe_local.server.http.envelopes import fault_response
from speculoe_local.server.http.logs import Logged
from speculoe_local.server.http.metrics import Metrics
from speculoe_local.server.http.paths import App, Forgiving, Receive, Scope, Send
from speculoe_local.server.http.safety import Guarded
from speculoe_local.server.http.wire import json_response
from speculoe_local.server.jobs import Backends
from speculoe_local.server.page import routes as page
from speculoe_local.server.settings import Settings

__all__ = ["create_app"]

_DIALECTS = (
    chat,
    completions,
    embeddings,
    responses,
    llama,
    ollama,
    anthropic,
    page,
)
# What is answered before the model is there.
_EARLY = ("/", "/health", "/v1/health", "/metrics", "/openapi.json", "/api/version")
# What is asked here is nobody else's business, whatever the environment says.
_NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
_KINDS = {404: "not_found_error", 405: "invalid_request_error"}


def create_app(backends: Backends, settings: Settings, metrics: Metrics) -> App:
    """The server as an ASGI application; the caller starts and closes `backends`, and lets `metrics`
    observe them."""
    api = FastAPI(
        title="speculoe-local",
        version=speculoe_local.__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    for dialect in _DIALECTS:
        api.include_router(dialect.router(backends, settings))
    api.include_router(metrics.router(backends, settings))
    api.add_exception_handler(HTTPException, _no_route)
    api.add_exception_handler(Exception, _failed)
    return Logged(Guarded(Ready(Forgiving(api), backends), settings, envelope_for), settings)


class Ready:
    """503 with the progress of loading until the first model is there."""

    def __init__(self, app: App, backends: Backends) -> None:
        self._app = app
        self._backends = backends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            progress = self._backends.progress()
            if progress is not None and not _is_early(scope["path"]):
                refusal = fault_response(envelope_for(scope["path"]), Loading(progress))
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_early(path: str) -> bool:
    return path in _EARLY or path.startswith("/page/")


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = request.url.path
    message = {
        404: f"{request.method} {path[:200]} is not known here; GET /openapi.json lists what is",
        405: f"{request.method} is not how {path[:200]} is asked",
    }.get(status, str(error))
    headers = error.headers if isinstance(error, HTTPException) else None
    fault = Fault(status, _KINDS.get(status, "server_error"), message)
    return json_response(envelope_for(path)(fault), status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    return fault_response(envelope_for(request.url.path), error)
