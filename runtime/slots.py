"""The native engine of one model: from a placement to slots, uploads and their statistics.

Owns the `spo_engine` handle. Knows where experts lie and how many slots there are; does not know
tokens, prompts or sampling.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime import native
from speculoe_local.runtime.errors import BackendError, SourceError
from speculoe_local.runtime.expertfile import ExpertFile
from speculoe_local.runtime.modelmap import MatrixKind, ModelMap
from speculoe_local.runtime.options import Link
from speculoe_local.runtime.placement import Placement

__all__ = ["ExpertSlots", "LoopGate", "SlotStats", "Steps", "TapRoom"]

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
    reads: int = 0
    uploaded_bytes: int = 0
    staged_bytes: int = 0
    predicted: int = 0
    wasted_bytes: int = 0
    true_experts: int = 0
    true_predicted: int = 0
    true_nonresident: int = 0
    true_nonresident_predicted: int = 0
    predicted_nonresident: int = 0
    cpu_experts: int = 0
    cpu_ns: int = 0
    stall_ns: int = 0
    window_ns: int = 0
    bank_bytes: int = 0
    staging_bytes: int = 0
    pinned_bytes: int = 0
    source: str = "buffered"
    repacked: int = 0
    pinned: int = 0
    overlaps: int = 0

    def since(self, before: SlotStats) -> SlotStats:
        """The counters' growth since `before`; sizes and names stay."""
        return replace(self, **{n: getattr(self, n) - getattr(before, n) for n in _COUNTERS})

    @property
    def recall(self) -> float:
        """Share of the true experts that were predicted, over the layers that predict."""
        return _share(self.true_predicted, self.true_experts)

    @property
    def recall_nonresident(self) -> float:
        """The same over experts that were not resident when predicted."""
        return _share(self.true_nonresident_predicted, self.true_nonresident)

    @property
    def precision_nonresident(self) -> float:
        """Share of predictions of experts not resident then that were right."""
        return _share(self.true_nonresident_predicted, self.predicted_nonresident)


_NO_COUNTERS = (
    "bank_bytes",
    "staging_bytes",
    "pinned_bytes",
    "source",
    "repacked",
    "pinned",
    "overlaps",
)
_COUNTERS = tuple(f.name for f in fields(SlotStats) if f.name not in _NO_COUNTERS)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# The block that predicts, the gate's parameters, and the default vectors [n_expert, n_embd] of that block.
LoopGate = tuple[int, native.GateParams, "npt.NDArray[np.float32] | None"]


def _names(placement: Placement) -> ctypes.Array[ctypes.c_char_p] | None:
    """Of each pool whose memory holds it, where it is not the same for all."""
    names = [pool.device.encode() for pool in placement.pools if pool.device]
    return (ctypes.c_char_p * len(names))(*names) if names else None


def _loop_layers(layers: Mapping[int, LoopGate]) -> ctypes.Array[native.LoopLayer]:
    table = (native.LoopLayer * len(layers))()
    for row, (block, (source, params, default)) in zip(table, layers.items(), strict=True):
        row.gate = ctypes.pointer(params)
        row.default_vectors = None if default is None else default.ctypes.data
        row.block = block
        row.source = source
    return table


class TapRoom:
    """Memory that taps are copied into, over and over: residual and shared output [n_embd] float32,
    ids [n_used] int32, weights [n_used] float32."""

    def __init__(self, n_embd: int, n_used: int) -> None:
        self.residual = np.zeros(n_embd, np.float32)
        self.shared = np.zeros(n_embd, np.float32)
        self.ids = np.zeros(n_used, np.int32)
        self.weights = np.zeros(n_used, np.float32)
        self._n_used = ctypes.c_int32()
        arrays = (self.residual, self.shared, self.ids, self.weights)
        self.addresses = (*(a.ctypes.data for a in arrays), ctypes.byref(self._n_used))

    @property
    def n_used(self) -> int:
        return self._n_used.value


class Steps:
    """Predicts from taps and queues, in one foreign call each: `QuasiHidden.predict` and
    `ExpertSlots.prefetch` without what Python costs between them. Close it."""

    def __init__(self, layers: Mapping[int, LoopGate], n_embd: int) -> None:
        """What `layers` holds (by the block predicted) is borrowed. Raises BackendError when a gate is
        refused."""
        table = _loop_layers(layers)
        error = ctypes.create_string_buffer(256)
        self.handle = ctypes.c_void_p()
        status = native.functions.spo_steps_new(
            table, len(table), n_embd, ctypes.byref(self.handle), error, len(error)
        )
        if status != native.Status.OK:
            raise BackendError(error.value.decode("utf-8", "replace"))

    def close(self) -> None:
        native.functions.spo_steps_free(self.handle)
        self.handle = ctypes.c_void_p()


