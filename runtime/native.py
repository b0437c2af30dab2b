"""native/include/speculoe/speculoe.h in ctypes, nothing more. A test holds the two together."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p

from speculoe_local.runtime.errors import BackendError
from speculoe_local.runtime.lib import speculoe_library as _library

__all__ = [
    "ABI_VERSION",
    "CLAIRVOYANT",
    "MISSES",
    "POLICY",
    "SOURCE",
    "GateMlp",
    "GateParams",
    "LoopLayer",
    "Matrix",
    "Params",
    "Span",
    "ReplayCounts",
    "ReplayParams",
    "Stats",
    "Status",
    "functions",
]

ABI_VERSION = 7
SOURCE = {"buffered": 0, "direct": 1, "mapped": 2}
POLICY = {"decayed": 0, "lru": 1, "learned": 2}
MISSES = {"upload": 0, "cpu": 1, "split": 2, "auto": 3}
CLAIRVOYANT = -1  # SPO_REPLAY_CLAIRVOYANT


class Status:
    OK = 0
    INVALID = -1
    MEMORY = -2
    SOURCE = -3
    DEVICE = -4


class Matrix(ctypes.Structure):
    """spo_matrix"""

    _fields_ = [
        ("name", c_char_p),
        ("layer", c_int32),
        ("pool", c_int32),
        ("type", c_int32),
        ("n_expert", c_int32),
        ("ne0", c_int64),
        ("ne1", c_int64),
        ("file", c_int32),
        ("shared", c_int32),
        ("offset", c_uint64),
        ("expert_bytes", c_uint64),
        ("slot_offset", c_uint64),
        ("slot_stride", c_uint64),
        ("slot_file", c_int32),
        ("packed", c_int32),
    ]


class Params(ctypes.Structure):
    """spo_params"""

    _fields_ = [
        ("files", ctypes.POINTER(c_char_p)),
        ("matrices", ctypes.POINTER(Matrix)),
        ("pools", ctypes.POINTER(c_int32)),
        ("n_files", c_int32),
        ("n_matrices", c_int32),
        ("n_pools", c_int32),
        ("n_used", c_int32),
        ("n_staging", c_int32),
        ("source", c_int32),
        ("policy", c_int32),
        ("half_life", c_int32),
        ("n_workers", c_int32),
        ("n_parallel", c_int32),
        ("forget", c_int32),
        ("repack", c_int32),
        ("misses", c_int32),
        ("device", c_char_p),
        ("link_rate", c_double),
        ("link_latency", c_double),
        ("pin_bytes", c_uint64),
        ("pool_devices", ctypes.POINTER(c_char_p)),
    ]


class Stats(ctypes.Structure):
    """spo_stats"""

    _fields_ = [
        ("requests", c_uint64),
        ("hits", c_uint64),
        ("uploads", c_uint64),
        ("reads", c_uint64),
        ("uploaded_bytes", c_uint64),
        ("staged_bytes", c_uint64),
        ("predicted", c_uint64),
        ("wasted_bytes", c_uint64),
        ("true_experts", c_uint64),
        ("true_predicted", c_uint64),
        ("true_nonresident", c_uint64),
        ("true_nonresident_predicted", c_uint64),
        ("predicted_nonresident", c_uint64),
        ("cpu_experts", c_uint64),
        ("cpu_ns", c_uint64),
        ("stall_ns", c_uint64),
        ("window_ns", c_uint64),
        ("bank_bytes", c_uint64),
        ("staging_bytes", c_uint64),
        ("pinned_bytes", c_uint64),
        ("source", c_int32),
        ("repacked", c_int32),
        ("pinned", c_int32),
        ("overlaps", c_int32),
    ]


class GateMlp(ctypes.Structure):
    """spo_gate_mlp"""

    _fields_ = [
        ("narrow", c_void_p),
        ("embedding", c_void_p),
        ("expand", c_void_p),
        ("expand_bias", c_void_p),
        ("contract", c_void_p),
        ("contract_bias", c_void_p),
        ("norm", c_void_p),
        ("norm_bias", c_void_p),
        ("head", c_void_p),
        ("head_bias", c_void_p),
        ("width", c_int32),
        ("hidden", c_int32),
        ("scale", c_float),
        ("adds", c_int32),
    ]


class GateParams(ctypes.Structure):
    """spo_gate_params"""

    _fields_ = [
        ("router", c_void_p),
        ("norm", c_void_p),
        ("norm_bias", c_void_p),
        ("bias", c_void_p),
        ("selection_bias", c_void_p),
        ("eps", c_float),
        ("scale", c_float),
        ("n_expert", c_int32),
        ("n_embd", c_int32),
        ("n_used", c_int32),
        ("n_ids", c_int32),
        ("gating", c_int32),
        ("selection", c_int32),
        ("n_groups", c_int32),
        ("n_groups_used", c_int32),
        ("norm_weights", c_int32),
        ("mlp", ctypes.POINTER(GateMlp)),
    ]


class ReplayParams(ctypes.Structure):
    """spo_replay_params"""

    _fields_ = [
        ("ids", c_void_p),
        ("pool_of", ctypes.POINTER(c_int32)),
        ("pools", ctypes.POINTER(c_int32)),
        ("n_tokens", c_int64),
        ("n_warm", c_int64),
        ("n_layers", c_int32),
        ("n_used", c_int32),
        ("n_expert", c_int32),
        ("n_pools", c_int32),
        ("policy", c_int32),
        ("half_life", c_int32),
    ]


class ReplayCounts(ctypes.Structure):
    """spo_replay_counts"""

    _fields_ = [("requests", c_uint64), ("hits", c_uint64), ("uploads", c_uint64)]


class LoopLayer(ctypes.Structure):
    """spo_loop_layer"""

    _fields_ = [
        ("gate", ctypes.POINTER(GateParams)),
        ("default_vectors", c_void_p),
        ("block", c_int32),
        ("source", c_int32),
    ]


class Span(ctypes.Structure):
    """spo_span"""

    _fields_ = [
        ("begin_ns", c_uint64),
        ("end_ns", c_uint64),
        ("kind", c_int32),
        ("block", c_int32),
        ("expert", c_int32),
        ("reserved", c_int32),
    ]


_PROTOTYPES = {
    "spo_abi_version": (c_int32, []),
    "spo_engine_new": (
        c_int32,
        [ctypes.POINTER(Params), ctypes.POINTER(c_void_p), ctypes.c_char_p, c_size_t],
    ),
    "spo_engine_free": (None, [c_void_p]),
    "spo_engine_attach": (c_int32, [c_void_p, c_void_p]),
    "spo_engine_detach": (None, [c_void_p, c_void_p]),
    "spo_synchronize": (c_int32, [c_void_p]),
    "spo_device_is_lost": (c_int32, [ctypes.c_char_p]),
    "spo_engine_interrupt": (None, [c_void_p]),
    "spo_engine_reset": (c_char_p, [c_void_p]),
    "spo_engine_prefetch": (c_int32, [c_void_p, c_int32, c_void_p, c_int32]),
    "spo_trace_start": (None, [c_void_p, c_int64]),
    "spo_trace_take": (c_int64, [c_void_p, ctypes.POINTER(Span), c_int64]),
    "spo_loop_start": (
        c_int32,
        [c_void_p, ctypes.POINTER(LoopLayer), c_int32, c_int32, ctypes.c_char_p, c_size_t],
    ),
    "spo_loop_stop": (None, [c_void_p]),
    "spo_steps_new": (
        c_int32,
        [
            ctypes.POINTER(LoopLayer),
            c_int32,
            c_int32,
            ctypes.POINTER(c_void_p),
            ctypes.c_char_p,
            c_size_t,
        ],
    ),
    "spo_steps_free": (None, [c_void_p]),
    "spo_steps_take": (
        c_int32,
        [c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_int32],
    ),
    "spo_speculation_set": (
        c_int32,
        [c_void_p, ctypes.POINTER(LoopLayer), c_int32, c_int32, c_int32, ctypes.c_char_p, c_size_t],
    ),
    "spo_speculation_switch": (None, [c_void_p, c_void_p, c_int32]),
    "spo_tap_open": (None, [c_void_p, c_int32]),
    "spo_tap_close": (None, [c_void_p]),
    "spo_tap_next": (
        c_int32,
        [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, ctypes.POINTER(c_int32), c_int32],
    ),
    "spo_engine_get_stats": (None, [c_void_p, ctypes.POINTER(Stats)]),
    "spo_engine_check": (c_int32, [c_void_p]),
    "spo_gate_new": (
        c_int32,
        [ctypes.POINTER(GateParams), ctypes.POINTER(c_void_p), ctypes.c_char_p, c_size_t],
    ),
    "spo_gate_free": (None, [c_void_p]),
    "spo_gate_route": (c_int32, [c_void_p] * 6),
    "spo_replay": (
        c_int32,
        [
            ctypes.POINTER(ReplayParams),
            ctypes.POINTER(ReplayCounts),
            ctypes.c_char_p,
            c_size_t,
        ],
    ),
}


def _bind() -> ctypes.CDLL:
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(_library, name)
        function.restype = result
        function.argtypes = arguments
    found = _library.spo_abi_version()
    if found != ABI_VERSION:
        raise BackendError(
            f"libspeculoe speaks ABI {found}, this package {ABI_VERSION}; run `make setup`"
        )
    return _library


functions = _bind()
