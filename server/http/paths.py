"""What clients call a route: with a slash at its end or not, by HEAD instead of GET. ASGI, no dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["App", "Forgiving", "Message", "Receive", "Scope", "Send"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Forgiving:
    """Passes `/x/` on as `/x`, and HEAD as GET, whose body it keeps."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = "/" + scope["path"].strip("/") if scope["path"].endswith("/") else scope["path"]
        inner = {**scope, "path": path}
        if scope["method"] != "HEAD":
            await self._app(inner, receive, send)
            return

        async def head_only(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        inner["method"] = "GET"
        await self._app(inner, receive, head_only)
