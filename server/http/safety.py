"""Who may ask and how much: keys, Host and Origin, size of bodies. ASGI, before any route.

A server on loopback is reached by every page that a browser on this machine shows. Names that resolve to
127.0.0.1 are kept out by the Host header, pages of other origins by the Origin header: not only may they not
read answers, they may not cause any. Knows no dialect; `envelope_for` says how a path's errors look.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from starlette.responses import Response

from speculoe_local.server.errors import Forbidden, ServerError, TooLarge, Unauthorized
from speculoe_local.server.http.envelopes import Envelope, fault_response
from speculoe_local.server.http.paths import App, Message, Receive, Scope, Send
from speculoe_local.server.settings import Settings

__all__ = ["Guarded", "is_public", "key_in", "may_ask_as", "may_call_from"]

# Readiness is for everyone; the page has no secrets, what it asks for does.
_PUBLIC = ("/", "/health", "/v1/health", "/favicon.ico")
_STATIC = "/page/static/"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_HEADERS = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta"
_MAX_AGE_S = "600"


class Guarded:
    """Answers what must not pass; everything else goes on to `app`."""

    def __init__(
        self, app: App, settings: Settings, envelope_for: Callable[[str], Envelope]
    ) -> None:
        self._app = app
        self._settings = settings
        self._envelope_for = envelope_for
        self._keys = tuple(key.encode() for key in settings.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        origin = headers.get("origin")
        allowed = origin is not None and origin.rstrip("/") in self._settings.origins
        try:
            self._check(scope, headers)
        except ServerError as error:
            refusal = fault_response(self._envelope_for(scope["path"]), error)
            await refusal(scope, receive, _with_cors(send, origin) if allowed else send)
            return
        if scope["method"] == "OPTIONS":
            await _preflight(allowed=allowed)(
                scope, receive, _with_cors(send, origin) if allowed else send
            )
            return
        limited = _limited(receive, self._settings.max_body_bytes)
        await self._app(scope, limited, _with_cors(send, origin) if allowed else send)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        settings = self._settings
        host = headers.get("host", "")
        if not may_ask_as(host, bound_to=settings.host, hosts=settings.hosts):
            raise Forbidden(
                f"Host {host[:200]!r} is not a name of this server; start it with --allow-host"
            )
        origin = headers.get("origin")
        if origin is not None and not may_call_from(origin, host=host, origins=settings.origins):
            raise Forbidden(
                f"pages of {origin[:200]!r} may not call this server; start it with --cors-origin"
            )
        if self._keys and scope["method"] != "OPTIONS" and not is_public(scope["path"]):
            _check_key(key_in(headers), self._keys)
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > settings.max_body_bytes:
            raise _too_large(settings.max_body_bytes)


def may_ask_as(host: str, *, bound_to: str, hosts: Iterable[str]) -> bool:
    """Whether a Host header names this server.

    Bound to a public address without a list, any name will do: which ones lead there is not known here.
    """
    name = _name_in(host)
    if not name:
        return True  # only clients that are no browser leave it out
    known = {each.lower() for each in hosts}
    if not _is_loopback(bound_to) and not known:
        return True
    return name in known or name == bound_to.lower() or _is_loopback(name)


def may_call_from(origin: str, *, host: str, origins: Iterable[str]) -> bool:
    """Whether a page of `origin` may call: its own server's, a listed one, or no web page at all.

    Programs with a browser inside (editors) send origins like `vscode-file://vscode-app`, which no page
    on the web can send. `null` is what pages in a sandbox send, so it is not accepted.
    """
    if origin.rstrip("/") in origins:
        return True
    parts = urlsplit(origin)
    if parts.scheme in ("http", "https"):
        return bool(host) and parts.netloc.lower() == host.lower()
    return bool(parts.scheme) and "://" in origin


def key_in(headers: Mapping[str, str]) -> str:
    """The key a request carries, in any of the places where clients put it."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return headers.get("x-api-key", "") or headers.get("api-key", "")


def is_public(path: str) -> bool:
    """Whether a path is answered without a key."""
    return path in _PUBLIC or path.startswith(_STATIC)


def _check_key(key: str, keys: Iterable[bytes]) -> None:
    if not key:
        raise Unauthorized("no API key; send Authorization: Bearer KEY or X-Api-Key: KEY")
    given = key.encode("utf-8", "replace")
    # All are compared, each in constant time: how long it takes says nothing about which was close.
    matches = [hmac.compare_digest(given, known) for known in keys]
    if not any(matches):
        raise Unauthorized("the API key is not one of this server's")


def _is_loopback(name: str) -> bool:
    if name.lower() in _LOOPBACK or name.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name_in(host: str) -> str:
    """A Host header without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _headers(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in scope.get("headers", ())
    }


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes; shorten it or raise --max-body")


def _limited(receive: Receive, limit: int) -> Receive:
    """`receive`, which gives up on a body that turns out larger than it said."""
    taken = 0

    async def limited() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _too_large(limit)
        return message

    return limited


def _preflight(*, allowed: bool) -> Response:
    headers = {"Allow": _METHODS}
    if allowed:
        headers |= {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Allow-Headers": _HEADERS,
            "Access-Control-Max-Age": _MAX_AGE_S,
        }
    return Response(status_code=204, headers=headers)


def _with_cors(send: Send, origin: str | None) -> Send:
    """`send`, which tells the browser that a page of the listed `origin` may read the answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and origin is not None:
            more = [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
                (b"vary", b"Origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return sending
