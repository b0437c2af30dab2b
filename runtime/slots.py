"""The native engine of one model: from a placement to slots, uploads and their statistics.

Owns the `spo_engine` handle. Knows where experts lie and how many slots there are; does not know
tokens, prompts or sampling.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from speculoe_local.runtime import native
from speculoe_local.runtime.errors import BackendError, SourceError
from speculoe_local.runtime.modelmap import MatrixKind, ModelMap
from speculoe_local.runtime.options import Link
from speculoe_local.runtime.placement import Placement

__all__ = ["ExpertSlots", "SlotStats"]

# The order in which llama.cpp's build_moe_ffn uses the matrices of a layer; staging relies on it
# for overlap, never for correctness.
_ORDER: dict[MatrixKind, int] = {"gate_up": 0, "up": 0, "gate": 1, "down": 2}
_SOURCE_NAMES = {number: name for name, number in native.SOURCE.items()}


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Counters since the engine was made; `spo_stats` in speculoe.h says what each counts."""

    requests: int = 0
    hits: int = 0
    uploads: int = 0
    uploaded_bytes: int = 0
    staged_bytes: int = 0
    predicted: int = 0
    wasted_bytes: int = 0
    stall_ns: int = 0
    bank_bytes: int = 0
    staging_bytes: int = 0
    source: str = "buffered"
    repacked: int = 0

    def since(self, before: SlotStats) -> SlotStats:
        """The counters' growth since `before`; sizes and names stay."""
        grown = {
            name: getattr(self, name) - getattr(before, name)
            for name in ("requests", "hits", "uploads", "uploaded_bytes", "staged_bytes")
        }
        return SlotStats(
            **grown,
            predicted=self.predicted - before.predicted,
            wasted_bytes=self.wasted_bytes - before.wasted_bytes,
            stall_ns=self.stall_ns - before.stall_ns,
            bank_bytes=self.bank_bytes,
            staging_bytes=self.staging_bytes,
            source=self.source,
            repacked=self.repacked,
        )


class ExpertSlots:
    """Slots for the experts of one model. Close it after every context that it is attached to."""

    def __init__(
        self,
        model: ModelMap,
        placement: Placement,
        *,
        source: str,
        policy: str = "decayed",
        half_life: int = 16,
        upload_threads: int = 2,
        n_parallel: int = 1,
        repack: bool = True,
        link: Link | None = None,
    ) -> None:
        """Allocates banks and staging, opens the files, starts the upload threads.

        Raises BackendError when memory is short, SourceError when a file cannot be opened.
        """
        pool_of = {index: p for p, pool in enumerate(placement.pools) for index in pool.layers}
        matrices = [
            (layer.index, matrix)
            for layer in model.layers
            for matrix in sorted(layer.matrices, key=lambda m: _ORDER[m.kind])
        ]
        paths = sorted({matrix.path for _, matrix in matrices})
        files = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
        table = (native.Matrix * len(matrices))()
        for row, (layer, matrix) in zip(table, matrices, strict=True):
            row.name = matrix.name.encode()
            row.layer = layer
            row.pool = pool_of[layer]
            row.type = matrix.ggml_type
            row.n_expert = matrix.n_expert
            row.ne0 = matrix.ne0
            row.ne1 = matrix.ne1
            row.file = paths.index(matrix.path)
            row.offset = matrix.offset
            row.expert_bytes = matrix.bytes_per_expert
        pools = (ctypes.c_int32 * len(placement.pools))(*(pool.slots for pool in placement.pools))
        params = native.Params(
            files=files,
            matrices=table,
            pools=pools,
            n_files=len(paths),
            n_matrices=len(matrices),
            n_pools=len(pools),
            n_used=max(layer.n_expert_used for layer in model.layers),
            n_staging=placement.staging_buffers,
            source=native.SOURCE[source],
            policy=native.POLICY[policy],
            half_life=half_life,
            n_workers=upload_threads,
            n_parallel=n_parallel,
            repack=int(repack),
            link_rate=link.rate if link else 0.0,
            link_latency=link.latency if link else 0.0,
        )
        error = ctypes.create_string_buffer(1024)
        handle = ctypes.c_void_p()
        status = native.functions.spo_engine_new(
            ctypes.byref(params), ctypes.byref(handle), error, len(error)
        )
        if status != native.Status.OK:
            kind = SourceError if status == native.Status.SOURCE else BackendError
            raise kind(error.value.decode("utf-8", "replace"))
        self._handle: ctypes.c_void_p | None = handle

    @property
    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise BackendError("the expert slots are closed; open the model again")
        return self._handle

    def attach(self, context: int) -> None:
        """Let the graphs of a llama_context (its address) use these slots."""
        native.functions.spo_engine_attach(self._open, context)

    def detach(self, context: int) -> None:
        native.functions.spo_engine_detach(self._open, context)

    def interrupt(self) -> None:
        """End the running graph within one node, and every later one until `reset`. Any thread."""
        native.functions.spo_engine_interrupt(self._open)

    def reset(self) -> str:
        """What went wrong since the last reset, or "". Between graphs only; the next starts afresh."""
        text: bytes = native.functions.spo_engine_reset(self._open)
        return text.decode("utf-8", "replace")

    def prefetch(self, layer: int, experts: list[int]) -> int:
        """Queue predicted uploads for block `layer`, most certain first; how many were accepted."""
        ids = (ctypes.c_int32 * len(experts))(*experts)
        accepted: int = native.functions.spo_engine_prefetch(self._open, layer, ids, len(experts))
        return accepted

    def stats(self) -> SlotStats:
        found = native.Stats()
        native.functions.spo_engine_get_stats(self._open, ctypes.byref(found))
        values = {name: getattr(found, name) for name, *_ in native.Stats._fields_}
        return SlotStats(**(values | {"source": _SOURCE_NAMES[found.source]}))

    def check(self) -> None:
        """Raises BackendError when a slot table breaks one of its invariants."""
        if native.functions.spo_engine_check(self._open) != native.Status.OK:
            raise BackendError(f"slot table: {self.reset()}")

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            native.functions.spo_engine_free(handle)
