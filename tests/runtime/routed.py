"""What llama.cpp's own graph feeds each router, and what comes out: the truth gates are held to."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as _low

from tests.models import probe

Floats = npt.NDArray[np.float32]


class Node(ctypes.Structure):
    """struct ggml_tensor (ggml/include/ggml.h at the pin), as far as its sources."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
    ]

    @classmethod
    def at(cls, address: int | None) -> Node:
        assert address
        return cls.from_address(address)


@dataclass
class Routed:
    """One layer: `x` what its router read, `r` what was normed to it, both float32 [n, n_embd].

    `order` int32 [n, n_expert], best first; `weights` float32 [n, n_used] as experts get them.
    """

    x: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    r: Floats | None = None
    order: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    weights: Floats = field(default_factory=lambda: np.empty(0, np.float32))


def record(model: Any, tokens: Sequence[int]) -> dict[int, Routed]:
    """Decode `tokens` as one batch; what each MoE layer did, by layer number."""
    found: dict[int, Routed] = {}
    closed: set[str] = set()  # grovemoe asks one router twice a layer; the first answer is ours

    def see(tensor: int, ask: bool, _: int | None) -> bool:
        name, layer = probe.tensor_name(tensor).decode().rpartition("-")[::2]
        wanted = (
            layer.isdigit()
            and layer not in closed
            and (  # not "0 (reshaped)"
                name in ("ffn_moe_logits", "ffn_moe_argsort")
                or (name.startswith("ffn_moe_weights") and "_sum" not in name)
            )
        )
        if ask or not wanted:
            return wanted
        entry = found.setdefault(int(layer), Routed())
        if name == "ffn_moe_logits":
            source = Node.at(tensor).src[1]
            entry.x = _rows(source, np.float32)
            entry.r = _residual(source)
        elif name == "ffn_moe_argsort" and entry.order.size:
            closed.add(layer)
        elif name == "ffn_moe_argsort":
            entry.order = _rows(tensor, np.int32)
        else:  # gathered, normalised, scaled: the last one counts
            entry.weights = _rows(tensor, np.float32).reshape(len(tokens), -1)
        return True

    probe.decode(model, tokens, see)
    return found


def _residual(tensor: int | None) -> Floats | None:
    """What the first RMS norm behind `tensor` reads; None if there is none so near."""
    for _ in range(4):
        node = Node.at(tensor)
        tensor = node.src[0]
        if _op_desc(ctypes.addressof(node)) == b"RMS_NORM":
            return _rows(tensor, np.float32)
        if not tensor:
            break
    return None


def _rows(tensor: int | None, kind: type[Any]) -> npt.NDArray[Any]:
    """A contiguous tensor of 4-byte elements, one row per token."""
    node = Node.at(tensor)
    into = np.empty((*node.ne[:0:-1], node.ne[0]), kind)
    probe.read_tensor(ctypes.addressof(node), into)
    return into.reshape(-1, node.ne[0]) if node.ne[2] == 1 else into.reshape(node.ne[2], -1)


_op_desc = _low._lib["ggml_op_desc"]
_op_desc.argtypes = [ctypes.c_void_p]
_op_desc.restype = ctypes.c_char_p
