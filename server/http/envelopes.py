"""Errors of a dialect's routes in that dialect's own envelope. Knows no dialect.

What is raised before a response has begun becomes one with the right status, whatever it is: a dialect
never lets a framework answer for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from speculoe_local.runtime.errors import SpeculoeError
from speculoe_local.server.errors import BadRequest, Fault, fault_of
from speculoe_local.server.http.wire import ClientLeft, json_response

__all__ = ["Envelope", "fault_response", "told", "route_class"]

_log = logging.getLogger("speculoe_local.server")
_LEFT = 499  # the client is gone; nobody reads it but the access log

Envelope = Callable[[Fault], dict[str, Any]]


def told(error: BaseException) -> Fault:
    """What `error` comes to; the log learns of those that nobody raised on purpose."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        error = BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    if not isinstance(error, SpeculoeError):
        _log.error("event=internal_error", exc_info=error)
    return fault_of(error)


def fault_response(envelope: Envelope, error: BaseException) -> Response:
    if isinstance(error, ClientLeft):
        return Response(status_code=_LEFT)
    fault = told(error)
    return json_response(envelope(fault), fault.status, fault.headers)


def route_class(envelope: Envelope) -> type[APIRoute]:
    """Routes whose errors come in `envelope`."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    return await handle(request)
                except Exception as error:
                    return fault_response(envelope, error)

            return guarded

    return Route