class ExpertSlots:
    """Slots for the experts of one model. Close it after every context that it is attached to."""

    def __init__(
        self,
        model: ModelMap,
        placement: Placement,
        *,
        source: str,
        policy: str = "learned",
        half_life: int = 16,
        upload_threads: int = 2,
        n_parallel: int = 1,
        forget: bool = False,
        repack: bool = True,
        device: str | None = None,
        pin_bytes: int = 0,
        misses: str = "upload",
        link: Link | None = None,
        expert_file: ExpertFile | None = None,
    ) -> None:
        """Allocates banks and staging, opens the files, starts the upload threads.

        `device`, by ggml's name, is whose memory holds them, but for pools that name another; None: main
        memory. `misses` as --misses.
        Up to `pin_bytes` of experts are read now, into memory that the device reads by itself.

        Raises BackendError when memory is short, SourceError when a file cannot be opened.
        """
        pool_of = {index: p for p, pool in enumerate(placement.pools) for index in pool.layers}
        matrices = [
            (layer.index, matrix)
            for layer in model.layers
            for matrix in sorted(layer.matrices, key=lambda m: _ORDER[m.kind])
        ]
        paths = sorted({matrix.path for _, matrix in matrices})
        if expert_file is not None:
            paths.append(expert_file.path)
        files = (ctypes.c_char_p * len(paths))(*(os.fsencode(path) for path in paths))
        table = (native.Matrix * len(matrices))()
        for row, (layer, matrix) in zip(table, matrices, strict=True):
            row.name = matrix.name.encode()
            row.layer = layer
            row.shared = int(model.layer(layer).has_shared)
            row.pool = pool_of[layer]
            row.type = matrix.ggml_type
            row.n_expert = matrix.n_expert
            row.ne0 = matrix.ne0
            row.ne1 = matrix.ne1
            row.file = paths.index(matrix.path)
            row.offset = matrix.offset
            row.expert_bytes = matrix.bytes_per_expert
            row.slot_file, row.slot_offset, row.slot_stride = row.file, row.offset, row.expert_bytes
            if expert_file is not None:
                row.slot_file = len(paths) - 1
                row.slot_offset, row.slot_stride = expert_file.place(layer, matrix.kind)
                row.packed = 1
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
            forget=int(forget),
            repack=int(repack),
            misses=native.MISSES[misses],
            pin_bytes=pin_bytes,
            device=device.encode() if device else None,
            link_rate=link.rate if link else 0.0,
            link_latency=link.latency if link else 0.0,
            pool_devices=_names(placement),
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

    def prefetch(self, layer: int, experts: npt.NDArray[np.int32]) -> int:
        """The prediction for block `layer`, most certain first; how many uploads were started."""
        started: int = native.functions.spo_engine_prefetch(
            self._open, layer, experts.ctypes.data, len(experts)
        )
        return started

    def open_taps(self, n_embd: int) -> None:
        """From now on decode steps leave taps for `next_tap`."""
        native.functions.spo_tap_open(self._open, n_embd)

    def close_taps(self) -> None:
        """Wakes whoever waits in `next_tap`."""
        native.functions.spo_tap_close(self._open)

    def next_tap(self, room: TapRoom, timeout_ms: int) -> int:
        """Wait for the newest tap, written into `room`: its block, -1 after the time, -2 once closed."""
        block: int = native.functions.spo_tap_next(self._open, *room.addresses, timeout_ms)
        return block

    def take(self, steps: Steps, block: int, room: TapRoom) -> int:
        """The prediction that a tap of `block` in `room` gives, queued; how many uploads were started, -1
        where nothing is predicted from it, -2 where a logit is not finite."""
        started: int = native.functions.spo_steps_take(
            steps.handle, self._open, block, *room.addresses[:4], room.n_used
        )
        return started

    def start_loop(self, layers: Mapping[int, LoopGate], n_embd: int) -> None:
        """Let a thread of the library predict `layers` (by the block predicted) and queue uploads.

        What `layers` holds must live until `stop_loop`. Raises BackendError when a gate is refused.
        """
        error = ctypes.create_string_buffer(256)
        table = _loop_layers(layers)
        status = native.functions.spo_loop_start(
            self._open, table, len(table), n_embd, error, len(error)
        )
        if status != native.Status.OK:
            raise BackendError(error.value.decode("utf-8", "replace"))

    def set_speculation(
        self, layers: Mapping[int, LoopGate], n_embd: int, *, true_weights: bool
    ) -> None:
        """Name the layers (by the block predicted) that can execute their prediction; `speculate` starts it.

        What `layers` holds must live as long as the slots. Raises BackendError when a gate is refused.
        """
        error = ctypes.create_string_buffer(256)
        table = _loop_layers(layers)
        status = native.functions.spo_speculation_set(
            self._open, table, len(table), n_embd, int(true_weights), error, len(error)
        )
        if status != native.Status.OK:
            raise BackendError(error.value.decode("utf-8", "replace"))

    def speculate(self, context: int, on: bool) -> None:
        """Whether decode steps of a context execute predictions from now on; rebuilds its graph."""
        native.functions.spo_speculation_switch(self._open, context, int(on))

    def stop_loop(self) -> None:
        native.functions.spo_loop_stop(self._open)

    def start_trace(self, capacity: int) -> None:
        """Keep up to `capacity` spans from now on; 0: none."""
        native.functions.spo_trace_start(self._open, capacity)

    def take_trace(self, capacity: int) -> list[native.Span]:
        """The spans since `start_trace`, in the order they ended."""
        spans = (native.Span * capacity)()
        count: int = native.functions.spo_trace_take(self._open, spans, capacity)
        return list(spans[:count])

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
