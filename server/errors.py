"""What can go wrong between a request and its answer, and what each is worth in HTTP.

One table for all dialects: `fault_of` says status, kind and numbers; each dialect wraps them into its
own envelope. Knows nothing of envelopes, routes or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculoe_local.runtime.errors import (
    BackendError,
    ContextError,
    ModelError,
    OptionError,
    SourceError,
    SpeculoeError,
    TemplateError,
)
from speculoe_local.runtime.placement import format_bytes

__all__ = [
    "BadRequest",
    "ContextOverflow",
    "Fault",
    "Forbidden",
    "GrammarError",
    "Loading",
    "NoMemory",
    "QueueFull",
    "ServerError",
    "ShuttingDown",
    "TooLarge",
    "Unauthorized",
    "UnknownModel",
    "Unsupported",
    "fault_of",
]


class ServerError(SpeculoeError):
    """Base of what only a server raises."""


class BadRequest(ServerError):
    """A field is missing or unusable; `param` names it where one does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GrammarError(BadRequest):
    """A schema or grammar cannot constrain sampling: refused, never ignored."""


class ContextOverflow(ServerError):
    """The prompt has `n_prompt` tokens, more than the `n_ctx` of one request allow."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt} tokens, the context holds {n_ctx}; "
            "shorten it or start the server with a larger --ctx"
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class Unauthorized(ServerError):
    """No key, or a wrong one."""


class Forbidden(ServerError):
    """The Host or Origin is not on the list."""


class UnknownModel(ServerError):
    """No model of that name is served; `known` are those that are."""

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        hint = f"use one of {', '.join(known[:8])}" if known else "no model is served"
        super().__init__(f"model {name[:200]!r} is not served here; {hint}")
        self.name = name
        self.known = known


class TooLarge(ServerError):
    """The body is larger than the server takes."""


class Unsupported(ServerError):
    """The model, or this server, cannot do what was asked for."""


class QueueFull(ServerError):
    """As many requests wait as may; `retry_after` in whole seconds."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests wait already; try again in {retry_after} s")
        self.retry_after = retry_after


class Loading(ServerError):
    """The model is on its way into memory; `progress` 0..1."""

    def __init__(self, progress: float = 0.0) -> None:
        super().__init__("Loading model")
        self.progress = progress


class NoMemory(ServerError):
    """A model does not fit into what memory is free, whatever rests unloaded."""

    def __init__(self, name: str, needed: int, available: int) -> None:
        super().__init__(
            f"model {name[:200]!r} needs {format_bytes(needed, up=True)} of memory and "
            f"{format_bytes(available)} are free; use a smaller --ctx or --expert-budget"
        )
        self.needed = needed
        self.available = available


class ShuttingDown(ServerError):
    """The server was told to stop while the request ran or waited."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; try again later")


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as HTTP: `kind` as llama-server names it, `extra` numbers for the envelope."""

    status: int
    kind: str
    message: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    param: str | None = None


_RULES: tuple[tuple[type[BaseException], int, str], ...] = (
    (BadRequest, 400, "invalid_request_error"),
    (ContextOverflow, 400, "exceed_context_size_error"),
    (ContextError, 400, "exceed_context_size_error"),
    (TemplateError, 400, "invalid_request_error"),
    (OptionError, 400, "invalid_request_error"),
    (Unauthorized, 401, "authentication_error"),
    (Forbidden, 403, "permission_error"),
    (UnknownModel, 404, "not_found_error"),
    (TooLarge, 413, "invalid_request_error"),
    (Unsupported, 501, "not_supported_error"),
    (QueueFull, 503, "unavailable_error"),
    (Loading, 503, "unavailable_error"),
    (NoMemory, 503, "unavailable_error"),
    (ShuttingDown, 503, "unavailable_error"),
    (ModelError, 500, "server_error"),
    (SourceError, 500, "server_error"),
    (BackendError, 500, "server_error"),
    (SpeculoeError, 500, "server_error"),
)


def fault_of(error: BaseException) -> Fault:
    """What `error` comes to. Errors that were not raised on purpose keep their text to the log."""
    for cls, status, kind in _RULES:
        if isinstance(error, cls):
            return Fault(
                status,
                kind,
                " ".join(str(error).split()),
                extra=_extra(error),
                headers=_headers(error),
                param=error.param if isinstance(error, BadRequest) else None,
            )
    return Fault(500, "server_error", "internal error; the server's log says more")


def _extra(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ContextOverflow):
        return {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
    return {}


def _headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, QueueFull):
        return {"Retry-After": str(error.retry_after)}
    if isinstance(error, Loading | ShuttingDown):
        return {"Retry-After": "2"}
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    return {}
