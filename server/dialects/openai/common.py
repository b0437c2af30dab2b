"""What the routes of the OpenAI dialect share: error envelope, ids, usage, log probabilities.

The envelope is llama-server's too, whose routes use it as well: OpenAI's fields, the status as `code`, and
numbers where there are some. Knows no single route.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.errors import Fault
from speculoe_local.server.http.envelopes import route_class, told
from speculoe_local.server.jobs import Backend, Timings, TokenLogprob

__all__ = [
    "OpenAIRoute",
    "add_route",
    "chat_logprobs",
    "envelope",
    "error_event",
    "finite",
    "identifier",
    "model_name",
    "now",
    "token_text",
    "usage_of",
]

# What OpenAI's API gives for "as good as impossible"; JSON has no infinity.
_IMPOSSIBLE = -9999.0


def envelope(fault: Fault) -> dict[str, Any]:
    return {
        "error": {
            "message": fault.message,
            "type": fault.kind,
            "param": fault.param,
            "code": fault.status,
            **fault.extra,
        }
    }


OpenAIRoute = route_class(envelope)


def error_event(error: BaseException) -> dict[str, Any]:
    """The same inside a stream that has begun."""
    return envelope(told(error))


def add_route(
    router: APIRouter,
    path: str,
    endpoint: Callable[..., Any],
    *,
    method: str = "POST",
    bare: bool = True,
    listed: bool = True,
    openapi: dict[str, Any] | None = None,
    summary: str | None = None,
) -> None:
    """`endpoint` at `path` and, with `bare`, without its `/v1`. `listed`: /openapi.json has it."""
    paths = [path, path.removeprefix("/v1")] if bare and path.startswith("/v1/") else [path]
    for i, each in enumerate(paths):
        router.add_api_route(
            each,
            endpoint,
            methods=[method],
            include_in_schema=listed and i == 0,
            openapi_extra=openapi,
            summary=summary,
            response_model=None,
        )


def identifier(kind: str) -> str:
    """A fresh id, `kind` in front: `chatcmpl-...`, `call_...`."""
    return f"{kind}{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def model_name(asked: str | None, backend: Backend) -> str:
    """The name a response carries: what the client asked for, or the model's own."""
    return asked or backend.info.name


def finite(logprob: float) -> float:
    return logprob if logprob > _IMPOSSIBLE else _IMPOSSIBLE


def usage_of(timings: Sequence[Timings], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Usage of choices that share one prompt. The details are always there: clients read them unasked."""
    prompt = max((each.prompt_n + each.cached_n for each in timings), default=0)
    cached = timings[0].cached_n if timings else 0
    predicted = sum(each.predicted_n for each in timings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": predicted,
        "total_tokens": prompt + predicted,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens, "audio_tokens": 0},
    }


def token_text(vocab: Vocabulary, token: int) -> str:
    """A token as text, control tokens by their names; bytes that are no text as `bytes:\\xe2\\x80`."""
    piece = vocab.piece(token, special=True)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(found: Sequence[TokenLogprob], vocab: Vocabulary) -> dict[str, Any]:
    """`logprobs` of chat completions; ids beside the texts, as llama-server has them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        piece = vocab.piece(token, special=True)
        return {
            "id": token,
            "token": piece.decode("utf-8", "replace"),
            "bytes": list(piece),
            "logprob": finite(logprob),
        }

    return {
        "content": [
            {
                **one(each.token, each.logprob),
                "top_logprobs": [one(token, logprob) for token, _, logprob in each.top],
            }
            for each in found
        ],
        "refusal": None,
    }
