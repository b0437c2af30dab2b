"""Record what calibration needs of each MoE layer while a graph runs: residual, routing, outputs.

Knows the names that `build_moe_ffn` of src/llama-graph.cpp gives its nodes at the pin, and `cb_eval`,
which shows them. Knows no architecture and keeps nothing: a layer's record goes to its taker, once
per ubatch, and is forgotten.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.errors import BackendError, ModelError
from speculoe_local.runtime.lib import llama_library, log
from speculoe_local.runtime.llama import Context

__all__ = [
    "Capture",
    "LayerRecord",
    "node_name",
    "node_op",
    "node_shape",
    "node_source",
    "read_floats",
    "read_ids",
]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

# What a shared expert adds to the residual, the surest name first: a gated one has both of two.
SHARED_NAMES: Final = (
    "ffn_shexp_gated",
    "ffn_shared_out",
    "ffn_shexp_out",
    "ffn_shexp",
    "ffn_moe_shexp",
)
_LOGITS: Final = "ffn_moe_logits"
_IDS: Final = "ffn_moe_topk"
_WEIGHTS: Final = (  # in the order of the graph; the last one weighs the outputs
    "ffn_moe_weights",
    "ffn_moe_weights_softmax",
    "ffn_moe_weights_norm",
    "ffn_moe_weights_scaled",
)
_OUTPUTS: Final = ("ffn_moe_down", "ffn_moe_down_scaled", "ffn_moe_down_biased")
_LAYER_END: Final = "l_out"
_HOPS: Final = 4  # from a router's input back to its norm: weight, bias, a constant factor
_TYPES: Final[dict[int, type[Any]]] = {0: np.float32, 26: np.int32}  # ggml_type


@dataclass(frozen=True, slots=True, eq=False)
class LayerRecord:
    """One MoE layer over the n tokens of an ubatch; all float32 but `ids`.

    `residual` [n, n_embd] is what the RMS norm before the router reads, None if there is none;
    `logits` [n, n_expert] come from the router's matrix, before any bias; `ids` int32 [n, k], best
    first, are executed with `weights` [n, k]. `outputs` [n, k, n_embd] of those experts, before they
    are weighed, and only if asked for; `shared` [n, n_embd] of the shared expert, if there is one.
    """

    block: int
    residual: Floats | None
    logits: Floats
    ids: Ids
    weights: Floats
    outputs: Floats | None
    shared: Floats | None


@dataclass(slots=True)
class _Pending:
    block: int
    residual: Floats | None = None
    logits: Floats | None = None
    ids: Ids | None = None
    weights: Floats | None = None
    outputs: Floats | None = None
    shared: Floats | None = None
    shared_rank: int = len(SHARED_NAMES)
    closed: bool = (
        False  # grovemoe runs two sets of experts by one router; the first is the routed one
    )


class Capture:
    """The `watch` of a `Context`, for some of a model's MoE layers.

    with closing(Context(model, shape, watch=capture)) as context:
        capture.run(context, tokens)  # calls `take` once for each layer in `blocks`, in order
    """

    def __init__(
        self,
        blocks: Collection[int],
        take: Callable[[LayerRecord], None],
        *,
        outputs: Collection[int] = (),
    ) -> None:
        """`outputs`: those of `blocks` whose experts' outputs are wanted, by far the largest part."""
        self._blocks = frozenset(blocks)
        self._outputs = frozenset(outputs)
        self._last = max(blocks)
        self._take = take
        self._pending: _Pending | None = None
        self._stopped = False
        self._error: BaseException | None = None

    def run(self, context: Context, tokens: Sequence[int]) -> None:
        """Run `tokens`, at most an ubatch of `context`, as a text of their own.

        What follows the last layer of interest is not computed. Raises what `take` raised, or
        BackendError when llama.cpp refuses or a layer does not show its routing.
        """
        self._pending, self._stopped, self._error = None, False, None
        context.clear()
        log.clear()
        # Every token is an output: the last layer computes no others.
        status = context.decode_many([(token, i, 0) for i, token in enumerate(tokens)])
        if self._error is None and status == 0:
            self._guard(self._give)
        if self._error is not None:
            raise self._error
        if status != 0:
            raise BackendError(
                f"llama_decode of {len(tokens)} tokens returned {status}: {log.last()}; free some memory"
            )

    def __call__(self, tensor: int, ask: bool) -> bool:
        """cb_eval: False to a question is "not this one", to a result "stop here"."""
        if self._stopped:
            return ask  # of each further part of the graph one node is computed, and no more
        name, _, number = _name(tensor).decode("utf-8", "replace").rpartition("-")
        if not number.isdigit() or int(number) not in self._blocks:
            return False
        block = int(number)
        if ask:
            return self._wants(name, block)
        self._guard(lambda: self._see(name, block, tensor))
        return not self._stopped

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:  # ctypes would print and forget it
            self._error, self._stopped = error, True

    def _wants(self, name: str, block: int) -> bool:
        if name in _OUTPUTS:
            return block in self._outputs
        if name == _LAYER_END:
            return block == self._last
        return name in (_LOGITS, _IDS) or name in _WEIGHTS or name in SHARED_NAMES

    def _see(self, name: str, block: int, tensor: int) -> None:
        if self._pending is None or self._pending.block != block:
            self._give()
            self._pending = _Pending(block)
        layer = self._pending
        if name in SHARED_NAMES:
            if (rank := SHARED_NAMES.index(name)) < layer.shared_rank:
                layer.shared, layer.shared_rank = _rows(tensor), rank
        elif name == _LAYER_END:
            self._give()
            self._stopped = True
        elif name == _IDS and layer.ids is not None:
            layer.closed = True
        elif layer.closed:
            return
        elif name == _LOGITS:
            layer.logits = _rows(tensor)
            layer.residual = _residual(_Node.from_address(tensor).src[1])
        elif name == _IDS:
            layer.ids = _read(tensor, np.int32)
        elif name in _WEIGHTS:
            layer.weights = _rows(tensor)
        else:
            layer.outputs = _read(tensor, np.float32)

    def _give(self) -> None:
        """Hand the finished record to its taker."""
        layer, self._pending = self._pending, None
        if layer is None:
            return
        if layer.logits is None or layer.ids is None or layer.weights is None:
            raise ModelError(f"layer {layer.block} shows no router logits, ids or weights")
        self._take(
            LayerRecord(
                block=layer.block,
                residual=layer.residual,
                logits=layer.logits,
                ids=layer.ids,
                weights=layer.weights.reshape(layer.ids.shape),
                outputs=None
                if layer.outputs is None
                else layer.outputs.reshape(*layer.ids.shape, -1),
                shared=layer.shared,
            )
        )


