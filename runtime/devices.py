"""What ggml can compute on besides the CPU: modules of the build, opened when a device is asked for.

A module starts its driver when it is opened, which takes longer than a short answer; who runs on the CPU
never opens one. Knows names, memory and abilities of devices; nothing of models.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from typing import Any, Final

from speculoe_local.runtime import lib
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.options import parse_devices

__all__ = [
    "KINDS",
    "Device",
    "available",
    "built",
    "choose",
    "choose_all",
    "listed",
    "most_buffer_bytes",
    "registry",
]

KINDS: Final = ("cuda", "vulkan", "metal")  # in the order in which auto prefers them
_F32, _I32 = 0, 26  # ggml_type
_LEAST_BYTES = 1024
_NO_LIMIT = 1 << 48  # no device has so much
_TYPES: Final = ("cpu", "gpu", "igpu", "accelerator", "meta")  # ggml_backend_dev_type


class _InitParams(ctypes.Structure):
    """ggml_init_params"""

    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class _Props(ctypes.Structure):
    """ggml_backend_dev_props"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("overlaps", ctypes.c_bool),
        ("host_buffer", ctypes.c_bool),
        ("buffer_from_host_ptr", ctypes.c_bool),
        ("events", ctypes.c_bool),
        ("mmap_support", ctypes.c_bool),
    ]


@dataclass(frozen=True, slots=True)
class Device:
    """`name` is ggml's (Vulkan0), `kind` and `index` are what --device says (vulkan:0). Memory in bytes.

    `overlaps`: copies may run beside graphs; `pins`: it can read pinned memory of ours by itself. `type`:
    gpu, igpu, or cpu for a driver that computes in software.
    """

    name: str
    kind: str
    index: int
    description: str
    type: str
    free_bytes: int
    total_bytes: int
    overlaps: bool
    pins: bool
    events: bool
    handle: int

    @property
    def is_software(self) -> bool:
        """Whether a driver only pretends to be a GPU; Mesa's says `gpu` when it is asked for by number."""
        return self.type == "cpu" or "llvmpipe" in self.description

    @property
    def most_ubatch(self) -> int | None:
        """The largest ubatch its driver survives, None for any: Mesa 22.3's software driver crashes while it
        compiles what follows a prompt of more than 16 tokens."""
        return 16 if "llvmpipe" in self.description else None


def built() -> tuple[str, ...]:
    """The kinds of device this build has a module for; opens none."""
    return tuple(kind for kind in KINDS if _module(kind).exists())


def available(kind: str) -> tuple[Device, ...]:
    """The devices of one kind, with their memory as of now. Opens the module, once."""
    return listed(kind, registry(kind)) if kind in built() else ()


def listed(kind: str, opened: int) -> tuple[Device, ...]:
    """The devices of a registry of ggml's (its address), with their memory as of now."""
    ggml = _ggml()
    return tuple(
        _describe(kind, i, ggml.ggml_backend_reg_dev_get(opened, i))
        for i in range(ggml.ggml_backend_reg_dev_count(opened))
    )


def choose(asked: str) -> Device | None:
    """The device that `--device` means; None is the CPU.

    `auto` takes the first real GPU of what is built, or the CPU; a software driver only by its name.
    Raises OptionError for a name that is not known, not built, or not there.
    """
    if "," in asked:
        raise OptionError(
            f"--device {asked[:40]}: several devices share the layers of a model that runs; name one here"
        )
    return next(iter(choose_all(asked)), None)


def choose_all(asked: str) -> tuple[Device, ...]:
    """The devices that `--device` means, in its order, which is that of the layers; none is the CPU. Raises as
    `choose`."""
    chosen = (_choose(kind, index) for kind, index in parse_devices(asked))
    return tuple(device for device in chosen if device is not None)


def _choose(kind: str, index: int) -> Device | None:
    if kind == "cpu":
        return None
    if kind == "auto":
        return next((d for k in built() for d in _started(k) if not d.is_software), None)
    if kind not in built():
        raise OptionError(
            f"--device {kind} is not built in; run `make setup BACKEND={kind}`, or use cpu or auto"
        )
    found = available(kind)
    if index >= len(found):
        there = ", ".join(f"{d.kind}:{d.index} {d.description}" for d in found) or "none"
        raise OptionError(f"--device {kind}:{index}: no such device; there are: {there}")
    return found[index]


