"""A dense llama-like GGUF as a torch forward pass whose FFNs can be watched or replaced.

Knows attention (with biases or head norms where there are some), rope and norms of ARCHITECTURES; the
FFN of each layer is a function given by the caller. Weights are
frozen: gradients flow through activations only. Needs the extra `train` (torch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from gguf import quants
from torch import Tensor
from torch.nn import functional

from speculoe_local.convert import gguf_raw
from speculoe_local.runtime.errors import ModelError

# How each architecture pairs the values of a head that are rotated together: neighbours, or halves.
ARCHITECTURES = {"llama": False, "qwen2": True, "qwen3": True}

# (layer, its normed input float32 [B, T, D]) -> FFN output float32 [B, T, D]
Ffn = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; matrices are [out, in] in the model's dtype, norms float32 [D].

    Biases [out] and the norms of a head's values [head] are float32, None where a model has none.
    """

    attn_norm: Tensor
    attn_q: Tensor
    attn_k: Tensor
    attn_v: Tensor
    attn_output: Tensor
    ffn_norm: Tensor
    ffn_gate: Tensor
    ffn_up: Tensor
    ffn_down: Tensor
    attn_q_bias: Tensor | None = None
    attn_k_bias: Tensor | None = None
    attn_v_bias: Tensor | None = None
    attn_q_norm: Tensor | None = None
    attn_k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A frozen dense model. `head` is [vocabulary, D], the embedding where the file has no own one."""

    layers: tuple[Layer, ...]
    embedding: Tensor
    output_norm: Tensor
    head: Tensor
    n_heads: int
    n_kv_heads: int
    rope_base: float
    norm_eps: float
    dtype: torch.dtype
    rope_halves: bool = False


def load_dense(path: Path, dtype: torch.dtype = torch.float32) -> DenseModel:
    """Read and dequantise `path`; raises ModelError when `check_dense` does."""
    file = gguf_raw.read_gguf(path)
    arch = check_dense(file)

    def weight(name: str) -> Tensor:
        tensor = file.tensor(f"{name}.weight")
        values = quants.dequantize(np.array(tensor.rows), tensor.kind).astype(np.float32)
        array = torch.from_numpy(values.reshape(tensor.shape[::-1]))
        return array if array.ndim == 1 else array.to(dtype)

    def floats(name: str) -> Tensor | None:
        if name not in file.tensors:
            return None
        tensor = file.tensors[name]
        return torch.from_numpy(
            quants.dequantize(np.array(tensor.rows), tensor.kind).astype(np.float32).reshape(-1)
        )

    def layer(index: int) -> Layer:
        names = [f.name for f in fields(Layer) if f.default is MISSING]
        parts = {f"attn_{part}_bias": f"blk.{index}.attn_{part}.bias" for part in "qkv"}
        parts |= {f"attn_{part}_norm": f"blk.{index}.attn_{part}_norm.weight" for part in "qk"}
        return Layer(
            **{name: weight(f"blk.{index}.{name}") for name in names},
            **{name: floats(tensor) for name, tensor in parts.items()},
        )

    embedding = weight("token_embd")
    return DenseModel(
        layers=tuple(layer(i) for i in range(file.value(f"{arch}.block_count"))),
        embedding=embedding,
        output_norm=weight("output_norm"),
        head=weight("output") if "output.weight" in file.tensors else embedding,
        n_heads=file.value(f"{arch}.attention.head_count"),
        n_kv_heads=file.value(f"{arch}.attention.head_count_kv"),
        rope_base=file.value(f"{arch}.rope.freq_base"),
        norm_eps=file.value(f"{arch}.attention.layer_norm_rms_epsilon"),
        dtype=dtype,
        rope_halves=ARCHITECTURES[arch],
    )


def check_dense(file: gguf_raw.RawGguf) -> str:
    """The architecture of `file`; raises ModelError unless `forward` computes what llama.cpp does."""
    arch = str(file.value("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {arch} is not readable here; give a dense model of "
            f"{', '.join(ARCHITECTURES)}"
        )
    if int(file.metadata.get(f"{arch}.expert_count", gguf_raw.u32(0)).scalar()):
        raise ModelError(f"{file.path} has experts already; give a dense model")
    scaling = file.metadata.get(f"{arch}.rope.scaling.type")
    if "rope_freqs.weight" in file.tensors or (scaling and scaling.scalar() != "none"):
        raise ModelError(
            f"{file.path} stretches its positions (rope scaling), which is not computed here; give a "
            "model without"
        )
    return arch


def forward(model: DenseModel, ids: Tensor, ffn: Ffn) -> Tensor:
    """Final normed hidden states float32 [B, T, D] of token ids [B, T], with `ffn` in each layer."""
    x = model.embedding[ids].float()
    for index, layer in enumerate(model.layers):
        x = x + _attention(model, layer, rms_norm(x, layer.attn_norm, model.norm_eps))
        x = x + ffn(index, rms_norm(x, layer.ffn_norm, model.norm_eps))
    return rms_norm(x, model.output_norm, model.norm_eps)


def logits(model: DenseModel, hidden: Tensor) -> Tensor:
    """Float32 logits [..., vocabulary] of `hidden` [..., D]."""
    return (hidden.to(model.dtype) @ model.head.T).float()


def neurons(layer: Layer, x: Tensor) -> Tensor:
    """Activations [..., N] of the layer's FFN neurons for normed inputs `x` [..., D], in x's dtype."""
    return functional.silu(x @ layer.ffn_gate.T) * (x @ layer.ffn_up.T)


def dense_ffn(model: DenseModel) -> Ffn:
    """The model's own FFNs."""

    def ffn(index: int, x: Tensor) -> Tensor:
        layer = model.layers[index]
        return (neurons(layer, x.to(model.dtype)) @ layer.ffn_down.T).float()

    return ffn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _attention(model: DenseModel, layer: Layer, x: Tensor) -> Tensor:
    batch, length, _ = x.shape
    x = x.to(model.dtype)

    def heads(weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
        values = (x @ weight.T).float()
        values = values if bias is None else values + bias
        return values.view(batch, length, count, -1).transpose(1, 2)

    q = heads(layer.attn_q, layer.attn_q_bias, model.n_heads)
    k = heads(layer.attn_k, layer.attn_k_bias, model.n_kv_heads)
    v = heads(layer.attn_v, layer.attn_v_bias, model.n_kv_heads)
    if layer.attn_q_norm is not None and layer.attn_k_norm is not None:
        q = rms_norm(q, layer.attn_q_norm, model.norm_eps)
        k = rms_norm(k, layer.attn_k_norm, model.norm_eps)
    cos, sin = _rope_table(length, q.shape[-1], model.rope_base)
    rotate = _rotate_halves if model.rope_halves else _rotate
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    group = model.n_heads // model.n_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = out.transpose(1, 2).reshape(batch, length, -1).to(model.dtype)
    return (out @ layer.attn_output.T).float()


def _rope_table(length: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # GGUF files of the llama architecture store q and k so that neighbours form the rotated pairs.
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, low * sin + high * cos], -1)
