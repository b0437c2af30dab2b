"""Dense GGUF + split -> MoE GGUF. Rows are moved; only the down projections are requantised.

Knows tensor names and the two architectures that fit as they are, with an always-on shared expert
beside the routed ones and softmax gates renormalised over the top k: `bailingmoe` rotates neighbours as
`llama` does, `glm4moe` halves as `qwen2` and `qwen3` do, with their biases and head norms.
Knows nothing about how a split is found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from numpy.typing import NDArray

from speculoe_local.convert import files
from speculoe_local.convert import gguf_raw as raw
from speculoe_local.convert.split import REPACK_VERSION, Split
from speculoe_local.runtime.errors import ModelError

ARCHITECTURE = "bailingmoe"
TARGETS = {"llama": ARCHITECTURE, "qwen2": "glm4moe", "qwen3": "glm4moe"}
_SOFTMAX = 1  # llama_expert_gating_func_type; glm4moe's own is the sigmoid
_Q8_BLOCK = 32


def repack(
    dense: Path | raw.RawGguf,
    split: Split,
    out: Path | BinaryIO,
    progress: Callable[[float], None] | None = None,
) -> int:
    """Write the MoE GGUF made of `dense` and `split` to `out`; returns its size in bytes.

    A path appears when it is whole. `progress` gets the share done, 0 to 1. Raises ModelError when
    `dense` is not a GGUF of one of TARGETS' architectures and of the split's shape.
    """
    source = raw.read_gguf(dense) if isinstance(dense, Path) else dense
    metadata, tensors = moe_metadata(source, split), moe_tensors(source, split)
    if isinstance(out, Path):
        with files.appearing(out) as file:
            return raw.write_gguf(file, metadata, tensors, progress)
    return raw.write_gguf(out, metadata, tensors, progress)


def check_fit(dense: raw.RawGguf, split: Split) -> None:
    """Raise ModelError unless `split` was made for a model of `dense`'s architecture and shape."""
    arch = dense.value("general.architecture")
    if arch not in TARGETS:
        raise ModelError(
            f"{dense.path}: architecture {arch} cannot be upcycled; give a dense model of "
            f"{', '.join(TARGETS)}"
        )
    want = (split.n_layers, split.n_embd, split.n_neurons)
    keys = ("block_count", "embedding_length", "feed_forward_length")
    have = tuple(int(dense.value(f"{arch}.{key}")) for key in keys)
    if want != have:
        raise ModelError(
            f"{dense.path}: layers, width, neurons are {have}, the split is for {want};"
            " analyse this model"
        )
    if split.n_shared == 0 or split.n_shared % split.expert_width:
        raise ModelError(
            f"split: {split.n_shared} shared neurons, {TARGETS[arch]} needs a positive multiple of the"
            f" expert width {split.expert_width}; choose another shape"
        )


