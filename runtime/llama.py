"""One llama.cpp model and context, as far as we use them: tokens in, logits out.

A thin typed layer over the bindings. Knows nothing about experts except that their tensors may be
left on disk (`lazy_experts`), and nothing about chat.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime import native, rpc
from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import BackendError, ModelError
from speculoe_local.runtime.lib import llama, llama_library, log
from speculoe_local.runtime.spread import Spread
from speculoe_local.runtime.vocabulary import Fim, Vocabulary

__all__ = ["Context", "Fim", "Model", "Vocabulary"]

# Expert weights that slots serve: mapped but never touched (patches/llama-lazy-override.patch).
_EXPERT_TENSORS = r"blk\.(?:{layers})\.ffn_(up|gate|down|gate_up)_exps\.weight"
# A tied embedding is the output too.
_OUTPUT_TENSORS = rb"^(output|output_norm|token_embd)\."
_ALL_LAYERS = 1 << 20
_DONE, _NO_ROOM = 0, 1  # llama_decode's status
_FAILED = -3  # llama_decode's status when a graph failed
_LOAD_WHOLE = 0  # LLAMA_LOAD_MODE_NONE: read into memory of our own, safe from a file that shrinks


class _BuftOverride(ctypes.Structure):
    """llama_model_tensor_buft_override; a null buffer type asks for lazy reading."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


