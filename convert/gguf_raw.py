"""GGUF files as raw parts: metadata values as bytes, tensors as byte ranges, and back to disk.

Knows the container and nothing about models. Token lists are carried over as the bytes they are
(parsing 150,000 values into objects takes longer than rewriting the whole embedded model), so it is
quick where `gguf.GGUFReader` is complete.
Source: ggml `gguf.h`, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from speculoe_local.runtime.errors import ModelError

MAGIC = b"GGUF"
ALIGNMENT = 32

_SCALAR = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True, slots=True)
class RawValue:
    """One metadata value: its type and its encoded bytes (arrays: item type, count, items)."""

    kind: GGUFValueType
    encoded: bytes

    def scalar(self) -> Any:
        """The Python value of a number, bool or string; raises ModelError for arrays."""
        if self.kind == GGUFValueType.STRING:
            return self.encoded[8:].decode("utf-8", "replace")
        if self.kind == GGUFValueType.ARRAY:
            raise ModelError("metadata value is an array where one value was expected")
        return struct.unpack(_SCALAR[self.kind], self.encoded)[0]


def text(value: str) -> RawValue:
    raw = value.encode()
    return RawValue(GGUFValueType.STRING, struct.pack("<Q", len(raw)) + raw)


def u32(value: int) -> RawValue:
    return RawValue(GGUFValueType.UINT32, struct.pack("<I", value))


def f32(value: float) -> RawValue:
    return RawValue(GGUFValueType.FLOAT32, struct.pack("<f", value))


def boolean(value: bool) -> RawValue:
    return RawValue(GGUFValueType.BOOL, struct.pack("<?", value))


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor to read: `shape` in ggml order (fastest first), uint8 `rows` [n, bytes per row]."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    rows: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: `make` is called when its turn comes, so that only one is in memory."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    make: Callable[[], NDArray[Any]]

    @property
    def n_bytes(self) -> int:
        return _row_bytes(self.shape[0], self.kind) * int(np.prod(self.shape[1:], dtype=np.int64))


@dataclass(frozen=True, slots=True)
class RawGguf:
    """A GGUF file: metadata in file order and tensors, whose bytes stay mapped from the file."""

    path: Path
    metadata: dict[str, RawValue]
    tensors: dict[str, RawTensor]

    def value(self, key: str) -> Any:
        """The scalar under `key`; raises ModelError when the file lacks it."""
        if key not in self.metadata:
            raise ModelError(
                f"{self.path}: metadata key {key} is missing; is this the right model?"
            )
        return self.metadata[key].scalar()

    def tensor(self, name: str) -> RawTensor:
        """The tensor called `name`; raises ModelError when the file lacks it."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing; is this the right model?")
        return self.tensors[name]