class _Node(ctypes.Structure):
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


def node_name(tensor: int) -> str:
    """The name of a graph's node or weight, by its address."""
    return str(_name(tensor).decode("utf-8", "replace"))


def node_op(tensor: int) -> str:
    """What a node does, such as MUL_MAT_ID."""
    return str(_op_desc(tensor).decode("utf-8", "replace"))


def node_source(tensor: int, index: int) -> int | None:
    """The address of what a node reads as its source number `index`."""
    address: int | None = _Node.from_address(tensor).src[index]
    return address


def node_shape(tensor: int) -> tuple[int, int, int, int]:
    """Extents as ggml orders them, the fastest first."""
    ne0, ne1, ne2, ne3 = _Node.from_address(tensor).ne
    return ne0, ne1, ne2, ne3


def read_floats(tensor: int) -> Floats:
    """A float32 tensor [ne2, ne1, ne0]; BackendError for another type or a fourth dimension."""
    array: Floats = _read(tensor, np.float32)
    return array.reshape(node_shape(tensor)[2::-1])


def read_ids(tensor: int) -> Ids:
    """An int32 tensor [ne1, ne0], such as the experts picked; BackendError for another type."""
    return _read(tensor, np.int32)


def _residual(tensor: int | None) -> Floats | None:
    """What the first RMS norm behind `tensor` reads; None if there is none so near."""
    for _ in range(_HOPS):
        if not tensor:
            return None
        source = _Node.from_address(tensor).src[0]
        if _op_desc(tensor) == b"RMS_NORM":
            return _rows(source)
        tensor = source
    return None


def _rows(tensor: int) -> Floats:
    """A float32 tensor, one row per token: [n, what is left]."""
    array: Floats = _read(tensor, np.float32)
    return array.reshape(len(array), -1)


def _read(tensor: int, kind: type[Any]) -> npt.NDArray[Any]:
    """Copy a tensor, also a view with gaps, as an array [ne2, ne1, ne0], without ne2 where it is 1."""
    node = _Node.from_address(tensor)
    if _TYPES.get(node.type) is not kind or node.ne[3] != 1:
        raise BackendError(
            f"node {_name(tensor).decode('utf-8', 'replace')!r} has ggml type {node.type} and shape "
            f"{tuple(node.ne)}, {kind.__name__} of up to 3 dimensions is needed; update speculoe-local"
        )
    raw = np.empty(_nbytes(tensor), np.uint8)
    _tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
    rank = 2 if node.ne[2] == 1 else 3
    strided: npt.NDArray[Any] = np.ndarray(
        shape=tuple(node.ne[:rank][::-1]),
        dtype=kind,
        buffer=raw.data,
        strides=tuple(node.nb[:rank][::-1]),
    )
    return np.ascontiguousarray(strided)


# Indexing gives a function object of our own: its prototype does not reach other users of the library.
_name = llama_library["ggml_get_name"]
_name.argtypes = [ctypes.c_void_p]
_name.restype = ctypes.c_char_p
_op_desc = llama_library["ggml_op_desc"]
_op_desc.argtypes = [ctypes.c_void_p]
_op_desc.restype = ctypes.c_char_p
_nbytes = llama_library["ggml_nbytes"]
_nbytes.argtypes = [ctypes.c_void_p]
_nbytes.restype = ctypes.c_size_t
_tensor_get = llama_library["ggml_backend_tensor_get"]
_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_tensor_get.restype = None
