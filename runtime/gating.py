"""The routers of a model: read from its files, and asked by libspeculoe while decoding.

`gate` says what a router does, `routers` how each architecture does it. This file finds the weights,
and `NativeGate` is `Gate` in native/src/gate.cpp.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from speculoe_local.runtime import native
from speculoe_local.runtime.errors import BackendError, ModelError
from speculoe_local.runtime.gate import Gate, Routing
from speculoe_local.runtime.header import TensorInfo, shown, type_name
from speculoe_local.runtime.mlp import MATRICES, VECTORS, Mlp
from speculoe_local.runtime.modelmap import ModelMap, MoeLayer
from speculoe_local.runtime.routers import RULES, UNPREDICTABLE, Gating, Rule, Selection

__all__ = [
    "Gate",
    "Gating",
    "NativeGate",
    "Routing",
    "Selection",
    "Unpredictable",
    "load_gates",
]

Floats = npt.NDArray[np.float32]

_GLM_FLASH_VOCAB: Final = 154880  # deepseek2 files of GLM 4.7 Flash do not name their gating
_READ: Final = frozenset(
    ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)


@dataclass(frozen=True, slots=True)
class Unpredictable:
    """A layer whose router cannot be asked from a residual alone; `reason` is one line."""

    reason: str


class NativeGate:
    """The same router in libspeculoe, for one thread at a time. Close it when done."""

    def __init__(self, gate: Gate, n_ids: int | None = None) -> None:
        """`n_ids` as in `Gate.route`. Raises BackendError if the library refuses `gate`."""
        self.n_ids = gate.ids_wanted(n_ids)
        self.n_used, self.n_expert, self.n_embd = gate.n_used, gate.n_expert, gate.n_embd
        # The library borrows these: they live as long as the handle.
        self._kept = {
            name: None if array is None else np.ascontiguousarray(array, np.float32)
            for name in ("router", "norm", "norm_bias", "bias", "selection_bias")
            for array in (getattr(gate, name),)
        }
        self.params = native.GateParams(
            **{name: _pointer(array) for name, array in self._kept.items()},
            eps=gate.eps,
            scale=gate.scale,
            n_expert=gate.n_expert,
            n_embd=gate.n_embd,
            n_used=gate.n_used,
            n_ids=self.n_ids,
            gating=int(gate.gating),
            selection=int(gate.selection),
            n_groups=gate.groups,
            n_groups_used=gate.group_used,
            norm_weights=int(gate.norm_weights),
        )
        if gate.mlp is not None:
            self._mlp = _network(gate.mlp, self._kept)
            self.params.mlp = ctypes.pointer(self._mlp)
        error = ctypes.create_string_buffer(256)
        handle = ctypes.c_void_p()
        status = native.functions.spo_gate_new(
            ctypes.byref(self.params), ctypes.byref(handle), error, len(error)
        )
        if status != native.Status.OK:
            raise BackendError(error.value.decode("utf-8", "replace"))
        self._handle: ctypes.c_void_p | None = handle
        self._ids = np.empty(self.n_ids, np.int32)
        self._weights = np.empty(self.n_used, np.float32)

    def best(self, residual: Floats, add: Floats) -> npt.NDArray[np.int32]:
        """The ids of one token's `residual` plus `add`, both contiguous float32 [n_embd].

        For the decode loop: the result is overwritten by the next call. Raises ModelError when logits
        are not finite.
        """
        status = native.functions.spo_gate_route(
            self._handle,
            residual.ctypes.data,
            add.ctypes.data,
            self._ids.ctypes.data,
            self._weights.ctypes.data,
            None,
        )
        if status != native.Status.OK:
            raise ModelError(
                "router logits are not finite; the residual or the router has inf or nan"
            )
        return self._ids

    def route(self, residual: Floats, add: Floats | None = None) -> Routing:
        """Route residuals float32 [n, n_embd] plus `add` of the same shape: `route(normed(r + d))`.

        Raises ModelError when logits are not finite, ValueError for another shape.
        """
        if self._handle is None:
            raise BackendError("the gate is closed; make it again")
        for given in (residual, add):
            if given is not None and (given.ndim != 2 or given.shape[1] != self.n_embd):
                raise ValueError(f"residuals of shape {given.shape}; (n, {self.n_embd}) is needed")
        if add is not None and len(add) != len(residual):
            raise ValueError(f"{len(add)} rows to add to {len(residual)}; as many are needed")
        residual = np.ascontiguousarray(residual, np.float32)
        add = None if add is None else np.ascontiguousarray(add, np.float32)
        n = len(residual)
        found = Routing(
            np.empty((n, self.n_ids), np.int32),
            np.empty((n, self.n_used), np.float32),
            np.empty((n, self.n_expert), np.float32),
        )
        for i in range(n):
            status = native.functions.spo_gate_route(
                self._handle,
                residual[i].ctypes.data,
                None if add is None else add[i].ctypes.data,
                found.ids[i].ctypes.data,
                found.weights[i].ctypes.data,
                found.probs[i].ctypes.data,
            )
            if status != native.Status.OK:
                raise ModelError(
                    f"router logits of row {i} are not finite; the residual or the router has inf or nan"
                )
        return found

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            native.functions.spo_gate_free(handle)


def load_gates(model: ModelMap) -> dict[int, Gate | Unpredictable]:
    """The router of each MoE layer of `model` by layer number, or why there is none.

    Reads the routers, norms and biases alone, by their place in the files. Raises ModelError when
    one cannot be read or does not fit the metadata.
    """
    reason = _refusal(model)
    return {
        layer.index: Unpredictable(reason)
        if reason
        else _load(model, layer, RULES[model.architecture])
        for layer in model.layers
    }


def _refusal(model: ModelMap) -> str:
    """Why no layer of this architecture can be predicted, or ""."""
    architecture = model.architecture
    if architecture in UNPREDICTABLE:
        return f"{architecture}: {UNPREDICTABLE[architecture]}"
    if architecture not in RULES:
        return f"architecture {architecture} is not in the table"
    if not _eps(model):
        return f"{architecture}: its file has no RMS norm epsilon, so it uses a layer norm"
    if _gating(model, RULES[architecture]) is None:
        return f"{architecture}: its file does not say a known expert_gating_func"
    return ""


def _load(model: ModelMap, layer: MoeLayer, rule: Rule) -> Gate | Unpredictable:
    def find(*names: str) -> TensorInfo | None:
        found = (model.tensors.get(f"blk.{layer.index}.{name}") for name in names)
        return next((tensor for tensor in found if tensor is not None), None)

    router, norm = find("ffn_gate_inp.weight"), find(rule.norm)
    if router is None or norm is None:
        missing = "ffn_gate_inp.weight" if router is None else rule.norm
        return Unpredictable(f"layer {layer.index} has no {missing}")
    if router.shape != (model.n_embd, layer.n_expert):
        raise ModelError(
            f"{shown(router.path)} has tensor {router.name!r} of shape {router.shape}, "
            f"({model.n_embd}, {layer.n_expert}) is needed; convert it again"
        )
    norm_bias = find(rule.norm.removesuffix(".weight") + ".bias")  # phimoe alone has one
    # hy_v3 alone writes its selection bias without a suffix.
    parts = (
        router,
        norm,
        norm_bias,
        find("ffn_gate_inp.bias"),
        find("exp_probs_b.bias", "exp_probs_b"),
    )
    for tensor in parts:
        if tensor is not None and type_name(tensor.ggml_type) not in _READ:
            return Unpredictable(
                f"{tensor.name} has type {type_name(tensor.ggml_type)}, which is not read"
            )
    weights = [None if tensor is None else _floats(tensor) for tensor in parts]
    matrix, norm_weight, *biases = weights
    gating = _gating(model, rule)
    assert matrix is not None and norm_weight is not None and gating is not None
    if rule.norm_over_width:
        norm_weight = norm_weight / np.float32(math.sqrt(model.n_embd))
    return Gate(
        router=matrix,
        norm=norm_weight,
        norm_bias=biases[0],
        bias=biases[1],
        selection_bias=biases[2],
        n_used=layer.n_expert_used,
        gating=gating,
        eps=_eps(model),
        selection=rule.selection,
        groups=int(_number(model, "expert_group_count")),
        group_used=int(_number(model, "expert_group_used_count")),
        norm_weights=_flag(model, "expert_weights_norm")
        if rule.norm_weights is None
        else rule.norm_weights,
        scale=_number(model, "expert_weights_scale") or 1.0 if rule.scaled else 1.0,
    )


def _gating(model: ModelMap, rule: Rule) -> Gating | None:
    if rule.gating is not None:
        return rule.gating
    named = int(_number(model, "expert_gating_func"))
    if named:
        return Gating(named) if named in set(Gating) else None
    flash = model.n_vocab == _GLM_FLASH_VOCAB and model.n_layer in (47, 48)
    if model.architecture in ("deepseek2", "mistral4") and flash:
        return Gating.SIGMOID
    return rule.default


def _eps(model: ModelMap) -> float:
    found = _number(model, "attention.layer_norm_rms_epsilon")
    if not found and model.architecture.startswith("nemotron_h"):
        return _number(model, "attention.layer_norm_epsilon")
    return found


def _number(model: ModelMap, key: str) -> float:
    """A number of the metadata; 0 where there is none, as llama.cpp has it."""
    value = model.metadata.get(f"{model.architecture}.{key}", 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(
            f"{shown(model.files[0])} has {str(value)[:40]!r} as {model.architecture}.{key}, a number is "
            "needed; convert it again"
        )
    return value


def _flag(model: ModelMap, key: str) -> bool:
    return model.metadata.get(f"{model.architecture}.{key}") is True


def _floats(tensor: TensorInfo) -> Floats:
    """The whole tensor as float32, in numpy's order of dimensions; reads its bytes alone."""
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            raw = np.frombuffer(file.read(tensor.nbytes), np.uint8)
    except OSError as error:
        raise ModelError(
            f"{shown(tensor.path)} cannot be read: {error.strerror}; check it"
        ) from error
    if raw.nbytes != tensor.nbytes:
        raise ModelError(f"{shown(tensor.path)} got shorter while in use; start again")
    rows = raw.reshape(math.prod(tensor.shape[1:]), -1)
    floats = quants.dequantize(rows, GGMLQuantizationType(tensor.ggml_type))
    return np.ascontiguousarray(floats, np.float32).reshape(tensor.shape[::-1])


def _network(mlp: Mlp, kept: dict[str, Floats | None]) -> native.GateMlp:
    """The network's parameters; its arrays, borrowed by them, go to `kept`."""
    arrays = {name: getattr(mlp.shared, name) for name in (*MATRICES, *VECTORS)}
    for name, array in (arrays | {"embedding": mlp.embedding}).items():
        kept[f"mlp.{name}"] = np.ascontiguousarray(array, np.float32)
    return native.GateMlp(
        **{name: _pointer(kept[f"mlp.{name}"]) for name in (*arrays, "embedding")},
        width=mlp.shared.width,
        hidden=mlp.shared.hidden,
        scale=mlp.scale,
        adds=int(mlp.adds),
    )


def _pointer(array: Floats | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)
