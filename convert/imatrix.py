"""Importance matrices: how strongly each column of each weight is used, for better quantization.

Reads and writes llama.cpp's files (GGUF, and reads the older .dat), and collects one by running text
through a model: for each weight the squares of its input are added up per column, per expert where
there are experts. Knows nothing of quantization itself.
Source: tools/imatrix/imatrix.cpp and common/imatrix-loader at the pin.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType

from speculoe_local.convert import files, gguf_raw
from speculoe_local.runtime.errors import ModelError, OptionError, SpeculoeError
from speculoe_local.runtime.header import read_header, shown

__all__ = ["Entry", "Imatrix", "collect", "read_imatrix", "write_imatrix"]

Floats = npt.NDArray[np.float32]

WINDOW: Final = 512
_SMALLEST_BATCH: Final = 16  # upstream's too: of fewer rows a sum says little
_ENTRIES_LIMIT: Final = 1 << 16
_NAME_LIMIT: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One weight: `sums` float32 [n_matrix, n_column] of squared inputs, over `counts` float32
    [n_matrix] rows each (1 matrix, or one per expert)."""

    sums: Floats
    counts: Floats

    def weights(self) -> Floats:
        """Mean square of each column [n_matrix, n_column]; 1 for an expert that was never used."""
        counts = np.where(self.counts > 0, self.counts, 1)[:, None]
        means: Floats = np.where(self.counts[:, None] > 0, self.sums / counts, 1)
        return means.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Imatrix:
    """Entries by tensor name; `chunks` windows of `chunk_size` tokens of `datasets` made them."""

    entries: Mapping[str, Entry]
    chunks: int = 0
    chunk_size: int = WINDOW
    datasets: tuple[str, ...] = ()

    @property
    def unused_experts(self) -> int:
        """Experts that no token reached: they are quantized as without an importance matrix."""
        return int(sum((entry.counts == 0).sum() for entry in self.entries.values()))


def read_imatrix(path: Path) -> Imatrix:
    """Read the GGUF or .dat importance matrix at `path`; raises ModelError when it is neither."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{shown(path)} cannot be read: {error.strerror}") from error
    found = _read_gguf(path) if magic == b"GGUF" else _read_dat(path)
    if not found.entries:
        raise ModelError(f"{shown(path)} has no entries; make one with `calibrate --imatrix`")
    for name, entry in found.entries.items():
        if not (np.isfinite(entry.sums).all() and np.isfinite(entry.counts).all()):
            raise ModelError(f"{shown(path)}: {name} is not finite; make the file again")
    return found


def _read_gguf(path: Path) -> Imatrix:
    header = read_header(path)
    if header.metadata.get("general.type") != "imatrix":
        raise ModelError(f"{shown(path)} is a GGUF but no importance matrix; name another file")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    entries: dict[str, Entry] = {}
    with path.open("rb") as file:
        for name, tensor in tensors.items():
            stem = name.removesuffix(".in_sum2")
            if stem == name:
                continue
            counted = tensors.get(f"{stem}.counts")
            if counted is None or tensor.ggml_type != Kind.F32 or counted.ggml_type != Kind.F32:
                raise ModelError(f"{shown(path)}: {stem} lacks float32 counts; make the file again")
            arrays = []
            for part in (tensor, counted):
                file.seek(part.offset)
                arrays.append(np.frombuffer(file.read(part.nbytes), np.float32))
            if arrays[0].size % arrays[1].size:
                raise ModelError(f"{shown(path)}: {stem} has counts of another size; make it again")
            entries[stem] = Entry(arrays[0].reshape(arrays[1].size, -1), arrays[1])
    chunks, size = (
        header.metadata.get(key) for key in ("imatrix.chunk_count", "imatrix.chunk_size")
    )
    return Imatrix(
        entries,
        chunks if isinstance(chunks, int) else 0,
        size if isinstance(size, int) else WINDOW,
    )


def _read_dat(path: Path) -> Imatrix:
    raw = memoryview(path.read_bytes())
    at = 0

    def number() -> int:
        nonlocal at
        (value,) = struct.unpack_from("<i", raw, at)
        at += 4
        return int(value)

    entries: dict[str, Entry] = {}
    try:
        count = number()
        if not 1 <= count <= _ENTRIES_LIMIT:
            raise ValueError(f"{count} entries")
        for _ in range(count):
            length = number()
            if not 1 <= length <= _NAME_LIMIT:
                raise ValueError(f"a name of {length} bytes")
            name = bytes(raw[at : at + length]).decode()
            at += length
            calls, values = number(), number()
            if values < 1 or at + 4 * values > len(raw):
                raise ValueError(f"{values} values for {name!r}")
            sums = np.frombuffer(raw, np.float32, values, at)[None]
            at += 4 * values
            entries[name] = Entry(sums, np.array([max(calls, 1)], np.float32))
    except (ValueError, struct.error) as error:
        raise ModelError(
            f"{shown(path)} is no importance matrix ({error}); make one with `calibrate --imatrix`"
        ) from error
    return Imatrix(entries)


def write_imatrix(path: Path, found: Imatrix) -> int:
    """Write `found` as llama.cpp's GGUF; the file appears whole. Returns its size in bytes."""
    names = [raw.encode() for raw in found.datasets]
    listed = b"".join(struct.pack("<Q", len(name)) + name for name in names)
    metadata = {
        "general.type": gguf_raw.text("imatrix"),
        "imatrix.datasets": gguf_raw.RawValue(
            GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.STRING, len(names)) + listed
        ),
        "imatrix.chunk_count": gguf_raw.u32(found.chunks),
        "imatrix.chunk_size": gguf_raw.u32(found.chunk_size),
    }
    tensors: list[gguf_raw.NewTensor] = []
    for name, entry in sorted(found.entries.items()):
        for suffix, array in (("in_sum2", entry.sums), ("counts", entry.counts[:, None])):
            shape = (array.shape[1], array.shape[0])
            tensors.append(
                gguf_raw.NewTensor(f"{name}.{suffix}", shape, Kind.F32, partial(np.array, array))
            )
    with files.appearing(path) as file:
        return gguf_raw.write_gguf(file, metadata, tensors)


