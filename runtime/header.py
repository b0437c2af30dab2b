"""Read the header of a GGUF file: metadata and where each tensor lies. Never a weight.

The `gguf` package's reader maps the file and believes every count in it, so a damaged header costs
memory, minutes or a traceback. This one checks each count against the bytes that are left before it
allocates, and says in one line what is wrong. It accepts what llama.cpp accepts (ggml/src/gguf.cpp
at the pin), with lower limits. It knows nothing about models: `modelmap` gives the names a meaning.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from speculoe_local.runtime.errors import ModelError

__all__ = ["Array", "Header", "TensorInfo", "Value", "read_header", "shown", "type_name"]

HEADER_LIMIT = 256 << 20  # bytes; a 262k-token vocabulary with its merges takes 25 MiB
KEY_LIMIT = (1 << 16) - 1  # bytes, by the format's specification
NAME_LIMIT = 63  # bytes; GGML_MAX_NAME less its terminator
TEXT_LIMIT = 4 << 20  # bytes of one string value; chat templates reach 100 KB
TEXT_TOTAL_LIMIT = 16 << 20  # bytes of all keys and string values, which are kept in memory
KEYS_LIMIT = 1 << 16
TENSORS_LIMIT = 1 << 16  # 512 layers of 128 tensors each
ARRAY_LIMIT = 1 << 22  # elements
DEFAULT_ALIGNMENT = 32
ALIGNMENT_RANGE = (8, 1 << 20)

_BUFFER = 1 << 18
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, the smallest value
_MIN_TENSOR_BYTES = (
    8 + 1 + 4 + 8 + 4 + 8
)  # length, one letter, dimensions, one of them, type, offset

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

_BLOCKS = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
_BLOCKS.setdefault(42, (64, 18))  # Q2_0: in the pinned ggml, not in the gguf package


@dataclass(frozen=True, slots=True)
class Array:
    """A metadata array that stays in the file until asked for; only its place is kept.

    `value_type` is the GGUF type of an element, `nbytes` counts string lengths too.
    """

    path: Path
    value_type: int
    count: int
    offset: int
    nbytes: int

    def __len__(self) -> int:
        return self.count

    def raw(self) -> bytes:
        """The `nbytes` bytes as the file has them; ModelError if it changed or cannot be read."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                content = file.read(self.nbytes)
        except OSError as error:
            raise ModelError(f"{shown(self.path)} cannot be read: {error.strerror}") from error
        if len(content) != self.nbytes:
            raise ModelError(f"{shown(self.path)} got shorter while in use; start again")
        return content

    def numbers(self) -> np.ndarray:
        """Shape (count,), in the dtype of the file; ModelError for an array of strings."""
        if self.value_type == _STRING:
            raise ModelError(
                f"{shown(self.path)} has strings where numbers are needed; convert it again"
            )
        return np.frombuffer(self.raw(), np.dtype(_SCALARS[self.value_type]))

    def strings(self) -> list[str]:
        """All strings, bytes that are not UTF-8 replaced; ModelError for an array of numbers."""
        if self.value_type != _STRING:
            raise ModelError(
                f"{shown(self.path)} has numbers where strings are needed; convert it again"
            )
        return list(self._strings())

    def _strings(self) -> Iterator[str]:
        content, at = self.raw(), 0
        for _ in range(self.count):
            if at + 8 > len(content):
                raise ModelError(f"{shown(self.path)} changed while in use; start again")
            end = at + 8 + _U64.unpack_from(content, at)[0]
            yield content[at + 8 : end].decode("utf-8", "replace")
            at = end


