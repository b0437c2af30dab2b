"""What a model needs besides slots for its experts, and what one decoded token reads. From the header.

Sizes are those llama.cpp allocates at the pin (src/llama-kv-cache.cpp, src/llama-memory-recurrent.cpp) for
a context as the engine opens it: f16, sliding windows kept in full. Knows no machine and no rate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.header import Array, TensorInfo
from speculoe_local.runtime.modelmap import ModelMap

__all__ = ["HOST_RESERVE_BYTES", "Needs", "Traffic", "device_reserve", "needs_of", "traffic_of"]

HOST_RESERVE_BYTES = 256 << 20  # the program itself takes about 100 MiB, the server 200
DEVICE_RESERVE_BYTES = 1 << 30  # at least; drivers keep some, and so do others on the device

_F16, _F32 = 2, 4
_CTX_STEP = 256  # llama.cpp rounds a context up to this
_LAYER = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes. `beside_bytes`: weights that lie with the layers, on a device if there is one;
    `embedding_bytes`: read a row at a time, always in main memory, and on a device once more where the
    output shares it (then `beside_bytes` has it, too). `ctx` as rounded, `notes` what was assumed."""

    beside_bytes: int
    embedding_bytes: int
    tied: bool
    kv_bytes: int
    state_bytes: int
    compute_bytes: int
    ctx: int
    notes: tuple[str, ...]

    @property
    def context_bytes(self) -> int:
        """KV, recurrent state and compute buffers."""
        return self.kv_bytes + self.state_bytes + self.compute_bytes

    @property
    def weights_bytes(self) -> int:
        """All weights but the routed experts, once: what main memory holds without a device."""
        return self.beside_bytes + (0 if self.tied else self.embedding_bytes)

    def room(self, free_bytes: int, reserve_bytes: int, *, on_device: bool) -> int:
        """What of a tier's free memory experts may take; below 0: what is missing even without any."""
        weights = self.beside_bytes if on_device else self.weights_bytes
        return free_bytes - reserve_bytes - weights - self.context_bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one token reads: weights of every token, those of its experts, and the KV of half a context;
    `copies` is how many reads its experts are, `experts` how many."""

    weights_bytes: int
    experts_bytes: int
    kv_bytes: int
    experts: int
    copies: int


def device_reserve(total_bytes: int) -> int:
    """What stays free on a device: drivers spill silently into main memory when theirs is nearly full."""
    return max(DEVICE_RESERVE_BYTES, total_bytes // 10)


def needs_of(
    model: ModelMap, ctx: int, ubatch: int = 512, *, sequences: int = 1, shared: bool = False
) -> Needs:
    """Memory for a context of `ctx` tokens, or one for each of `sequences` that do not share it, and prompts in
    batches of `ubatch`.

    Raises OptionError for sizes that are no sizes.
    """
    for name, value in (("--ctx", ctx), ("--ubatch", ubatch)):
        if not 1 <= value <= 1 << 24:
            raise OptionError(f"{name} {value} is not in 1..{1 << 24}")
    padded = -(-ctx // _CTX_STEP) * _CTX_STEP
    layers = _by_layer(model)
    notes: list[str] = []
    cells = state = 0
    recurrent = latent = unknown = 0
    borrowing = _number(model, "attention.shared_kv_layers") or 0
    for index in range(model.n_layer):
        parts = layers.get(index, {})
        if _is_recurrent(parts):
            recurrent += 1
            state += _state_bytes(model)
        elif index < model.n_layer - borrowing:
            found = _cell(model, parts, index)
            latent += "attn_kv_a_mqa.weight" in parts
            unknown += found is None
            cells += found or 0
    kv_bytes = padded * cells * _F16 * (1 if shared else sequences)
    window = _number(model, "attention.sliding_window")
    if window:
        notes.append(
            f"layers with a sliding window ({window} tokens) keep the whole context, as the engine opens them"
        )
    if recurrent:
        notes.append(f"{recurrent} of {model.n_layer} layers are recurrent: a fixed state, no KV")
    if latent:
        notes.append("latent attention: keys alone are cached")
    if unknown:
        notes.append(f"{unknown} layers show no keys and values: their KV is not counted")
    embedding = sum(model.tensors[n].nbytes for n in _EMBEDDINGS if n in model.tensors)
    tied = "output.weight" not in model.tensors
    return Needs(
        beside_bytes=model.other_bytes - (0 if tied else embedding),
        embedding_bytes=embedding,
        tied=tied,
        kv_bytes=kv_bytes,
        state_bytes=state * sequences,
        compute_bytes=_compute_bytes(model, padded, ubatch, 2 if window else 1),
        ctx=padded,
        notes=tuple(notes),
    )


def traffic_of(model: ModelMap, needs: Needs) -> Traffic:
    """What decoding one token reads with half of the context filled; layers that only predict further
    tokens are not run."""
    idle = sum(
        tensor.nbytes
        for name, tensor in model.tensors.items()
        if (match := _LAYER.fullmatch(name)) and int(match[1]) >= model.n_layer
    )
    return Traffic(
        weights_bytes=max(0, needs.beside_bytes - idle),
        experts_bytes=sum(layer.n_expert_used * layer.expert_bytes for layer in model.layers),
        kv_bytes=needs.kv_bytes // 2 + needs.state_bytes,
        experts=sum(layer.n_expert_used for layer in model.layers),
        copies=sum(layer.n_expert_used * len(layer.matrices) for layer in model.layers),
    )


def _by_layer(model: ModelMap) -> dict[int, dict[str, TensorInfo]]:
    layers: dict[int, dict[str, TensorInfo]] = {}
    for name, tensor in model.tensors.items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    return layers


def _is_recurrent(parts: Mapping[str, TensorInfo]) -> bool:
    attends = any(f"{name}.weight" in parts for name in ("attn_k", "attn_kv_a_mqa", "attn_output"))
    return not attends and any(name.startswith(("ssm_", "shortconv")) for name in parts)


def _cell(model: ModelMap, parts: Mapping[str, TensorInfo], index: int) -> int | None:
    """Values that one token keeps in a layer: keys and values. None where the header does not tell."""
    if "attn_kv_a_mqa.weight" in parts and _number(model, "attention.key_length_mla"):
        return parts["attn_kv_a_mqa.weight"].shape[1]
    if (keys := parts.get("attn_k.weight")) and len(keys.shape) == 2:
        values = parts.get(
            "attn_v.weight", keys
        )  # without a matrix of their own values are the keys
        return keys.shape[1] + values.shape[-1]
    if not any(name.startswith("attn_") for name in parts):
        return None
    heads = _number(model, "attention.head_count", index)
    kv_heads = _number(model, "attention.head_count_kv", index) or heads
    if not heads or not kv_heads:
        return None
    each = model.n_embd // heads
    key = _number(model, "attention.key_length") or each
    value = _number(model, "attention.value_length") or each
    return kv_heads * (key + value)


def _state_bytes(model: ModelMap) -> int:
    """One recurrent layer's, f32, of one sequence: the convolution's last inputs and the state."""
    if kernel := _number(model, "shortconv.l_cache"):
        return (kernel - 1) * model.n_embd * _F32
    inner, size = _number(model, "ssm.inner_size") or 0, _number(model, "ssm.state_size") or 0
    kernel, groups = _number(model, "ssm.conv_kernel") or 1, _number(model, "ssm.group_count") or 0
    return ((kernel - 1) * (inner + 2 * groups * size) + size * inner) * _F32


def _compute_bytes(model: ModelMap, ctx: int, ubatch: int, masks: int) -> int:
    """The largest of logits and activations of a batch, f32, and its attention masks, f16. (For the tiny
    models of the tests up to half above what llama.cpp reserves; logits, which it knows, decide for real ones.)"""
    heads = _number(model, "attention.head_count", 0) or 0
    length = _number(model, "attention.key_length") or model.n_embd // max(1, heads)
    widest = max((m.ne0 for layer in model.layers for m in layer.matrices), default=model.n_embd)
    activations = 6 * model.n_embd + 3 * heads * length + 3 * model.n_expert_used * widest
    logits = model.n_vocab + 4 * model.n_embd
    return ubatch * (_F32 * max(activations, logits) + _F16 * masks * ctx)


def _number(model: ModelMap, key: str, index: int = 0) -> int | None:
    """A count of the architecture; of an array with one for each layer, that of `index`."""
    value = model.metadata.get(f"{model.architecture}.{key}")
    if isinstance(value, Array):
        numbers = value.numbers()
        value = int(numbers[index]) if index < len(numbers) and numbers.dtype.kind in "iu" else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if 0 <= value < 1 << 32 else None