def collect(
    model: Path,
    texts: Sequence[str],
    *,
    tokens: int = 16384,
    threads: int | None = None,
    names: Sequence[str] = (),
    progress: Callable[[float], None] | None = None,
) -> Imatrix:
    """Run up to `tokens` of `texts` through `model` and add up what each weight's input holds.

    `names` goes into the file as the datasets' names. Raises ModelError when the model cannot be
    loaded, OptionError when there is too little text, BackendError when llama.cpp refuses.
    """
    # Imported here: these load libllama, which reading and writing files does not need.
    from speculoe_local.convert.perplexity import usable_cores
    from speculoe_local.runtime.llama import Context, Model, Shape

    # Repacked weights hide behind buffers of their own; plain ones keep their names and shapes.
    with closing(Model(model, lazy_experts=False, repack=False)) as loaded:
        stream: list[int] = []
        for text in texts:
            stream += loaded.vocab.tokenize(text + "\n\n", add_bos=False)
            if len(stream) >= tokens:
                break
        available = min(tokens, len(stream))
        if available < _SMALLEST_BATCH:
            raise OptionError(
                f"{available} tokens, {_SMALLEST_BATCH} or more are needed; give more text"
            )
        window = min(WINDOW, loaded.n_ctx_train or WINDOW, available)
        count = available // window
        sums = _Sums()
        shape = Shape(window, window, window, threads or usable_cores())
        with closing(Context(loaded, shape, watch=sums)) as context:
            for number in range(count):
                piece = stream[number * window : (number + 1) * window]
                sums.run(context, piece)
                if progress is not None:
                    progress((number + 1) / count)
    return Imatrix(
        {name: Entry(*arrays) for name, arrays in sorted(sums.arrays.items())},
        count,
        window,
        tuple(names),
    )


@dataclass(slots=True)
class _Sums:
    """The `watch` of a context: squared inputs of every product with a weight of a layer."""

    arrays: dict[str, tuple[Floats, Floats]] = field(default_factory=dict)
    error: BaseException | None = None

    def run(self, context: object, tokens: Sequence[int]) -> None:
        from speculoe_local.runtime.errors import BackendError
        from speculoe_local.runtime.lib import log
        from speculoe_local.runtime.llama import Context

        assert isinstance(context, Context)
        context.clear()
        log.clear()
        # Every token is an output: the last layer would see a single row otherwise.
        status = context.decode_many([(token, at, 0) for at, token in enumerate(tokens)])
        if self.error is not None:
            raise self.error
        if status:
            raise BackendError(f"llama_decode of {len(tokens)} tokens: {log.last()}")

    def __call__(self, tensor: int, ask: bool) -> bool:
        from speculoe_local.runtime import capture

        op = capture.node_op(tensor)
        if op not in ("MUL_MAT", "MUL_MAT_ID") or self.error is not None:
            return not ask and self.error is None
        weight = capture.node_source(tensor, 0)
        name = capture.node_name(weight) if weight else ""
        if not (name.startswith("blk.") and name.endswith(".weight")):
            return not ask
        if ask:
            return True
        try:
            self._add(tensor, name, routed=op == "MUL_MAT_ID")
        except (SpeculoeError, ValueError, AssertionError) as error:
            self.error = error  # ctypes would print and forget it
        return self.error is None

    def _add(self, tensor: int, name: str, *, routed: bool) -> None:
        from speculoe_local.runtime import capture

        weight, source = capture.node_source(tensor, 0), capture.node_source(tensor, 1)
        assert weight is not None
        assert source is not None
        n_column, _, n_matrix, _ = capture.node_shape(weight)
        squares = np.square(capture.read_floats(source))  # [ne2, ne1, ne0]
        if not routed:
            if squares.shape[1] < _SMALLEST_BATCH:
                return
            # Weights of several matrices (MLA) share their count, as upstream's files have it.
            sums, counts = self._of(name, n_matrix, 1, n_column)
            for at, rows in enumerate(squares):
                sums[at % n_matrix] += rows.sum(axis=0)
            counts += squares.shape[0] * squares.shape[1] / n_matrix
            return
        ids_at = capture.node_source(tensor, 2)
        assert ids_at is not None
        ids = capture.read_ids(ids_at)  # [n_token, n_used]
        rows = np.broadcast_to(squares, (*ids.shape, n_column))
        sums, counts = self._of(name, n_matrix, n_matrix, n_column)
        for expert in np.unique(ids):
            picked = rows[ids == expert]
            sums[expert] += picked.sum(axis=0)
            counts[expert] += len(picked)

    def _of(self, name: str, n_matrix: int, n_count: int, n_column: int) -> tuple[Floats, Floats]:
        if name not in self.arrays:
            shape = (n_matrix, n_column)
            self.arrays[name] = (np.zeros(shape, np.float32), np.zeros(n_count, np.float32))
        return self.arrays[name]
