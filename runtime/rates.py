"""How fast this machine moves and multiplies weights: measured in a second or two, then remembered.

Products and uploads go through ggml's public backend API, so that a device is measured as it will be used.
Knows no model; `plan` makes predictions of the rates.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from platformdirs import user_cache_path

from speculoe_local.runtime import lib, machine
from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.doctor import build_facts, measure_disk
from speculoe_local.runtime.errors import BackendError, ModelError

__all__ = ["Measured", "cache_file", "disk", "measure", "measured"]

_WEIGHTS_BYTES: Final = 192 << 20  # beyond the caches of desktop processors
_MATRIX_BYTES: Final = 16 << 20
_ROW: Final = 2048  # a multiple of every block
_UPLOAD_BYTES: Final = 64 << 20
_LIMIT_S: Final = 0.3  # per figure
_SLOW: Final = 1e9  # bytes per second: drivers that compute in software
_ORDINARY_BYTE: Final = 0x3C  # as scale of any type: no zero, no infinity, no denormal
_MIN_DISK_BYTES: Final = 256 << 20  # smaller files say nothing about the disk that is worth keeping
_CPU: Final = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes per second. `memory`: reading main memory; `processor`: products of one row with weights there, of
    the type that was asked for; `device` and `upload`, the same on a device and copies to it, from pinned memory
    if `pinned`. None without a device. `day` is when, as 2025-01-31."""

    memory: float
    processor: float
    device: float | None
    upload: float | None
    pinned: bool
    day: str


def measured(ggml_type: int, device: Device | None, *, again: bool = False) -> Measured:
    """What `measure` found, on this machine with this build and device; measured once, or `again`."""
    key = _key(
        "rates", ggml_type, device.name if device else "", device.description if device else ""
    )
    known = None if again else _recall(key)
    if isinstance(known, dict):
        try:
            return Measured(**known)
        except TypeError:  # written by another version
            pass
    found = measure(ggml_type, device)
    _remember(key, asdict(found))
    return found


def disk(path: Path, *, again: bool = False) -> float:
    """Bytes per second of reads of an expert's size from the disk of `path`, remembered for large files.

    Raises ModelError for a file with holes, which no disk is read for.
    """
    found = path.stat()
    if getattr(found, "st_blocks", 1 << 53) * 512 < found.st_size // 2:
        raise ModelError(
            f"{path} is mostly a hole, so its disk cannot be measured; give --disk, for example 3GB/s"
        )
    key = _key("disk", found.st_dev)
    known = None if again else _recall(key)
    if isinstance(known, float) and known > 0:
        return known
    rate = measure_disk(path).bytes_per_s
    if found.st_size >= _MIN_DISK_BYTES:
        _remember(key, rate)
    return rate


