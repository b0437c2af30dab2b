"""How fast a device takes what uploads bring, and whether that runs beside its graphs: measured, not promised.

Copies go as an engine's do, through a backend instance of their own. Knows no model.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from speculoe_local.runtime import lib
from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import BackendError

__all__ = ["Transfers", "measure"]

_COPY_BYTES: Final = 32 << 20
_WORK_FLOATS: Final = 4 << 20  # of a graph's one tensor
_RUNS: Final = 5
_F32: Final = 0
_CPU: Final = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_MOST_NODES: Final = 512


@dataclass(frozen=True, slots=True)
class Transfers:
    """`pinned` and `ordinary`: bytes per second from such memory; pinned None where the driver gives none.

    `hidden`: the share of a copy's time (or of the graph's, if shorter) that passed while a graph of about
    that length ran, 0 to 1.
    """

    pinned: float | None
    ordinary: float
    hidden: float


class _InitParams(ctypes.Structure):
    """ggml_init_params"""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def measure(device: Device) -> Transfers:
    """Measure now, in a second or two. Raises BackendError where the device has no memory for it."""
    with ExitStack() as undo:
        copying, computing = _backend(device, undo), _backend(device, undo)
        target = _tensor(copying, _COPY_BYTES // 4, undo)
        ordinary = _host(_buffer_of_cpu(), undo)
        pinned = _pinned(device, undo)
        seconds = {
            at: _fastest(lambda at=at: _copy(copying, target, at))  # type: ignore[misc]
            for at in {ordinary, pinned or ordinary}
        }
        return Transfers(
            pinned=_COPY_BYTES / seconds[pinned] if pinned else None,
            ordinary=_COPY_BYTES / seconds[ordinary],
            hidden=_hidden(
                computing,
                lambda: _start(copying, target, pinned or ordinary),
                lambda: _ggml().ggml_backend_synchronize(copying),
                seconds[pinned or ordinary],
                undo,
            ),
        )


def _hidden(
    computing: int,
    start: Callable[[], None],
    finish: Callable[[], None],
    copy_s: float,
    undo: ExitStack,
) -> float:
    """What two things cost together, less than one after the other, as a share of the shorter one."""
    ggml = _ggml()

    def compute(graph: int) -> None:
        if ggml.ggml_backend_graph_compute(computing, graph) != 0:
            raise BackendError(f"a graph to measure with fails: {lib.log.last()}")

    one = _graph(computing, 1, undo)
    once = _fastest(lambda: compute(one))
    graph = _graph(computing, max(1, min(_MOST_NODES, round(copy_s / once))), undo)
    compute_s = _fastest(lambda: compute(graph))

    def together() -> None:
        start()
        compute(graph)
        finish()

    saved = copy_s + compute_s - _fastest(together)
    return min(1.0, max(0.0, saved / min(copy_s, compute_s)))


def _graph(backend: int, nodes: int, undo: ExitStack) -> int:
    """One tensor, scaled again and again."""
    ggml = _ggml()
    size = (nodes + 2) * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead()
    context = _made(ggml.ggml_init(_InitParams(size, None, True)), "a context")
    undo.callback(ggml.ggml_free, context)
    last = ggml.ggml_new_tensor_1d(context, _F32, _WORK_FLOATS)
    graph = ggml.ggml_new_graph(context)
    for _ in range(nodes):
        last = ggml.ggml_scale_inplace(context, last, 1.0)
        ggml.ggml_build_forward_expand(graph, last)
    buffer = _made(ggml.ggml_backend_alloc_ctx_tensors(context, backend), "device memory")
    undo.callback(ggml.ggml_backend_buffer_free, buffer)
    ggml.ggml_backend_buffer_clear(buffer, 0)
    return int(graph)


def _backend(device: Device, undo: ExitStack) -> int:
    backend = _made(_ggml().ggml_backend_dev_init(device.handle, None), "a backend")
    undo.callback(_ggml().ggml_backend_free, backend)
    return backend


def _tensor(backend: int, floats: int, undo: ExitStack) -> int:
    ggml = _ggml()
    context = _made(
        ggml.ggml_init(_InitParams(2 * ggml.ggml_tensor_overhead(), None, True)), "a context"
    )
    undo.callback(ggml.ggml_free, context)
    tensor = ggml.ggml_new_tensor_1d(context, _F32, floats)
    buffer = _made(ggml.ggml_backend_alloc_ctx_tensors(context, backend), "device memory")
    undo.callback(ggml.ggml_backend_buffer_free, buffer)
    return int(tensor)


def _buffer_of_cpu() -> int:
    ggml = _ggml()
    return int(ggml.ggml_backend_dev_buffer_type(ggml.ggml_backend_dev_by_type(_CPU)))


def _pinned(device: Device, undo: ExitStack) -> int | None:
    kind = _ggml().ggml_backend_dev_host_buffer_type(device.handle)
    if not kind:
        return None
    try:
        return _host(kind, undo)
    except BackendError:  # drivers limit it
        return None


def _host(kind: int, undo: ExitStack) -> int:
    """Memory of the host, all of its pages there. Raises BackendError where there is none of that kind."""
    ggml = _ggml()
    buffer = _made(ggml.ggml_backend_buft_alloc_buffer(kind, _COPY_BYTES), "memory of the host")
    undo.callback(ggml.ggml_backend_buffer_free, buffer)
    if ggml.ggml_backend_buffer_get_type(buffer) != kind:  # backends fall back without a word
        raise BackendError("memory of that kind is short")
    base = ggml.ggml_backend_buffer_get_base(buffer)
    ctypes.memset(base, 1, _COPY_BYTES)
    return int(base)


def _start(backend: int, target: int, source: int) -> None:
    _ggml().ggml_backend_tensor_set_async(backend, target, source, 0, _COPY_BYTES)


def _copy(backend: int, target: int, source: int) -> None:
    _start(backend, target, source)
    _ggml().ggml_backend_synchronize(backend)


def _fastest(run: Callable[[], None]) -> float:
    """Of several runs; what else the machine does only slows."""
    run()  # first touch, first compilation
    best = float("inf")
    for _ in range(_RUNS):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return max(best, 1e-9)


def _made(pointer: int | None, what: str) -> int:
    if not pointer:
        raise BackendError(f"{what} to measure with cannot be had: {lib.log.last()}")
    return pointer


@functools.cache
def _ggml() -> Any:
    """ggml's public backend API, as far as it is needed here; reached through libllama, which links it."""
    pointer, size, long = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    found = SimpleNamespace()
    prototypes: tuple[tuple[str, Any, list[Any]], ...] = (
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_tensor_overhead", size, []),
        ("ggml_graph_overhead", size, []),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_new_tensor_1d", pointer, [pointer, ctypes.c_int, long]),
        ("ggml_scale_inplace", pointer, [pointer, pointer, ctypes.c_float]),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
        ("ggml_backend_dev_by_type", pointer, [ctypes.c_int]),
        ("ggml_backend_dev_init", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_backend_dev_buffer_type", pointer, [pointer]),
        ("ggml_backend_dev_host_buffer_type", pointer, [pointer]),
        ("ggml_backend_free", None, [pointer]),
        ("ggml_backend_synchronize", None, [pointer]),
        ("ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
        ("ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
        ("ggml_backend_tensor_set_async", None, [pointer, pointer, pointer, size, size]),
        ("ggml_backend_buft_alloc_buffer", pointer, [pointer, size]),
        ("ggml_backend_buffer_get_base", pointer, [pointer]),
        ("ggml_backend_buffer_get_type", pointer, [pointer]),
        ("ggml_backend_buffer_clear", None, [pointer, ctypes.c_uint8]),
        ("ggml_backend_buffer_free", None, [pointer]),
    )
    for name, result, arguments in prototypes:
        function = lib.llama_library[
            name
        ]  # not the attribute, which others give types of their own
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found
