"""Which models there are, as Ollama tells it: tags, show, ps. Pure functions over entries.

Editors read capabilities and context length from here before they send a word. Knows no routes.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from speculoe_local.server.jobs import Backend, ModelEntry
from speculoe_local.server.prompt.chat import supports_thinking

__all__ = ["API_VERSION", "iso", "ps_row", "shown", "tag"]

# The Ollama release whose API this follows; editors refuse to talk to versions they deem too old.
API_VERSION = "0.13.5"
_FOREVER = timedelta(days=365)
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def iso(seconds: float) -> str:
    """A time since the epoch as RFC 3339."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


def tag(entry: ModelEntry) -> dict[str, Any]:
    """A row of /api/tags; every field is one that some client requires."""
    return {
        "name": entry.name,
        "model": entry.name,
        "modified_at": iso(entry.modified),
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": _details(entry),
    }


def ps_row(backend: Backend) -> dict[str, Any]:
    """A row of /api/ps: a model in memory, with the context that it runs with."""
    entry = backend.info.entry
    expires = entry.expires_at
    until = backend.info.loaded_at + _FOREVER.total_seconds() if expires is None else expires
    return {
        "name": entry.name,
        "model": entry.name,
        "size": entry.size_bytes,
        "digest": entry.digest,
        "details": _details(entry),
        "expires_at": iso(until),
        "size_vram": 0,
        "context_length": backend.info.n_ctx,
    }


def shown(entry: ModelEntry, backend: Backend | None, n_ctx: int) -> dict[str, Any]:
    """/api/show. `n_ctx` is what a request may use, which is what clients take `context_length` for:
    the number the model was trained with would let them send prompts that are refused."""
    arch = entry.architecture
    capabilities = ["completion", "tools"]
    if backend is not None and backend.vocab.fim.complete:
        capabilities.append("insert")
    if supports_thinking(entry.template):
        capabilities.append("thinking")
    return {
        "modelfile": f"# served by speculoe-local\nFROM {entry.path}\n",
        "parameters": f"num_ctx                        {n_ctx}",
        "template": entry.template or "",
        "license": "",
        "modified_at": iso(entry.modified),
        "details": _details(entry),
        "model_info": {
            "general.architecture": arch,
            "general.basename": entry.name,
            "general.file_type": entry.quantization,
            "general.parameter_count": entry.n_params,
            f"{arch}.block_count": entry.n_layer,
            f"{arch}.context_length": n_ctx,
            f"{arch}.embedding_length": entry.n_embd,
            f"{arch}.expert_count": entry.n_expert,
            f"{arch}.expert_used_count": entry.n_expert_used,
            f"{arch}.vocab_size": entry.n_vocab,
        },
        "capabilities": capabilities,
    }


def _details(entry: ModelEntry) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": entry.architecture,
        "families": [entry.architecture],
        "parameter_size": _size(entry.n_params),
        "quantization_level": entry.quantization,
    }


def _size(count: int) -> str:
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)