def moe_metadata(dense: raw.RawGguf, split: Split) -> dict[str, raw.RawValue]:
    """Metadata of the MoE file: the dense model's (tokenizer, chat template, licence) and more."""
    check_fit(dense, split)
    source = dense.value("general.architecture")
    target = TARGETS[source]
    moved: dict[str, raw.RawValue] = {}
    for key, value in dense.metadata.items():
        # An alignment of the dense file says nothing about this one, which uses the default.
        if key != "general.alignment" and not key.startswith("split."):
            moved[target + key.removeprefix(source) if key.startswith(f"{source}.") else key] = (
                value
            )
    title = dense.metadata.get("general.name")
    label = title.scalar() if title is not None else dense.path.stem
    moved |= {
        "general.architecture": raw.text(target),
        "general.name": raw.text(f"{label} upcycled to {split.n_experts} experts"),
        f"{target}.expert_count": raw.u32(split.n_experts),
        f"{target}.expert_used_count": raw.u32(split.used),
        f"{target}.expert_feed_forward_length": raw.u32(split.expert_width),
        f"{target}.expert_shared_count": raw.u32(split.n_shared // split.expert_width),
        f"{target}.expert_weights_norm": raw.boolean(True),
        f"{target}.expert_weights_scale": raw.f32(1.0),
        f"{target}.leading_dense_block_count": raw.u32(0),
        "speculoe.upcycle.version": raw.u32(REPACK_VERSION),
    }
    if target != ARCHITECTURE:
        moved[f"{target}.expert_gating_func"] = raw.u32(_SOFTMAX)
    for key, note in sorted(split.provenance.items()):
        moved[f"speculoe.upcycle.{key}"] = raw.text(note)
    return moved


def moe_tensors(dense: raw.RawGguf, split: Split) -> list[raw.NewTensor]:
    """Tensors of the MoE file, in the dense file's order; each is made when it is written."""
    check_fit(dense, split)
    plain = TARGETS[dense.value("general.architecture")] == ARCHITECTURE
    made: list[raw.NewTensor] = []
    for name, tensor in dense.tensors.items():
        layer, _, part = name.removeprefix("blk.").partition(".")
        if part in ("ffn_gate.weight", "ffn_up.weight"):
            made += _row_split(tensor, int(layer), part.removesuffix(".weight"), split)
        elif part == "ffn_down.weight":
            made += _column_split(tensor, int(layer), split)
            made.append(_router(int(layer), split))
            if not plain:
                made.append(_no_selection_bias(int(layer), split))
        elif part == "ffn_norm.weight" and not plain:
            name = f"blk.{layer}.post_attention_norm.weight"
            made.append(raw.NewTensor(name, tensor.shape, tensor.kind, partial(_same, tensor)))
        else:
            made.append(raw.NewTensor(name, tensor.shape, tensor.kind, partial(_same, tensor)))
    if "output.weight" not in dense.tensors:
        tied = dense.tensor("token_embd.weight")
        made.append(raw.NewTensor("output.weight", tied.shape, tied.kind, partial(_same, tied)))
    return made


def _same(tensor: raw.RawTensor) -> NDArray[np.uint8]:
    return tensor.rows


def _row_split(tensor: raw.RawTensor, layer: int, part: str, split: Split) -> list[raw.NewTensor]:
    n_embd = tensor.shape[0]
    shared, experts = split.shared[layer], split.experts[layer]

    def rows(of: NDArray[np.int16]) -> Callable[[], NDArray[np.uint8]]:
        return lambda: tensor.rows[of.reshape(-1)]

    return [
        raw.NewTensor(
            f"blk.{layer}.{part}_exps.weight",
            (n_embd, split.expert_width, split.n_experts),
            tensor.kind,
            rows(experts),
        ),
        raw.NewTensor(
            f"blk.{layer}.{part}_shexp.weight", (n_embd, split.n_shared), tensor.kind, rows(shared)
        ),
    ]


def _column_split(tensor: raw.RawTensor, layer: int, split: Split) -> list[raw.NewTensor]:
    n_embd = split.n_embd
    shared, experts = split.shared[layer], split.experts[layer]
    gain = split.down_gain[layer]

    routed_kind, shared_kind = down_kind(split.expert_width), down_kind(split.n_shared)

    def columns(of: NDArray[np.int16], factor: float) -> NDArray[np.float32]:
        # Quantised blocks run across the columns that move, so this matrix must be requantised.
        dense: NDArray[np.float32] = quants.dequantize(tensor.rows, tensor.kind)
        weights = dense[:, of.reshape(-1)]
        scaled: NDArray[np.float32] = weights * (gain[of.reshape(-1)] * np.float32(factor))
        return scaled

    def routed() -> NDArray[np.uint8]:
        # Gates sum to 1 over the k picked, so a picked expert's own output is k times too small.
        stacked = columns(experts, split.used).reshape(n_embd, split.n_experts, -1).swapaxes(0, 1)
        return quantize(stacked.reshape(-1, split.expert_width), routed_kind)

    return [
        raw.NewTensor(
            f"blk.{layer}.ffn_down_exps.weight",
            (split.expert_width, n_embd, split.n_experts),
            routed_kind,
            routed,
        ),
        raw.NewTensor(
            f"blk.{layer}.ffn_down_shexp.weight",
            (split.n_shared, n_embd),
            shared_kind,
            lambda: quantize(columns(shared, 1.0), shared_kind),
        ),
    ]


def _router(layer: int, split: Split) -> raw.NewTensor:
    shape = (split.n_embd, split.n_experts)
    return raw.NewTensor(
        f"blk.{layer}.ffn_gate_inp.weight", shape, Kind.F32, lambda: split.router[layer]
    )


def _no_selection_bias(layer: int, split: Split) -> raw.NewTensor:
    """glm4moe demands one; zero changes no pick."""
    return raw.NewTensor(
        f"blk.{layer}.exp_probs_b.bias",
        (split.n_experts,),
        Kind.F32,
        lambda: np.zeros(split.n_experts, np.float32),
    )


def down_kind(columns: int) -> Kind:
    """Q8_0 where rows of `columns` values fill its blocks, else F16."""
    return Kind.F16 if columns % _Q8_BLOCK else Kind.Q8_0


def quantize(weights: NDArray[Any], kind: Kind) -> NDArray[np.uint8]:
    """Bytes of `weights` [rows, columns] as F16 or Q8_0."""
    if kind == Kind.Q8_0:
        return quantize_q8_0(weights)
    return np.ascontiguousarray(weights, dtype=np.float16).view(np.uint8)


def quantize_q8_0(weights: NDArray[Any]) -> NDArray[np.uint8]:
    """Q8_0 bytes [rows, bytes per row] of `weights` [rows, columns], columns a multiple of 32.

    Rounds half away from zero, as ggml's reference does.
    """
    blocks = np.ascontiguousarray(weights, dtype=np.float32).reshape(-1, _Q8_BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = blocks * inverse
    packed = np.empty((blocks.shape[0], 2 + _Q8_BLOCK), dtype=np.uint8)
    packed[:, :2] = scale.astype(np.float16).view(np.uint8)
    packed[:, 2:] = (
        np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8).view(np.uint8)
    )
    return packed.reshape(weights.shape[0], -1)
