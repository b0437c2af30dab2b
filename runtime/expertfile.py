"""The expert file of a model: each routed expert's matrices next to each other, aligned, in a side file.

A GGUF keeps a tensor in one piece, and a tensor holds one matrix of *all* experts, so an expert is
scattered over as many places as it has matrices. No GGUF that llama.cpp loads can be otherwise. The
expert file is a copy of the experts alone, for one read each; the model stays as it is beside it.

1. It is a GGUF of its own: `general.architecture` is "speculoe-experts", `speculoe.version` is 1,
   `general.alignment` is 4096.
2. `speculoe.fingerprint` and `speculoe.experts` name the model: `ModelMap.fingerprint`, and
   `experts_digest`, which tells a finetune of it apart.
3. For each MoE layer N one tensor `blk.N.experts` of type I8, shape [stride, n_expert]: expert e is
   row e. `stride` is a multiple of 4096; what an expert leaves of it is zero.
4. `speculoe.block.N.kinds` lists its matrices' kinds in the order they lie, which is that of ORDER:
   `up,gate,down` for example. Each begins where the one before it ends.

Knows the file and checks it against a model. `convert.interleave` writes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.header import read_header, shown
from speculoe_local.runtime.modelmap import ExpertMatrix, ModelMap, MoeLayer

__all__ = [
    "ALIGNMENT",
    "ARCHITECTURE",
    "ORDER",
    "VERSION",
    "ExpertFile",
    "ExpertRows",
    "expert_file_path",
    "experts_digest",
    "ordered",
]

ARCHITECTURE: Final = "speculoe-experts"
VERSION: Final = 1
ALIGNMENT: Final = 4096  # what direct reads need, and a page
ORDER: Final = ("up", "gate", "gate_up", "down")  # as graphs use them

_INT8: Final = 24  # ggml_type
_SAMPLE: Final = 4096  # bytes
_SHARD: Final = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
_AGAIN: Final = "run `speculoe-local repack` again"


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The experts of one layer: expert e is `nbytes` bytes from `offset + e * stride` on.

    `matrix_offsets` says where in an expert the matrix of each kind begins.
    """

    offset: int
    stride: int
    nbytes: int
    matrix_offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """A model's experts, by block number of their layer."""

    path: Path
    layers: Mapping[int, ExpertRows]

    @classmethod
    def read(cls, path: Path, model: ModelMap) -> ExpertFile:
        """Read the header of the expert file at `path`; no weight is read.

        Raises ModelError when it is damaged, of another model, or lacks a layer.
        """
        header = read_header(path)
        about = header.metadata
        if about.get("general.architecture") != ARCHITECTURE:
            raise ModelError(f"{shown(path)} is no expert file; {_AGAIN}")
        if about.get("speculoe.version") != VERSION:
            raise ModelError(
                f"{shown(path)} is an expert file of version {about.get('speculoe.version')}, "
                f"{VERSION} is read; {_AGAIN}"
            )
        if about.get("speculoe.fingerprint") != model.fingerprint:
            raise ModelError(f"{shown(path)} belongs to another model; {_AGAIN}")
        if about.get("speculoe.experts") != experts_digest(model):
            raise ModelError(f"{shown(path)} holds the experts of other weights; {_AGAIN}")
        tensors = {tensor.name: tensor for tensor in header.tensors}
        layers: dict[int, ExpertRows] = {}
        for layer in model.layers:
            tensor = tensors.get(f"blk.{layer.index}.experts")
            kinds = about.get(f"speculoe.block.{layer.index}.kinds")
            if tensor is None or not isinstance(kinds, str):
                raise ModelError(f"{shown(path)} lacks layer {layer.index}; {_AGAIN}")
            matrices = ordered(layer)
            stride = tensor.shape[0]
            if (
                kinds != ",".join(matrix.kind for matrix in matrices)
                or tensor.ggml_type != _INT8
                or tensor.shape != (stride, layer.n_expert)
                or stride % ALIGNMENT
                or tensor.offset % ALIGNMENT
                or stride < layer.expert_bytes
            ):
                raise ModelError(
                    f"{shown(path)} holds layer {layer.index} as {tensor.shape} of {kinds[:80]!r}, which is "
                    f"not its {layer.n_expert} experts of {layer.expert_bytes} bytes; {_AGAIN}"
                )
            layers[layer.index] = ExpertRows(
                tensor.offset, stride, layer.expert_bytes, _starts(matrices)
            )
        return cls(path, layers)

    def place(self, layer: int, kind: str) -> tuple[int, int]:
        """Byte of expert 0's matrix `kind` of block `layer`, and the distance to the next expert's."""
        rows = self.layers[layer]
        return rows.offset + rows.matrix_offsets[kind], rows.stride


def experts_digest(model: ModelMap) -> str:
    """SHA-256 (hex) over the first 4 KiB of the first and the last expert of every expert matrix.

    Reads a few MiB of the largest models. Raises ModelError when a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in model.files}
            for layer in model.layers:
                for matrix in layer.matrices:
                    for expert in (0, matrix.n_expert - 1):
                        file = files[matrix.path]
                        file.seek(matrix.expert_offset(expert))
                        digest.update(file.read(min(_SAMPLE, matrix.bytes_per_expert)))
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def ordered(layer: MoeLayer) -> list[ExpertMatrix]:
    """The matrices of `layer` in the order they lie in an expert."""
    return sorted(layer.matrices, key=lambda matrix: ORDER.index(matrix.kind))


def _starts(matrices: list[ExpertMatrix]) -> dict[str, int]:
    starts: dict[str, int] = {}
    at = 0
    for matrix in matrices:
        starts[matrix.kind] = at
        at += matrix.bytes_per_expert
    return starts


def expert_file_path(model: Path) -> Path:
    """Where the expert file of the GGUF `model` lies; of a split model, without shard number."""
    return model.with_name(_SHARD.sub("", model.stem) + ".experts.gguf")
