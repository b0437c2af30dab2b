"""Write a model's expert file: each expert's matrices next to each other, aligned, for one read each.

A GGUF that llama.cpp loads cannot lie so (`runtime.expertfile` says why), so the experts are copied
into a file of their own beside the model, which stays as it is. The copy is read back and compared, and
how many reads an expert takes is counted from where its bytes lie.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from gguf import GGMLQuantizationType as Kind

from speculoe_local.convert import files, gguf_raw
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.expertfile import (
    ALIGNMENT,
    ARCHITECTURE,
    VERSION,
    ExpertFile,
    expert_file_path,
    experts_digest,
    ordered,
)
from speculoe_local.runtime.header import shown
from speculoe_local.runtime.modelmap import ModelMap, MoeLayer

__all__ = ["Interleaved", "Reads", "interleave", "reads_from_file", "reads_from_model"]

_PAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class Reads:
    """What fetching one expert costs, on average over all: reads of consecutive bytes, and the bytes
    of whole pages that they touch, for `expert_bytes` wanted."""

    per_expert: float
    touched_bytes: float
    expert_bytes: float


@dataclass(frozen=True, slots=True)
class Interleaved:
    """What `interleave` wrote: bytes of the file, experts in it, reads before and after."""

    path: Path
    bytes: int
    experts: int
    before: Reads
    after: Reads


def interleave(
    model: Path,
    out: Path | None = None,
    *,
    progress: Callable[[float], None] | None = None,
) -> Interleaved:
    """Write the expert file of `model`, by default where the engine looks for it.

    Memory stays at one expert. The file appears whole, after each expert has been read back from it and
    is what the model has. `progress` gets the share done, 0 to 1.

    Raises ModelError for a model without experts or one that changes meanwhile, OptionError when the
    disk has no room.
    """
    source = ModelMap.read(model)
    if not source.is_moe:
        raise ModelError(f"{shown(model)} has no experts to lay out; name a MoE model")
    place = out or expert_file_path(source.files[0])
    if any(place.exists() and place.samefile(file) for file in source.files):
        raise OptionError(f"{shown(place)} is the model itself; name another file with --out")
    needed = sum(layer.n_expert * stride_of(layer) for layer in source.layers)
    _require_space(place, needed)
    report = progress or (lambda share: None)
    with files.appearing(place) as file, ExitStack() as stack:
        readers = {path: stack.enter_context(path.open("rb")) for path in source.files}
        file.write(_header(source))
        digest = hashlib.sha256()
        done = 0
        for layer in source.layers:
            for expert in range(layer.n_expert):
                content = _expert(readers, layer, expert)
                digest.update(content)
                file.write(content.ljust(stride_of(layer), b"\0"))
                done += stride_of(layer)
                report(0.7 * done / needed)
        file.flush()
        made = ExpertFile.read(Path(file.name), source)
        if digest.digest() != _digest(made, source, lambda share: report(0.7 + 0.3 * share)):
            raise ModelError(f"{shown(place)} does not hold what was written; check the disk")
        after = reads_from_file(made, source)
    return Interleaved(
        path=place,
        bytes=place.stat().st_size,
        experts=sum(layer.n_expert for layer in source.layers),
        before=reads_from_model(source),
        after=after,
    )


def stride_of(layer: MoeLayer) -> int:
    """Bytes from one expert of `layer` to the next in the file."""
    return -(-layer.expert_bytes // ALIGNMENT) * ALIGNMENT


def reads_from_model(model: ModelMap) -> Reads:
    """What an expert costs from the GGUF itself."""
    return _reads(
        [
            (matrix.expert_offset(expert), matrix.bytes_per_expert, matrix.path)
            for matrix in ordered(layer)
        ]
        for layer in model.layers
        for expert in range(layer.n_expert)
    )


def reads_from_file(file: ExpertFile, model: ModelMap) -> Reads:
    """What an expert costs from its expert file."""

    def pieces(layer: MoeLayer, expert: int) -> list[tuple[int, int, Path]]:
        found = []
        for matrix in ordered(layer):
            offset, stride = file.place(layer.index, matrix.kind)
            found.append((offset + expert * stride, matrix.bytes_per_expert, file.path))
        return found

    return _reads(
        pieces(layer, expert) for layer in model.layers for expert in range(layer.n_expert)
    )


def _reads(experts: Iterable[list[tuple[int, int, Path]]]) -> Reads:
    """Pieces (offset, bytes, file) of each expert; what touches joins into one read."""
    n = reads = touched = wanted = 0
    for pieces in experts:
        n += 1
        end: tuple[int, Path] | None = None
        first = 0
        for offset, nbytes, path in pieces:
            if end != (offset, path):
                touched += _pages(first, end[0]) if end else 0
                reads, first = reads + 1, offset
            end = (offset + nbytes, path)
            wanted += nbytes
        touched += _pages(first, end[0]) if end else 0
    return Reads(reads / n, touched / n, wanted / n)


def _pages(start: int, end: int) -> int:
    return (-(-end // _PAGE) - start // _PAGE) * _PAGE


def _expert(readers: Mapping[Path, BinaryIO], layer: MoeLayer, expert: int) -> bytes:
    parts = []
    for matrix in ordered(layer):
        file = readers[matrix.path]
        file.seek(matrix.expert_offset(expert))
        part = file.read(matrix.bytes_per_expert)
        if len(part) != matrix.bytes_per_expert:
            raise ModelError(f"{shown(matrix.path)} got shorter while it was copied; start again")
        parts.append(part)
    return b"".join(parts)


def _digest(file: ExpertFile, model: ModelMap, report: Callable[[float], None]) -> bytes:
    digest = hashlib.sha256()
    done, whole = 0, sum(layer.n_expert for layer in model.layers)
    with file.path.open("rb") as reader:
        for layer in model.layers:
            rows = file.layers[layer.index]
            for expert in range(layer.n_expert):
                reader.seek(rows.offset + expert * rows.stride)
                digest.update(reader.read(rows.nbytes))
                done += 1
                report(done / whole)
    return digest.digest()


def _header(model: ModelMap) -> bytes:
    """Everything before the first expert, filled up to the alignment."""
    kinds = {
        f"speculoe.block.{layer.index}.kinds": ",".join(m.kind for m in ordered(layer))
        for layer in model.layers
    }
    metadata = {
        "general.architecture": gguf_raw.text(ARCHITECTURE),
        "general.type": gguf_raw.text("experts"),
        "general.name": gguf_raw.text(f"experts of {model.name}"),
        "general.alignment": gguf_raw.u32(ALIGNMENT),
        "speculoe.version": gguf_raw.u32(VERSION),
        "speculoe.fingerprint": gguf_raw.text(model.fingerprint),
        "speculoe.experts": gguf_raw.text(experts_digest(model)),
        **{key: gguf_raw.text(value) for key, value in kinds.items()},
    }
    tensors = [
        gguf_raw.NewTensor(
            f"blk.{layer.index}.experts", (stride_of(layer), layer.n_expert), Kind.I8, _nothing
        )
        for layer in model.layers
    ]
    return gguf_raw.header_bytes(metadata, tensors, ALIGNMENT)


def _nothing() -> np.ndarray:
    """Experts are written one by one, never as a tensor."""
    return np.zeros(0, np.uint8)


def _require_space(place: Path, needed: int) -> None:
    if not place.parent.is_dir():
        raise OptionError(f"{shown(place.parent)} is no folder; make it or name another --out")
    free = shutil.disk_usage(place.parent).free
    if free < needed:
        raise OptionError(
            f"{shown(place.parent)} has {free} bytes free, the experts take {needed}; free some or "
            "choose another --out"
        )