def measure(ggml_type: int, device: Device | None) -> Measured:
    """Measure now, in about a second. Raises BackendError where ggml cannot."""
    ggml = _ggml()
    processor = ggml.ggml_backend_dev_by_type(_CPU)
    return Measured(
        memory=_memory(),
        processor=_products(processor, ggml_type),
        device=_products(device.handle, ggml_type) if device else None,
        upload=_upload(device) if device else None,
        pinned=bool(device and device.pins),
        day=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def cache_file() -> Path:
    """Where rates are remembered."""
    return user_cache_path("speculoe-local") / "rates.json"


def _memory() -> float:
    """All cores read; numpy releases the GIL."""
    parts = np.array_split(np.ones(_WEIGHTS_BYTES // 8, np.float64), machine.look().cores)
    with ThreadPoolExecutor(len(parts)) as threads:
        return _rate(_WEIGHTS_BYTES, lambda: list(threads.map(np.max, parts)))


def _products(handle: int, ggml_type: int) -> float:
    """One row times matrices of `ggml_type`, as many as leave the caches; what is slow has one of them to do."""
    first = _products_of(handle, ggml_type, 1, 0.0)
    if first < _SLOW:
        return first
    return _products_of(handle, ggml_type, _WEIGHTS_BYTES // _MATRIX_BYTES, _LIMIT_S)


def _products_of(handle: int, ggml_type: int, count: int, limit_s: float) -> float:
    ggml = _ggml()
    with ExitStack() as undo:
        backend = _made(ggml.ggml_backend_dev_init(handle, None), "a backend")
        undo.callback(ggml.ggml_backend_free, backend)
        _use_threads(handle, backend)
        size = 4 * (count + 1) * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead()
        context = _made(ggml.ggml_init(_InitParams(size, None, True)), "a context")
        undo.callback(ggml.ggml_free, context)
        rows = _MATRIX_BYTES // ggml.ggml_row_size(ggml_type, _ROW)
        row = ggml.ggml_new_tensor_2d(context, 0, _ROW, 1)
        graph = ggml.ggml_new_graph(context)
        weights = [ggml.ggml_new_tensor_2d(context, ggml_type, _ROW, rows) for _ in range(count)]
        for matrix in weights:
            ggml.ggml_build_forward_expand(graph, ggml.ggml_mul_mat(context, matrix, row))
        buffer = _made(ggml.ggml_backend_alloc_ctx_tensors(context, backend), "memory for weights")
        undo.callback(ggml.ggml_backend_buffer_free, buffer)
        ggml.ggml_backend_buffer_clear(buffer, _ORDINARY_BYTE)

        def run() -> None:
            if ggml.ggml_backend_graph_compute(backend, graph) != 0:
                raise BackendError(f"products cannot be measured: {lib.log.last()}")

        return _rate(sum(ggml.ggml_nbytes(matrix) for matrix in weights), run, limit_s)


def _upload(device: Device) -> float:
    """Copies to `device` of a size that hides what each costs."""
    ggml = _ggml()
    with ExitStack() as undo:
        backend = _made(ggml.ggml_backend_dev_init(device.handle, None), "a backend")
        undo.callback(ggml.ggml_backend_free, backend)
        size = 4 * ggml.ggml_tensor_overhead()
        context = _made(ggml.ggml_init(_InitParams(size, None, True)), "a context")
        undo.callback(ggml.ggml_free, context)
        target = ggml.ggml_new_tensor_2d(context, 0, _UPLOAD_BYTES // 4, 1)
        buffer = _made(ggml.ggml_backend_alloc_ctx_tensors(context, backend), "device memory")
        undo.callback(ggml.ggml_backend_buffer_free, buffer)
        host = np.zeros(_UPLOAD_BYTES, np.uint8)
        host.fill(1)  # real pages
        source = host.ctypes.data
        pinned = ggml.ggml_backend_dev_host_buffer_type(device.handle) if device.pins else None
        if pinned:
            staging = ggml.ggml_backend_buft_alloc_buffer(pinned, _UPLOAD_BYTES)
            if staging:
                undo.callback(ggml.ggml_backend_buffer_free, staging)
                source = ggml.ggml_backend_buffer_get_base(staging)

        def run() -> None:
            ggml.ggml_backend_tensor_set_async(backend, target, source, 0, _UPLOAD_BYTES)
            ggml.ggml_backend_synchronize(backend)

        return _rate(_UPLOAD_BYTES, run)


def _rate(nbytes: int, run: Callable[[], object], limit_s: float = _LIMIT_S) -> float:
    """Of several runs the fastest: what else the machine does only slows."""
    run()  # first touch
    best, until = float("inf"), time.perf_counter() + limit_s
    while True:
        begin = time.perf_counter()
        run()
        end = time.perf_counter()
        best = min(best, end - begin)
        if end > until:
            return nbytes / max(best, 1e-9)


def _use_threads(handle: int, backend: int) -> None:
    ggml = _ggml()
    registry = ggml.ggml_backend_dev_backend_reg(handle)
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
    if address:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)(address)(
            backend, machine.look().cores
        )


def _made(pointer: int | None, what: str) -> int:
    if not pointer:
        raise BackendError(f"{what} to measure with cannot be had: {lib.log.last()}")
    return pointer


def _key(*parts: object) -> str:
    """Of the machine, this build, and `parts`."""
    host = machine.look()
    known = (platform.node(), platform.machine(), host.cores, host.memory_bytes)
    text = repr((known, build_facts()["digest"], parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _recall(key: str) -> Any:
    return _read().get(key)


def _remember(key: str, value: Any) -> None:
    """Two that write at once: one's figures stay, the other's are measured again."""
    path = cache_file()
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({**_read(), key: value}))
        os.replace(partial, path)
    except OSError:  # a home that cannot be written: measured anew each time
        with suppress(OSError):
            partial.unlink()


def _read() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class _InitParams(ctypes.Structure):
    """ggml_init_params"""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


@functools.cache
def _ggml() -> Any:
    """ggml, reached through libllama, in a handle of its own: the bindings type theirs otherwise."""
    ggml = ctypes.CDLL(lib.llama_library._name)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (
        ("ggml_backend_dev_by_type", pointer, [number]),
        ("ggml_backend_dev_init", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_dev_backend_reg", pointer, [pointer]),
        ("ggml_backend_reg_get_proc_address", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_free", None, [pointer]),
        ("ggml_tensor_overhead", size, []),
        ("ggml_graph_overhead", size, []),
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_row_size", size, [number, ctypes.c_int64]),
        ("ggml_nbytes", size, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, number, ctypes.c_int64, ctypes.c_int64]),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
        ("ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
        ("ggml_backend_buffer_free", None, [pointer]),
        ("ggml_backend_buffer_clear", None, [pointer, ctypes.c_uint8]),
        ("ggml_backend_buffer_get_base", pointer, [pointer]),
        ("ggml_backend_dev_host_buffer_type", pointer, [pointer]),
        ("ggml_backend_buft_alloc_buffer", pointer, [pointer, size]),
        ("ggml_backend_tensor_set_async", None, [pointer, pointer, pointer, size, size]),
        ("ggml_backend_graph_compute", number, [pointer, pointer]),
        ("ggml_backend_synchronize", None, [pointer]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml
