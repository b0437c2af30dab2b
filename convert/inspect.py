"""What a GGUF file says it holds: metadata, tensors, how its experts lie, sizes, what lies beside it.

Reads headers alone, so a file of any size takes milliseconds, and a damaged or hostile one costs a
line of error: `runtime.header` checks every count before it believes it. A file that is no language
model (a sidecar, an imatrix, a projector) is shown as far as its header goes. Knows no terminal.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from speculoe_local.runtime.errors import ModelError, SpeculoeError
from speculoe_local.runtime.expertfile import expert_file_path
from speculoe_local.runtime.header import (
    Array,
    Header,
    TensorInfo,
    Value,
    read_header,
    shown,
    type_name,
)
from speculoe_local.runtime.modelmap import ExpertMatrix, ModelMap, MoeLayer
from speculoe_local.runtime.sidecar import sidecar_path

__all__ = ["Beside", "ExpertLayout", "Inspection", "TypeShare", "as_json", "inspect"]

_STRING_LIMIT: Final = 4096  # characters of one metadata string in JSON; a template has its file
_SHOWN_ELEMENTS: Final = 8
_VALUE_TYPES: Final = (
    "u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TypeShare:
    """Tensors of one ggml type: how many, their bytes, and what an element takes on average."""

    type: str
    tensors: int
    bytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Consecutive MoE layers, `first` to `last`, whose experts have equal shapes and types.

    `expert_bytes` is one expert, all its matrices; `reads_per_expert` counts the separate places they
    lie in. `shared_bytes` is the shared expert's part of one layer.
    """

    first: int
    last: int
    layers: int
    experts: int
    used: int
    matrices: tuple[ExpertMatrix, ...]
    expert_bytes: int
    reads_per_expert: int
    shared_bytes: int
    bias: bool
    scale: bool


@dataclass(frozen=True, slots=True)
class Beside:
    """A file that belongs to the model: `state` is "matches", or why it will not be used."""

    path: Path
    bytes: int
    state: str


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `inspect` found. `model` is None where the file is no language model; `remark` says why.

    `header` is of the file named, `tensors` of all shards. Sizes are bytes.
    """

    header: Header
    files: tuple[Path, ...]
    file_bytes: int
    tensors: tuple[TensorInfo, ...]
    types: tuple[TypeShare, ...]
    model: ModelMap | None
    remark: str
    layouts: tuple[ExpertLayout, ...]
    sidecar: Beside | None
    expert_file: Beside | None


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Read the header of the GGUF at `path`, and of its shards, and say what it describes.

    Raises ModelError, one line, when it is no GGUF or its header is damaged.
    """
    header = read_header(path)
    model, remark = None, ""
    try:
        model = ModelMap.of(header)
    except ModelError as error:
        remark = str(error)
    tensors = tuple(model.tensors.values()) if model else header.tensors
    files = model.files if model else (header.path,)
    return Inspection(
        header=header,
        files=files,
        file_bytes=sum(file.stat().st_size for file in files),
        tensors=tensors,
        types=type_shares(tensors),
        model=model,
        remark=remark,
        layouts=tuple(expert_layouts(model)) if model else (),
        sidecar=beside(sidecar_path(files[0]), model) if model else None,
        expert_file=beside(expert_file_path(files[0]), model) if model else None,
    )


def type_shares(tensors: tuple[TensorInfo, ...]) -> tuple[TypeShare, ...]:
    """`tensors` summed by type, the largest share first."""
    counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for tensor in tensors:
        row = counts[tensor.ggml_type]
        row[0] += 1
        row[1] += tensor.nbytes
        row[2] += math.prod(tensor.shape)
    shares = [
        TypeShare(type_name(kind), count, nbytes, 8 * nbytes / weights)
        for kind, (count, nbytes, weights) in counts.items()
    ]
    return tuple(sorted(shares, key=lambda share: -share.bytes))


def expert_layouts(model: ModelMap) -> Iterator[ExpertLayout]:
    """The MoE layers of `model` in runs of equal layout."""

    def kind(layer: MoeLayer) -> tuple[Any, ...]:
        facts = (layer.n_expert, layer.n_expert_used, layer.has_bias, layer.has_scale)
        return (*facts, layer.shared_bytes, layer.shape_class)

    for _, run in groupby(model.layers, kind):
        layers = list(run)
        one = layers[0]
        yield ExpertLayout(
            first=one.index,
            last=layers[-1].index,
            layers=len(layers),
            experts=one.n_expert,
            used=one.n_expert_used,
            matrices=one.matrices,
            expert_bytes=one.expert_bytes,
            reads_per_expert=len(one.matrices),
            shared_bytes=one.shared_bytes,
            bias=one.has_bias,
            scale=one.has_scale,
        )