Value = int | float | bool | str | Array


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` as ggml orders it (ne0 first), `offset` in bytes from the file's start.

    `ggml_type` is the number in the file, see `type_name`; `path` is the shard that holds it.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class Header:
    """What `read_header` found; `data_offset` and `file_size` in bytes, tensors in file order."""

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    file_size: int


def read_header(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Header:
    """Read the header of the GGUF at `path`, any bytes the file system allows.

    Raises ModelError, one line, if there is no such file, it is not a little-endian GGUF of version
    2 or 3, a count or length does not fit in it, or a tensor lies outside it.
    """
    place = Path(os.fsdecode(path))
    try:
        status = place.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{shown(place)} is a directory; name the .gguf file in it")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise ModelError(f"{shown(place)} is not a regular file; name a .gguf file")
        with place.open("rb", buffering=_BUFFER) as file:
            return _parse(_Cursor(place, file, os.fstat(file.fileno()).st_size))
    except FileNotFoundError as error:
        raise ModelError(f"{shown(place)} does not exist; check the path") from error
    except PermissionError as error:
        raise ModelError(f"{shown(place)} may not be read; check its permissions") from error
    except (OSError, ValueError, struct.error) as error:  # a NUL in the path; a file cut while read
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            f"{shown(place)} cannot be read: {reason}; check the path and the disk"
        ) from error


def shown(path: Path) -> str:
    """`path` fit for one line of text: control characters and undecodable bytes are escaped."""
    text = str(path)
    return text if text.isprintable() else repr(text)[1:-1]


def type_name(ggml_type: int) -> str:
    """The usual name of a ggml type, such as Q4_K."""
    try:
        return str(GGMLQuantizationType(ggml_type).name)
    except ValueError:
        return {42: "Q2_0"}.get(ggml_type, f"type {ggml_type}")


class _Cursor:
    """A position in the file that cannot leave it."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size, self.at = path, file, size, 0

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{shown(self.path)} {problem}")

    def damaged(self, problem: str) -> NoReturn:
        self.fail(f"is damaged: {problem}; download it again")

    def truncated(self, what: str, end: int) -> NoReturn:
        self.fail(
            f"is truncated: {what} ends at byte {end}, the file has {self.size}; download it again"
        )

    def need(self, nbytes: int, what: str) -> int:
        """The position after the next `nbytes`; ModelError if the file or the limit ends first."""
        end = self.at + nbytes
        if end > self.size:
            self.truncated(what, end)
        if end > HEADER_LIMIT:
            self.damaged(f"{what} ends at byte {end}, a header has at most {HEADER_LIMIT}")
        return end

    def take(self, nbytes: int, what: str) -> bytes:
        end = self.need(nbytes, what)
        content = self.file.read(nbytes)
        if len(content) != nbytes:
            self.fail(f"got shorter while {what} was read; start again")
        self.at = end
        return content

    def skip(self, nbytes: int, what: str) -> None:
        self.at = self.need(nbytes, what)
        self.file.seek(self.at)

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def text(self, what: str, limit: int) -> bytes:
        length = self.u64(what)
        if length > limit:
            self.damaged(f"{what} has {length} bytes, the limit is {limit}")
        return self.take(length, what)

    def name(self, what: str, limit: int) -> str:
        content = self.text(what, limit)
        try:
            name = content.decode("utf-8")
        except UnicodeDecodeError:
            self.damaged(f"{what} is {content[:40]!r}, not UTF-8")
        if not name:
            self.damaged(f"{what} is empty")
        return name

    def count(self, what: str, limit: int, smallest: int) -> int:
        """A count of items of at least `smallest` bytes, which must fit in the rest of the file."""
        count = self.u64(f"the number of {what}")
        if count > limit:
            self.damaged(f"it claims {count} {what}, the limit is {limit}")
        self.need(count * smallest, f"the smallest form of its {count} {what}")
        return count


def _parse(cursor: _Cursor) -> Header:
    version = _version(cursor)
    n_tensors = cursor.count("tensors", TENSORS_LIMIT, _MIN_TENSOR_BYTES)
    n_keys = cursor.count("keys", KEYS_LIMIT, _MIN_KEY_BYTES)
    metadata = _metadata(cursor, n_keys)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    low, high = ALIGNMENT_RANGE
    if (
        not isinstance(alignment, int)
        or not low <= alignment <= high
        or alignment & (alignment - 1)
    ):
        cursor.fail(
            f"has general.alignment {alignment!r}, not a power of two from {low} to {high}; "
            "convert it again"
        )
    entries = [_tensor(cursor) for _ in range(n_tensors)]
    data_offset = _pad(cursor.at, alignment)
    return Header(
        path=cursor.path,
        version=version,
        alignment=alignment,
        metadata=MappingProxyType(metadata),
        tensors=_place(cursor, entries, data_offset, alignment),
        data_offset=data_offset,
        file_size=cursor.size,
    )


def _version(cursor: _Cursor) -> int:
    if cursor.size == 0:
        cursor.fail("is empty; download it again")
    magic = cursor.file.read(min(4, cursor.size))
    if magic != b"GGUF":
        cursor.fail(f"is not a GGUF: it starts with {magic!r}, not b'GGUF'; name a .gguf file")
    cursor.at = 4
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        cursor.fail("is a big-endian GGUF, only little-endian is read; convert it again")
    if version == 1:
        cursor.fail("is a GGUF of version 1, only 2 and 3 are read; download a newer file")
    if version not in (2, 3):
        cursor.fail(f"is a GGUF of version {version}, only 2 and 3 are read; update speculoe-local")
    return version


def _metadata(cursor: _Cursor, n_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    text_bytes = 0
    for index in range(n_keys):
        key = cursor.name(f"key {index}", KEY_LIMIT)
        what = f"key {key[:80]!r}"
        if key in metadata:
            cursor.damaged(f"{what} is there twice")
        kind = cursor.u32(what)
        if key == "general.alignment" and kind != _UINT32:
            cursor.fail(
                f"has general.alignment of value type {kind}, not {_UINT32}; convert it again"
            )
        text_bytes += len(key)
        if kind == _STRING:
            content = cursor.text(what, TEXT_LIMIT)
            text_bytes += len(content)
            metadata[key] = content.decode("utf-8", "replace")
        elif kind == _ARRAY:
            metadata[key] = _array(cursor, what)
        else:
            metadata[key] = _scalar(cursor, kind, what)
        if text_bytes > TEXT_TOTAL_LIMIT:
            cursor.damaged(f"up to {what} it has over {TEXT_TOTAL_LIMIT} bytes of text")
    return metadata


def _scalar(cursor: _Cursor, kind: int, what: str) -> int | float | bool:
    form = _SCALARS.get(kind)
    if form is None:
        cursor.damaged(f"{what} has value type {kind}, known are 0 to 12")
    value: int | float | bool = struct.unpack(form, cursor.take(struct.calcsize(form), what))[0]
    return value


def _array(cursor: _Cursor, what: str) -> Array:
    kind = cursor.u32(what)
    if kind != _STRING and kind not in _SCALARS:  # llama.cpp reads no arrays of arrays either
        cursor.damaged(f"{what} is an array of value type {kind}")
    width = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
    count = cursor.count(f"elements in {what}", ARRAY_LIMIT, width)
    start = cursor.at
    if kind != _STRING:
        cursor.skip(count * width, what)
    else:
        _skip_strings(cursor, count, what)
    return Array(cursor.path, kind, count, start, cursor.at - start)


def _skip_strings(cursor: _Cursor, count: int, what: str) -> None:
    # Inlined, as vocabularies have hundreds of thousands; a seek inside the buffer is cheap.
    read, seek, unpack = cursor.file.read, cursor.file.seek, _U64.unpack
    at, end = cursor.at, min(cursor.size, HEADER_LIMIT)
    for _ in range(count):
        length = unpack(read(8))[0] if at + 8 <= end else 0
        at += 8 + length
        if at > end:
            cursor.need(at - cursor.at, f"a string in {what}")
        seek(length, os.SEEK_CUR)
    cursor.at = at


def _tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int, int]:
    """Name, ggml type, shape, size in bytes, and offset in the data, of the next tensor."""
    name = cursor.name("a tensor's name", NAME_LIMIT)
    what = f"tensor {name!r}"
    n_dims = cursor.u32(what)
    if not 1 <= n_dims <= 4:
        cursor.damaged(f"{what} has {n_dims} dimensions, not 1 to 4")
    shape = struct.unpack(f"<{n_dims}Q", cursor.take(8 * n_dims, what))
    if min(shape) == 0 or math.prod(shape) >= 1 << 63:
        cursor.damaged(f"{what} has shape {shape}, each must be above 0 and the product below 2^63")
    ggml_type = cursor.u32(what)
    if ggml_type not in _BLOCKS:
        cursor.fail(f"has {what} of ggml type {ggml_type}, which is unknown; update speculoe-local")
    block, block_bytes = _BLOCKS[ggml_type]
    if shape[0] % block:
        cursor.damaged(
            f"{what} has rows of {shape[0]}, {type_name(ggml_type)} needs a multiple of {block}"
        )
    nbytes = math.prod(shape) // block * block_bytes
    return name, ggml_type, shape, nbytes, cursor.u64(what)


def _place(
    cursor: _Cursor,
    entries: list[tuple[str, int, tuple[int, ...], int, int]],
    data_offset: int,
    alignment: int,
) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for name, ggml_type, shape, nbytes, offset in entries:
        what = f"tensor {name!r}"
        if name in tensors:
            cursor.damaged(f"{what} is there twice")
        if offset != expected:  # so it is aligned and overlaps no other, as llama.cpp demands
            cursor.damaged(f"{what} starts at byte {offset} of the data, expected {expected}")
        start = data_offset + offset
        if start + nbytes > cursor.size:
            cursor.truncated(what, start + nbytes)
        tensors[name] = TensorInfo(name, ggml_type, shape, start, nbytes, cursor.path)
        expected = _pad(offset + nbytes, alignment)
    return tuple(tensors.values())


def _pad(nbytes: int, alignment: int) -> int:
    return (nbytes + alignment - 1) // alignment * alignment
