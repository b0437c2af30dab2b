"""A GGUF model being drafted: metadata, tensors that are made when written, and quantisation.

Knows tensor types and the file writer; `families` knows which tensors a model has.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import quants

from tests.models import vocab

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Value = str | bool | int | float | list[str] | list[int] | list[bool]

_Q4_K_LEVELS: Final = 15


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes every family shares. Rows of expert matrices are `n_embd` and `n_ff_exp` long."""

    n_layer: int = 4
    n_expert: int = 8
    n_used: int = 2
    n_embd: int = 64
    n_ff_exp: int = 64
    n_ff: int = 128
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ctx: int = 4096


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor. `shape` is numpy order (rows last but one, row length last)."""

    name: str
    shape: tuple[int, ...]
    type: Type
    make: Callable[[], Bytes]

    @property
    def n_bytes(self) -> int:
        return nbytes(self.shape, self.type)


ExpertFill = Callable[["Draft", str, tuple[int, int, int], float], Bytes]


def nbytes(shape: tuple[int, ...], kind: Type) -> int:
    """Return the bytes of a tensor of `shape` elements; raises ValueError on a partial block."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"row of {shape[-1]} is no multiple of {kind.name} block {block}")
    return math.prod(shape) // int(block) * int(size)


def encode(values: Floats, kind: Type) -> Bytes:
    """Quantise `values` (float32, row length last) to the raw bytes of `kind`, shape flat."""
    raw = _encode_q4_k(values) if kind == Type.Q4_K else quants.quantize(values, kind)
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1)


def _encode_q4_k(values: Floats) -> Bytes:
    """Symmetric Q4_K, which gguf.quants can only read: min = 7.5 steps, so the range is +-7.5."""
    blocks = values.reshape(-1, 8, 32)
    step = np.abs(blocks).max(axis=2) / (_Q4_K_LEVELS / 2)  # [blocks, 8]
    d = np.maximum(step.max(axis=1, keepdims=True) / 63, 1e-6).astype(np.float16)
    scale = np.clip(np.rint(step / d.astype(np.float32)), 1, 63).astype(np.uint8)
    width = (d.astype(np.float32) * scale)[:, :, None]
    levels = np.clip(np.rint(blocks / width + _Q4_K_LEVELS / 2), 0, _Q4_K_LEVELS).astype(np.uint8)
    low, high = scale[:, :4], scale[:, 4:]
    head = low | (high >> 4) << 6  # scales and mins are equal, so are their packed halves
    tail = (high & 0xF) | (high & 0xF) << 4
    d_min = (d.astype(np.float32) * (_Q4_K_LEVELS / 2)).astype(np.float16)
    packed = levels[:, 0::2] | levels[:, 1::2] << 4
    parts = (d.view(np.uint8), d_min.view(np.uint8), head, head, tail, packed.reshape(-1, 128))
    return np.concatenate(parts, axis=1)


def random_experts(draft: Draft, name: str, shape: tuple[int, int, int], gain: float) -> Bytes:
    """Fill experts with independent values: the default of a tiny model."""
    return encode(draft.normal(name, shape, gain), draft.expert_type)


class Draft:
    """Collects the metadata and tensors of one model; nothing is computed before `write`."""

    def __init__(
        self,
        arch: str,
        dims: Dims,
        quant: str,
        seed: int = 0,
        fill: ExpertFill = random_experts,
    ) -> None:
        self.arch = arch
        self.dims = dims
        self.expert_type = Type[quant]
        self.tensors: list[Tensor] = []
        self.metadata: dict[str, Value] = {"general.name": f"random {arch}", **vocab.metadata()}
        self._seed = seed
        self._fill = fill

    def hparams(self, values: dict[str, Value]) -> None:
        """Add hyperparameters under `<arch>.`."""
        self.metadata.update({f"{self.arch}.{key}": value for key, value in values.items()})

    def normal(self, name: str, shape: tuple[int, ...], gain: float) -> Floats:
        """Return N(0, gain^2 / row length): unit input gives output of size `gain`.

        Seeded by the name, so a tensor does not depend on what was drafted before it.
        """
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values: Floats = rng.standard_normal(shape, dtype=np.float32)
        values *= gain / math.sqrt(shape[-1])
        return values

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """Add a dense weight: Q8_0 where the row length allows, else F16."""
        kind = Type.F16 if shape[-1] % 32 else Type.Q8_0
        self._add(name, shape, kind, lambda: encode(self.normal(name, shape, gain), kind))

    def vector(self, name: str, *shape: int, mean: float = 0.0, spread: float = 0.1) -> None:
        """Add an F32 tensor N(mean, spread^2): norms, biases, routers."""

        def make() -> Bytes:
            gain = spread * float(np.sqrt(shape[-1]))
            return encode(self.normal(name, shape, gain) + np.float32(mean), Type.F32)

        self._add(name, shape, Type.F32, make)

    def norm(self, name: str, size: int) -> None:
        self.vector(name, size, mean=1.0)

    def router(self, name: str, gain: float = 1.5) -> None:
        """Add the F32 router; logits of size `gain` spread the choice over all experts."""
        d = self.dims
        self.vector(name, d.n_expert, d.n_embd, spread=gain / float(np.sqrt(d.n_embd)))

    def experts(self, name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        """Add one matrix per expert, of the type under test."""
        shape = (self.dims.n_expert, rows, cols)
        self._add(name, shape, self.expert_type, lambda: self._fill(self, name, shape, gain))

    def fused_experts(self, name: str, halves: tuple[str, str], rows: int, cols: int) -> None:
        """Add `halves` stacked along the rows of each expert, valued as they are when apart."""
        half = (self.dims.n_expert, rows, cols)

        def make() -> Bytes:
            parts = [self._fill(self, part, half, 1.0) for part in halves]
            rows_of = [part.reshape(self.dims.n_expert, -1) for part in parts]
            return np.concatenate(rows_of, axis=1).reshape(-1)

        self._add(name, (self.dims.n_expert, 2 * rows, cols), self.expert_type, make)

    def _add(
        self, name: str, shape: tuple[int, ...], kind: Type, make: Callable[[], Bytes]
    ) -> None:
        nbytes(shape, kind)  # refuses a row that does not fill its blocks before any work is done
        self.tensors.append(Tensor(name, shape, kind, make))

    def write(self, path: Path) -> Path:
        """Write the file one tensor at a time; `path` appears complete or not at all."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        writer = gguf.GGUFWriter(partial, self.arch)
        try:
            for key, value in self.metadata.items():
                add_value(writer, key, value)
            for t in self.tensors:
                writer.add_tensor_info(
                    t.name, t.shape, np.dtype(np.float32), t.n_bytes, raw_dtype=t.type
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for t in self.tensors:
                writer.write_tensor_data(t.make())
            writer.close()
            partial.replace(path)
        finally:
            writer.close()
            partial.unlink(missing_ok=True)
        return path


def add_value(writer: Any, key: str, value: Value) -> None:
    """Add `value` as the GGUF type its Python type stands for (int is uint32)."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