def beside(path: Path, model: ModelMap) -> Beside | None:
    """The file at `path` and whether it is `model`'s, by the fingerprint in its header."""
    try:
        size = path.stat().st_size
    except OSError:
        return None
    try:
        found = read_header(path).metadata.get("speculoe.fingerprint")
    except SpeculoeError as error:
        return Beside(path, size, str(error))
    if found == model.fingerprint:
        return Beside(path, size, "matches")
    return Beside(path, size, "belongs to another model; make it again")


def as_json(found: Inspection, *, tensors: bool = True) -> dict[str, Any]:
    """`found` as values that JSON has. Arrays of metadata are described, not listed."""
    model = found.model
    return {
        "file": str(found.header.path),
        "files": [str(path) for path in found.files],
        "bytes": found.file_bytes,
        "gguf_version": found.header.version,
        "alignment": found.header.alignment,
        "header_bytes": found.header.data_offset,
        "architecture": model.architecture if model else None,
        "name": model.name if model else None,
        "fingerprint": model.fingerprint if model else None,
        "remark": found.remark,
        "is_moe": model is not None and model.is_moe,
        "sizes": {
            "weights": sum(tensor.nbytes for tensor in found.tensors),
            "routed_experts": model.routed_bytes if model else 0,
            "other": model.other_bytes if model else sum(t.nbytes for t in found.tensors),
        },
        "types": [
            {
                "type": share.type,
                "tensors": share.tensors,
                "bytes": share.bytes,
                "bits_per_weight": round(share.bits_per_weight, 3),
            }
            for share in found.types
        ],
        "layers": model.n_layer if model else None,
        "experts": [_layout_json(layout) for layout in found.layouts],
        "sidecar": _beside_json(found.sidecar),
        "expert_file": _beside_json(found.expert_file),
        "metadata": {key: _value_json(value) for key, value in found.header.metadata.items()},
        "n_tensors": len(found.tensors),
    } | ({"tensors": [_tensor_json(tensor) for tensor in found.tensors]} if tensors else {})


def value_text(value: Value) -> str:
    """One line for a metadata value; control characters escaped, long ones cut."""
    if isinstance(value, Array):
        kind = _VALUE_TYPES[value.value_type]
        first = ""
        if value.value_type != _VALUE_TYPES.index("string") and value.count <= _SHOWN_ELEMENTS:
            first = " " + ", ".join(str(number) for number in value.numbers())
        return f"[{kind} x {value.count}]{first}"
    text = str(value)
    cut = text[:72] + ("…" if len(text) > 72 else "")
    return printable(cut) + (f" ({len(text)} characters)" if len(text) > 72 else "")


def printable(text: str) -> str:
    """`text` fit for a terminal: what could move its cursor is escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def _layout_json(layout: ExpertLayout) -> dict[str, Any]:
    return {
        "first": layout.first,
        "last": layout.last,
        "layers": layout.layers,
        "experts": layout.experts,
        "used": layout.used,
        "expert_bytes": layout.expert_bytes,
        "reads_per_expert": layout.reads_per_expert,
        "shared_bytes": layout.shared_bytes,
        "bias": layout.bias,
        "scale": layout.scale,
        "matrices": [
            {
                "kind": matrix.kind,
                "type": type_name(matrix.ggml_type),
                "shape": [matrix.ne0, matrix.ne1],
                "bytes_per_expert": matrix.bytes_per_expert,
                "offset": matrix.offset,
                "file": shown(matrix.path),
            }
            for matrix in layout.matrices
        ],
    }


def _beside_json(file: Beside | None) -> dict[str, Any] | None:
    if file is None:
        return None
    return {"path": str(file.path), "bytes": file.bytes, "state": file.state}


def _tensor_json(tensor: TensorInfo) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "type": type_name(tensor.ggml_type),
        "shape": list(tensor.shape),
        "offset": tensor.offset,
        "bytes": tensor.nbytes,
    }


def _value_json(value: Value) -> Any:
    if isinstance(value, Array):
        return {"array_of": _VALUE_TYPES[value.value_type], "count": value.count}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for these
    if isinstance(value, str) and len(value) > _STRING_LIMIT:
        return {"text": value[:_STRING_LIMIT], "characters": len(value)}
    return value


def metadata_rows(metadata: Mapping[str, Value]) -> Iterator[str]:
    """A line for each key."""
    for key, value in metadata.items():
        yield f"  {printable(key):<44} {value_text(value)}"