class Model:
    """Weights in memory. Close after its contexts."""

    def __init__(
        self,
        path: Path,
        *,
        lazy_experts: bool,
        lazy_layers: Sequence[int] | None = None,
        repack: bool,
        device: Device | None = None,
        spread: Spread | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """Weights go to `device`, lazy experts excepted; None: main memory. With `spread` to the devices
        that it names. `lazy_layers`: whose experts are lazy, None: all layers'.

        Raises ModelError with llama.cpp's reason when it refuses the file.

        An exception from `progress` stops the loading and is raised again.
        """
        raised: list[BaseException] = []

        def on_progress(part: float, _data: object) -> bool:
            try:
                if progress is not None:
                    progress(part)
            except BaseException as error:
                raised.append(error)
            return not raised

        layers = "[0-9]+" if lazy_layers is None else "|".join(map(str, lazy_layers))
        patterns: list[tuple[bytes, int | None]] = []
        if lazy_experts:
            patterns.append((_EXPERT_TENSORS.format(layers=layers).encode(), None))
        if spread is not None and spread.output_here:
            patterns.append((_OUTPUT_TENSORS, _main_memory()))
        overrides = (_BuftOverride * (len(patterns) + 1))(*(_BuftOverride(*p) for p in patterns))
        callback = llama.llama_progress_callback(on_progress)
        params = llama.llama_model_default_params()
        # A list of none keeps llama.cpp from taking a device that another engine has opened.
        on = (ctypes.c_void_p * 2)(device.handle if device else None, None)
        params.devices = ctypes.cast(on, ctypes.c_void_p)
        params.n_gpu_layers = _ALL_LAYERS if device else 0
        params.split_mode = llama.LLAMA_SPLIT_MODE_NONE
        if spread is not None:
            handles = [d.handle for d in spread.devices]
            several = (ctypes.c_void_p * (len(handles) + 1))(*handles)
            shares = (ctypes.c_float * llama.llama_max_devices())(*spread.shares)
            params.devices = ctypes.cast(several, ctypes.c_void_p)
            params.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
            params.n_gpu_layers = spread.n_offloaded
            params.split_mode = llama.LLAMA_SPLIT_MODE_LAYER
        self.endpoints = spread.endpoints if spread is not None else ()
        local = (device,) if spread is None or spread.endpoints else spread.devices
        self.devices = tuple(d.name for d in local if d is not None)
        params.use_extra_bufts = repack
        params.progress_callback = callback
        if lazy_experts:
            params.load_mode = _LOAD_WHOLE
        if patterns:
            params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        log.clear()
        self._handle = llama.llama_model_load_from_file(os.fsencode(path), params)
        if raised:
            if self._handle:
                llama.llama_model_free(self._handle)
            raise raised[0]
        if not self._handle:
            said = log.last()
            raise (
                _left(self.endpoints)
                or _lost(self.devices)
                or ModelError(f"{path} cannot be loaded: {said}")
            )
        self.vocab = Vocabulary(self._handle)
        self.n_ctx_train: int = llama.llama_model_n_ctx_train(self._handle)

    @property
    def handle(self) -> Any:
        return self._handle

    def chat_template(self) -> str | None:
        """The GGUF's own Jinja template."""
        raw: bytes | None = llama.llama_model_chat_template(self._handle, None)
        return raw.decode("utf-8", "replace") if raw else None

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            self.vocab.close()
            llama.llama_model_free(handle)


@dataclass(frozen=True, slots=True)
class Shape:
    """Batch shape; equal shapes are what makes two runs comparable bit for bit.

    `unified`: all sequences share the `n_ctx` tokens; else each has an equal part of them.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_seq: int = 1
    unified: bool = False


class Context:
    """One mutable timeline of tokens per sequence over a model. Not thread-safe.

    `n_ctx` tokens is what one sequence may hold.
    """

    def __init__(
        self, model: Model, shape: Shape, *, watch: Callable[[int, bool], bool] | None = None
    ) -> None:
        """Raises BackendError when memory for KV or compute buffers is short.

        `watch(tensor, ask)` is llama.cpp's cb_eval: asked which nodes it wants, then shown those; it
        must not raise. It splits the graph, so it is for measuring, never for answering.
        """
        params = llama.llama_context_default_params()
        if watch is not None:
            self._watch = llama.ggml_backend_sched_eval_callback(
                lambda tensor, ask, _data: watch(tensor, ask)
            )
            params.cb_eval = self._watch
        params.n_ctx = shape.n_ctx
        params.n_batch = shape.n_batch
        params.n_ubatch = min(shape.n_ubatch, shape.n_batch)
        params.n_seq_max = shape.n_seq
        params.kv_unified = shape.unified
        params.pooling_type = (
            llama.LLAMA_POOLING_TYPE_NONE
        )  # `embedding` gives rows, whatever the model
        params.n_threads = shape.n_threads
        params.n_threads_batch = shape.n_threads
        params.no_perf = True
        log.clear()
        self._handle = llama.llama_init_from_model(model.handle, params)
        if not self._handle:
            said = log.last()
            raise (
                _left(model.endpoints)
                or _lost(model.devices)
                or BackendError(f"no context of {shape.n_ctx} tokens: {said}; use a smaller --ctx")
            )
        self.n_ctx: int = llama.llama_n_ctx_seq(self._handle)
        self.n_batch: int = llama.llama_n_batch(self._handle)
        self.n_ubatch: int = llama.llama_n_ubatch(self._handle)
        self.n_vocab = model.vocab.size
        self.n_embd: int = llama.llama_model_n_embd_out(model.handle)
        self._endpoints = model.endpoints
        self._devices = model.devices
        self.fault = ""  # why no batch will run any more
        self._memory = llama.llama_get_memory(self._handle)
        self._batch = llama.llama_batch_init(self.n_batch, 0, 1)

    @property
    def handle(self) -> Any:
        return self._handle

    def decode(
        self, tokens: Sequence[int], position: int, *, logits: bool = True, sequence: int = 0
    ) -> int:
        """Run up to n_batch tokens at `position`; `logits` for the last. llama_decode's status."""
        batch = self._batch
        n = len(tokens)
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = 0
        batch.logits[n - 1] = int(logits)
        return self._run_batch()

    def _run_batch(self) -> int:
        """llama_decode's status; where a device or another machine is gone, a failure, and `fault` says which."""
        if self.fault and self._devices:
            return _FAILED
        status: int = llama.llama_decode(self._handle, self._batch)
        if not self._endpoints and not self._devices:
            return status
        # What was sent has come back, or never will.
        settled = native.functions.spo_synchronize(self._handle) == native.Status.OK
        if gone := rpc.lost(self._endpoints) if self._endpoints else None:
            self.fault = str(_gone(gone))
            return status or _FAILED
        if not settled or status not in (_DONE, _NO_ROOM):
            self.fault = str(_lost(self._devices) or "")
        return status if settled else status or _FAILED

    def decode_many(self, rows: Sequence[tuple[int, int, int]]) -> int:
        """Run one token of several sequences: (token, position, sequence) each, all with logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = 1
        return self._run_batch()

    def decode_rows(self, rows: Sequence[tuple[int, int, int, bool]]) -> int:
        """Run tokens of several sequences: (token, position, sequence, whether it gets logits) each.

        llama_decode's status: 1 means that no room is left, and nothing has changed.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, output) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = int(output)
        return self._run_batch()

    def logits(self, row: int = -1) -> npt.NDArray[np.float32]:
        """Logits [n_vocab] float32 of a row of the last batch; a view that the next decode overwrites."""
        pointer = llama.llama_get_logits_ith(self._handle, row)
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def set_embeddings(self, on: bool) -> None:
        """Whether the next batches give hidden states, of all their rows, beside logits."""
        llama.llama_set_embeddings(self._handle, on)

    def embedding(self, row: int) -> npt.NDArray[np.float32]:
        """Hidden state [n_embd] float32 of a row, after the last norm; a view as for `logits`."""
        pointer = llama.llama_get_embeddings_ith(self._handle, row)
        return np.ctypeslib.as_array(pointer, shape=(self.n_embd,))

    def forget(self, position: int, sequence: int = 0) -> bool:
        """Drop a sequence from `position` on. False: not possible (recurrent state), nothing done."""
        return bool(llama.llama_memory_seq_rm(self._memory, sequence, position, -1))

    def copy(self, source: int, target: int) -> None:
        """Let the empty sequence `target` hold what `source` holds. Unified they then share the room;
        else the next batch begins with copying all of it."""
        llama.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def state(self, sequence: int) -> npt.NDArray[np.uint8]:
        """What a sequence holds, for `restore` into a context of the same model and build; nothing after a
        `fault`."""
        if self.fault:
            return np.empty(0, np.uint8)
        size = llama.llama_state_seq_get_size(self._handle, sequence)
        room = np.empty(size, np.uint8)
        pointer = room.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return room[: llama.llama_state_seq_get_data(self._handle, pointer, size, sequence)]

    def restore(self, sequence: int, data: npt.NDArray[np.uint8]) -> bool:
        """Fill an empty sequence with a `state`. False: no room, not from such a context, or a `fault`."""
        if self.fault:
            return False
        pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        return bool(llama.llama_state_seq_set_data(self._handle, pointer, data.nbytes, sequence))

    def clear(self) -> None:
        llama.llama_memory_clear(self._memory, False)

    def close(self) -> None:
        """Free it. One on a lost device stays where it is: to free it would end the process."""
        handle, self._handle = self._handle, None
        if handle and native.functions.spo_synchronize(handle) == native.Status.OK:
            llama.llama_batch_free(self._batch)
            llama.llama_free(handle)


def _lost(devices: Sequence[str]) -> BackendError | None:
    """Why nothing runs on one of them any more, if so. A driver gives a lost device back to new processes only."""
    is_lost = native.functions.spo_device_is_lost
    device = next((name for name in devices if is_lost(name.encode())), None)
    if device is None:
        return None
    return BackendError(
        f"device {device} was lost (its driver gave up or was restarted); start the program again, "
        "or use --device cpu"
    )


def _left(endpoints: Sequence[str]) -> BackendError | None:
    """Why opening failed, if a machine has gone away meanwhile."""
    gone = rpc.silent(endpoints)
    return _gone(gone) if gone else None


def _gone(endpoint: str) -> BackendError:
    return BackendError(
        f"{endpoint} is gone, and its layers with it; run `speculoe-local rpc-serve` there again, "
        "then open the model again"
    )


def _main_memory() -> int:
    """The buffer type of the CPU: an override to it may still use the CPU's own layouts."""
    find = llama_library.ggml_backend_cpu_buffer_type
    find.restype, find.argtypes = ctypes.c_void_p, []
    found: int = find()
    return found