def read_gguf(path: Path) -> RawGguf:
    """Map `path`; raises ModelError when it is not GGUF, is cut short, or lies about sizes."""
    try:
        file = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot be read as GGUF ({exc})") from exc
    cursor = _Cursor(path, file)
    if cursor.take(4) != MAGIC:
        raise ModelError(f"{path}: does not start with GGUF; give a GGUF file")
    version = cursor.number("<I")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version}, 2 or 3 are readable; convert it again")
    n_tensors, n_values = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, RawValue] = {}
    for _ in range(n_values):
        key = cursor.text()
        kind = cursor.value_type()
        start = cursor.at
        cursor.skip_value(kind)
        metadata[key] = RawValue(kind, file[start : cursor.at].tobytes())
    entries = [cursor.tensor_entry() for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", u32(ALIGNMENT)).scalar()
    base = -(-cursor.at // alignment) * alignment
    tensors = {
        name: RawTensor(name, shape, kind, _view(path, file, name, shape, kind, base + offset))
        for name, shape, kind, offset in entries
    }
    return RawGguf(path, metadata, tensors)


def write_gguf(
    out: BinaryIO,
    metadata: dict[str, RawValue],
    tensors: Iterable[NewTensor],
    progress: Callable[[float], None] | None = None,
) -> int:
    """Write a GGUF v3 file to `out`, tensor after tensor; returns its size in bytes.

    Raises ModelError when a tensor's bytes do not have the length that its shape promises.
    """
    listed = list(tensors)
    header, total = header_bytes(metadata, listed), sum(_aligned(t.n_bytes) for t in listed)
    out.write(header)
    done = 0
    for tensor in listed:
        raw = np.ascontiguousarray(tensor.make()).view(np.uint8).reshape(-1)
        if raw.size != tensor.n_bytes:
            raise ModelError(
                f"tensor {tensor.name} made {raw.size} bytes, {tensor.n_bytes} promised"
            )
        out.write(raw.data)
        out.write(b"\0" * (_aligned(raw.size) - raw.size))
        done += _aligned(raw.size)
        if progress is not None:
            progress(done / total)
    return len(header) + total


def gguf_size(metadata: dict[str, RawValue], tensors: Iterable[NewTensor]) -> int:
    """Size in bytes of the file that `write_gguf` would write; makes no tensor."""
    listed = list(tensors)
    return len(header_bytes(metadata, listed)) + sum(_aligned(t.n_bytes) for t in listed)


def header_bytes(
    metadata: dict[str, RawValue], tensors: list[NewTensor], alignment: int = ALIGNMENT
) -> bytes:
    """Everything before the first tensor, filled up to `alignment`, which `metadata` must name unless
    it is the default."""
    head = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        head += [text(key).encoded, struct.pack("<I", value.kind), value.encoded]
    offset = 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        head += [text(tensor.name).encoded, dims, struct.pack("<IQ", tensor.kind, offset)]
        offset += _aligned(tensor.n_bytes, alignment)
    joined = b"".join(head)
    return joined.ljust(_aligned(len(joined), alignment), b"\0")


def _aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment


def _row_bytes(n: int, kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if n % block:
        raise ModelError(f"row of {n} values is not a multiple of {kind.name}'s block of {block}")
    return int(n // block * size)


def _view(
    path: Path,
    file: NDArray[np.uint8],
    name: str,
    shape: tuple[int, ...],
    kind: GGMLQuantizationType,
    start: int,
) -> NDArray[np.uint8]:
    row = _row_bytes(shape[0], kind)
    n_rows = 1
    for extent in shape[1:]:
        n_rows *= extent
    if start + row * n_rows > file.size:
        raise ModelError(
            f"{path}: tensor {name} ends at byte {start + row * n_rows}, the file has {file.size};"
            " it is cut short, fetch it again"
        )
    return file[start : start + row * n_rows].reshape(n_rows, row)


class _Cursor:
    """Walks the header; every read is checked against the file's end."""

    def __init__(self, path: Path, file: NDArray[np.uint8]) -> None:
        self._path = path
        self._bytes = memoryview(file)  # type: ignore[arg-type]
        self.at = 0

    def take(self, n: int) -> bytes:
        end = self.at + n
        if end > len(self._bytes):
            raise ModelError(
                f"{self._path}: header needs {end} bytes, the file has {len(self._bytes)};"
                " it is cut short, fetch it again"
            )
        piece = bytes(self._bytes[self.at : end])
        self.at = end
        return piece

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return int(value)

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value_type(self) -> GGUFValueType:
        kind = self.number("<I")
        try:
            return GGUFValueType(kind)
        except ValueError:
            raise ModelError(f"{self._path}: metadata type {kind} is unknown") from None

    def skip_value(self, kind: GGUFValueType) -> None:
        if kind == GGUFValueType.STRING:
            self.take(self.number("<Q"))
        elif kind == GGUFValueType.ARRAY:
            item, count = self.value_type(), self.number("<Q")
            if item == GGUFValueType.STRING:
                self._skip_strings(count)
            elif item == GGUFValueType.ARRAY:
                raise ModelError(f"{self._path}: metadata holds an array of arrays")
            else:
                self.take(count * struct.calcsize(_SCALAR[item]))
        else:
            self.take(struct.calcsize(_SCALAR[kind]))

    def _skip_strings(self, count: int) -> None:
        # 98,000 strings in the embedded model's tokenizer: this loop is most of the reading time.
        length, raw, at = struct.Struct("<Q").unpack_from, self._bytes, self.at
        try:
            for _ in range(count):
                at += 8 + length(raw, at)[0]
        except struct.error:
            at = len(raw) + 1
        if at > len(raw):
            raise ModelError(f"{self._path}: a list of {count} strings runs past the file's end")
        self.at = at

    def tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.text()
        n_dims = self.number("<I")
        if not 1 <= n_dims <= 4:
            raise ModelError(f"{self._path}: tensor {name} has {n_dims} dimensions, 1 to 4 allowed")
        shape = tuple(self.number("<Q") for _ in range(n_dims))
        kind = self.number("<I")
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(f"{self._path}: tensor {name} has unknown type {kind}") from None
        return name, shape, known, self.number("<Q")