def most_buffer_bytes(device: Device) -> int | None:
    """How large a tensor of experts the device multiplies with may be; None: as large as its memory.

    Vulkan refuses products with more than a shader can address; what it calls the most of a buffer is only
    what it lays small tensors together up to. Others refuse none, and mean what they say.
    """
    ggml = _ggml()
    if not _multiplies(device, _NO_LIMIT):
        fits, too_large = 0, _NO_LIMIT
        while too_large - fits > _LEAST_BYTES:
            tried = (fits + too_large) // 2
            fits, too_large = (tried, too_large) if _multiplies(device, tried) else (fits, tried)
        return fits
    most: int = ggml.ggml_backend_buft_get_max_size(
        ggml.ggml_backend_dev_buffer_type(device.handle)
    )
    return most if most < _NO_LIMIT else None


def _multiplies(device: Device, nbytes: int) -> bool:
    """Whether it takes a product of one row with one of so many bytes of experts, f32 and small."""
    ggml = _ggml()
    size = 8 * ggml.ggml_tensor_overhead()
    context = ggml.ggml_init(_InitParams(size, None, True))
    try:
        experts = ggml.ggml_new_tensor_3d(
            context, _F32, _LEAST_BYTES // 4, 1, max(1, nbytes // _LEAST_BYTES)
        )
        row = ggml.ggml_new_tensor_3d(context, _F32, _LEAST_BYTES // 4, 1, 1)
        ids = ggml.ggml_new_tensor_3d(context, _I32, 1, 1, 1)
        product = ggml.ggml_mul_mat_id(context, experts, row, ids)
        return bool(ggml.ggml_backend_dev_supports_op(device.handle, product))
    finally:
        ggml.ggml_free(context)


def _started(kind: str) -> tuple[Device, ...]:
    """The devices of one kind; none where its driver does not start, as on a machine without a card."""
    try:
        return available(kind)
    except OptionError:
        return ()


def _module(kind: str) -> Any:
    return lib.library_folder() / f"libspeculoe-ggml-{kind}{lib.SUFFIX}"


@functools.cache
def registry(kind: str) -> int:
    """ggml's registry (its address) of a module, opened once. Raises OptionError if it does not start."""
    try:
        # Opened here first, as libllama is (see lib): its symbols must come from our ggml.
        ctypes.CDLL(str(_module(kind)), mode=lib.OWN_SYMBOLS)
    except OSError as error:
        raise OptionError(f"--device {kind}: its module does not load: {error}") from error
    opened: int | None = _ggml().ggml_backend_load(os.fsencode(_module(kind)))
    if not opened:
        raise OptionError(f"--device {kind}: its driver does not start: {lib.log.last()}")
    return opened


def _describe(kind: str, index: int, handle: int) -> Device:
    props = _Props()
    _ggml().ggml_backend_dev_get_props(handle, ctypes.byref(props))
    return Device(
        name=props.name.decode(),
        kind=kind,
        index=index,
        description=props.description.decode("utf-8", "replace").strip(),
        type=_TYPES[props.type],
        free_bytes=props.memory_free,
        total_bytes=props.memory_total,
        overlaps=props.overlaps,
        pins=props.host_buffer,
        events=props.events,
        handle=handle,
    )


@functools.cache
def _ggml() -> Any:
    """ggml, reached through libllama, in a handle of its own: the bindings type theirs otherwise."""
    ggml = ctypes.CDLL(lib.llama_library._name)
    for name, result, arguments in (
        ("ggml_backend_load", ctypes.c_void_p, [ctypes.c_char_p]),
        ("ggml_backend_reg_dev_count", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ggml_backend_reg_dev_get", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
        ("ggml_backend_dev_get_props", None, [ctypes.c_void_p, ctypes.c_void_p]),
        ("ggml_backend_dev_buffer_type", ctypes.c_void_p, [ctypes.c_void_p]),
        ("ggml_backend_buft_get_max_size", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ggml_backend_dev_supports_op", ctypes.c_bool, [ctypes.c_void_p] * 2),
        ("ggml_tensor_overhead", ctypes.c_size_t, []),
        ("ggml_init", ctypes.c_void_p, [_InitParams]),
        ("ggml_free", None, [ctypes.c_void_p]),
        (
            "ggml_new_tensor_3d",
            ctypes.c_void_p,
            [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_int64] * 3],
        ),
        ("ggml_mul_mat_id", ctypes.c_void_p, [ctypes.c_void_p] * 4),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    return ggml
