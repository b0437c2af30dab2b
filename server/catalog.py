"""What can be said of a model file before it is loaded, and whether there is memory to load it.

Reads headers. Knows nothing of names on the wire, requests or dialects.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np

from speculoe_local.runtime import machine, placement
from speculoe_local.runtime.header import Array, type_name
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.options import EngineOptions
from speculoe_local.server.errors import NoMemory
from speculoe_local.server.jobs import ModelEntry

__all__ = ["check_memory", "entry_of", "kv_bytes", "needed_bytes"]

_BUFFERS = 256 << 20  # compute buffers and the program itself, beside weights and KV
_F16 = 2


def entry_of(name: str, path: Path) -> ModelEntry:
    """The model at `path` as its header describes it. Raises ModelError."""
    model = ModelMap.read(path)
    meta = model.metadata
    template = meta.get("tokenizer.chat_template")
    status = model.files[0].stat()
    return ModelEntry(
        name=name,
        path=model.files[0],
        size_bytes=model.total_bytes,
        modified=status.st_mtime,
        digest=model.fingerprint,
        architecture=model.architecture,
        quantization=_quantization(model),
        n_params=sum(_elements(info.shape) for info in model.tensors.values()),
        n_ctx_train=_number(meta.get(f"{model.architecture}.context_length"), 0),
        n_embd=model.n_embd,
        n_layer=model.n_layer,
        n_vocab=model.n_vocab,
        n_expert=model.n_expert,
        n_expert_used=model.n_expert_used,
        template=template if isinstance(template, str) else None,
    )


def check_memory(path: Path, options: EngineOptions, contexts: int) -> None:
    """Raises NoMemory, with the numbers, when the model would not fit beside what runs already."""
    model = ModelMap.read(path)
    needed = needed_bytes(model, options, contexts)
    available = machine.look().available_bytes
    if needed > available:
        raise NoMemory(model.name, needed, available)


def needed_bytes(model: ModelMap, options: EngineOptions, contexts: int) -> int:
    """Memory that opening takes at least: weights, the experts' budget, KV of `contexts`, buffers."""
    budget = placement.parse_budget(options.expert_budget)
    if not model.is_moe:
        experts = 0
    elif budget.is_auto:
        experts = placement.plan(model, placement.parse_budget("100%")).smallest_bytes
    else:
        experts = min(placement.plan(model, budget).used_bytes, model.routed_bytes)
    return model.other_bytes + experts + contexts * kv_bytes(model, options.ctx) + _BUFFERS


def kv_bytes(model: ModelMap, n_ctx: int) -> int:
    """Keys and values of `n_ctx` tokens at 16 bits, by the header's head counts."""
    prefix = f"{model.architecture}.attention."
    heads = _number(model.metadata.get(f"{prefix}head_count"), 0)
    kv_heads = _number(model.metadata.get(f"{prefix}head_count_kv"), heads)
    size = model.n_embd // heads if heads else 0
    key = _number(model.metadata.get(f"{prefix}key_length"), size)
    value = _number(model.metadata.get(f"{prefix}value_length"), size)
    return n_ctx * model.n_layer * kv_heads * (key + value) * _F16


def _quantization(model: ModelMap) -> str:
    """The type that most of the weights have."""
    sizes: Counter[int] = Counter()
    for info in model.tensors.values():
        sizes[info.ggml_type] += info.nbytes
    return type_name(sizes.most_common(1)[0][0]) if sizes else "unknown"


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _number(value: object, default: int) -> int:
    """A number of the metadata; of one per layer, the largest."""
    if isinstance(value, Array):
        numbers = value.numbers()
        return int(np.max(numbers)) if len(numbers) else default
    return int(value) if isinstance(value, int | float) else default
