"""One line per request on standard error, and an id by which client and log mean the same request.

Lines are `key=value`, or JSON. They never show text of prompts or answers unless the server was told to.
ASGI, around everything else. Knows no dialect.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import secrets
import sys
import time
from typing import Any

from speculoe_local.server.http.paths import App, Message, Receive, Scope, Send
from speculoe_local.server.settings import Settings

__all__ = ["Logged", "configure", "request_id"]

_NAME = "speculoe_local"
_log = logging.getLogger(f"{_NAME}.server.requests")
_request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="")
_GOOD_ID = re.compile(r"[\w.:-]{1,128}")
_SHOWN_BODY = 4096
_QUIET = ("/health", "/v1/health", "/metrics", "/page/state")  # asked every few seconds


def request_id() -> str:
    """The id of the request that this task serves; "" outside of any."""
    return _request.get()


def configure(settings: Settings) -> None:
    """Let the project's loggers write to standard error, in the form that was asked for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_json else KeyValues())
    logger = logging.getLogger(_NAME)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class KeyValues(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info request id=... path=/v1/models status=200 ms=1.2`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        head = [fields.pop("time"), fields.pop("level"), " ".join(fields.pop("event").split())]
        return " ".join([*head, *(f"{key}={_quoted(value)}" for key, value in fields.items())])


class JsonLines(logging.Formatter):
    """An object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record), ensure_ascii=False, default=str)


class Logged:
    """Gives each request an id, which goes back as `X-Request-Id`, and logs it once it is over."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._shows = settings.log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = _Seen(scope, shows=self._shows)
        token = _request.set(seen.id)

        async def receiving() -> Message:
            message = await receive()
            seen.received(message)
            return message

        async def sending(message: Message) -> None:
            await send(seen.sent(message))

        try:
            await self._app(scope, receiving, sending)
        finally:
            seen.tell()
            _request.reset(token)


class _Seen:
    """What passed by of one request."""

    def __init__(self, scope: Scope, *, shows: bool) -> None:
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        self.id = given if _GOOD_ID.fullmatch(given) else f"req_{secrets.token_hex(8)}"
        self._scope = scope
        self._begin = time.perf_counter()
        self._first: float | None = None
        self._status = 0
        self._bytes_in = self._bytes_out = 0
        self._left = False
        self._whole = False
        self._body = bytearray() if shows else None
        self._answer = bytearray() if shows else None

    def received(self, message: Message) -> None:
        if message["type"] == "http.request":
            body = message.get("body", b"")
            self._bytes_in += len(body)
            _keep(self._body, body)
        elif not self._whole:
            self._left = True

    def sent(self, message: Message) -> Message:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            own = self.id.encode("latin-1")
            names = (
                b"x-request-id",
                b"request-id",
            )  # OpenAI's clients look for one, Anthropic's for the other
            more = [(name, own) for name in names]
            return {**message, "headers": [*message.get("headers", ()), *more]}
        body = message.get("body", b"")
        if self._first is None and body:
            self._first = time.perf_counter()
        self._bytes_out += len(body)
        self._whole = not message.get("more_body", False)
        _keep(self._answer, body)
        return message

    def tell(self) -> None:
        now = time.perf_counter()
        client = self._scope.get("client")
        fields: dict[str, Any] = {
            "id": self.id,
            "method": self._scope["method"],
            "path": self._scope["path"],
            "status": self._status,
            "ms": round((now - self._begin) * 1e3, 1),
            "first_ms": round(((self._first or now) - self._begin) * 1e3, 1),
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "client": client[0] if client else "",
        }
        if self._left and not self._whole:
            fields["left"] = True
        if self._body is not None and self._answer is not None:
            fields["body"] = self._body.decode("utf-8", "replace")
            fields["answer"] = self._answer.decode("utf-8", "replace")
        quiet = self._scope["path"] in _QUIET and self._status < 400
        _log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})


def _keep(shown: bytearray | None, body: bytes) -> None:
    if shown is not None:
        shown += body[: _SHOWN_BODY - len(shown)]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """A record as fields; those of its own come with `extra={"fields": {...}}`."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields: dict[str, Any] = {
        "time": f"{stamp}.{int(record.msecs):03d}Z",
        "level": record.levelname.lower(),
        "event": record.getMessage(),
    }
    given = getattr(record, "fields", None)
    if isinstance(given, dict):
        fields |= given
    elif request_id():
        fields["id"] = request_id()
    if record.exc_info:
        fields["error"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _quoted(value: Any) -> str:
    """A value on one line, in quotes where it could be taken for something else."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & {" ", '"', "="}
    return text if plain and text else json.dumps(text)
