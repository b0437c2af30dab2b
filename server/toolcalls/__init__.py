"""Calls of functions in the text of answers: what they are (base), one file per way to write them, and
which of these a model uses (formats); and the reasoning before them (thinking).

Pure. Knows nothing of HTTP, dialects, tokens or how functions are run.
"""

from __future__ import annotations

from speculoe_local.server.toolcalls.base import (
    Call,
    CallArguments,
    CallEnd,
    CallStart,
    Collected,
    Content,
    Event,
    Parser,
    Reasoning,
    Schemas,
    collect,
)

__all__ = [
    "Call",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Collected",
    "Content",
    "Event",
    "Parser",
    "Reasoning",
    "Schemas",
    "collect",
]
