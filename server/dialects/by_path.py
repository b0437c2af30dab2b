"""Which dialect a path belongs to, for errors of requests that never reach a route."""

from __future__ import annotations

from speculoe_local.server.dialects.anthropic.reply import envelope as anthropic_envelope
from speculoe_local.server.dialects.ollama.reply import envelope as ollama_envelope
from speculoe_local.server.dialects.openai.common import envelope as openai_envelope
from speculoe_local.server.http.envelopes import Envelope

__all__ = ["envelope_for"]


def envelope_for(path: str) -> Envelope:
    """The envelope of errors of a path that may have no route."""
    if path.startswith("/api/"):
        return ollama_envelope
    if path.startswith(("/v1/messages", "/messages")):
        return anthropic_envelope
    return openai_envelope
