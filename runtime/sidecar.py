"""The sidecar of a model: what calibration found, in a GGUF of its own beside the model.

1. `general.architecture` is "speculoe", `speculoe.version` is 1.
2. `speculoe.fingerprint` and `speculoe.routers` name the model: `ModelMap.fingerprint`, and the SHA-256
   of the first 64 KiB of each MoE layer's router. A finetune shares the first, not the second.
3. `speculoe.text.sha256`, `.bytes`, `.tokens` and `.held_out` (tokens) name the calibration text.
4. For each MoE layer N: `speculoe.block.N.strategy`, `.predictable`, `.reason`, `.source` (the block that
   predicts it, -1 without one), and `.recall.WHO` and `.precision_top1.WHO` for each predictor.
5. Tensors of each MoE layer N, in numpy's order of dimensions: `blk.N.default` f16 [n_expert, n_embd],
   `blk.N.counts` i64 [n_expert]; where there is one, `blk.N.shared_mean` f32 [n_embd]; where an
   estimator was fitted, `blk.N.delta_w` f16 [n_expert, n_embd] and `blk.N.delta_b` f32 [n_expert].
   Where estimators were trained: `blk.N.adapter_up` f16 [n_expert, rank], `blk.N.adapter_down` f16
   [rank, n_embd], `blk.N.adapter_bias` f32 [n_expert] and `speculoe.block.N.adapter.base`, `.rank`;
   for a network `speculoe.mlp.width`, `.hidden`, its tensors `mlp.*` (`runtime.mlp`, matrices f16,
   vectors f32) and `blk.N.mlp_embedding` f32 [width] and `speculoe.block.N.mlp.scale`, `.base` of
   each layer it estimates. `speculoe.training.*` says from what.
6. Where `eval` measured a lossy way of running: `speculoe.quality.MODE.WEIGHTS.kl`, `.top1`, `.tokens`.
7. `speculoe.sha256` is over all other metadata and all tensors, see `_digest`.

Knows the file and its arrays. How they are found is `convert.calibrate`'s.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.errors import ModelError, SidecarError
from speculoe_local.runtime.estimators import (
    BASES,
    TRAINED,
    Adapter,
    Training,
    mlp_from,
    mlp_tensors,
)
from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.header import Header, TensorInfo, read_header, shown
from speculoe_local.runtime.mlp import Mlp, SharedMlp, shapes
from speculoe_local.runtime.modelmap import ModelMap

__all__ = [
    "PREDICTORS",
    "LayerCalibration",
    "Quality",
    "Sidecar",
    "router_digest",
    "sidecar_path",
]

VERSION: Final = 1
PREDICTORS: Final = ("residual", "quasi-hidden", "ridge", "previous-token", "chance")
STRATEGIES: Final = ("quasi-hidden", "ridge", *TRAINED, "none")

_ARCHITECTURE: Final = "speculoe"
_ROUTER_BYTES: Final = 64 << 10
_SHARD: Final = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
_AGAIN: Final = "run `speculoe-local calibrate` again"
_TYPES: Final[dict[int, type[Any]]] = {0: np.float32, 1: np.float16, 27: np.int64}  # ggml_type

_KINDS: Final[dict[type[Any], int]] = {  # the type that `_add` gives each value
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.INT64,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}

_LOSSY: Final = tuple(
    f"{mode}/{weights}"
    for mode in ("speculate", "estimate", "hybrid")
    for weights in ("predicted", "true")
)

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalibration:
    """What is known of one MoE layer, `block` in the model.

    Of its own experts: `default_vectors` f16 [n_expert, n_embd], the mean output of each over the
    `counts` int64 [n_expert] tokens that selected it, 0 where `seen` is False; `shared_mean` f32 [n_embd]
    of the shared expert, None without one. (llama4 weighs an expert's input: there the sum of outputs
    over the sum of weights.)

    Of its router, as predicted from layer `source`, the MoE layer before it: `delta_w` f16
    [n_expert, n_embd] and `delta_b` f32 [n_expert], added to its matrix and bias, make the ridge
    estimator; `recall` is the share of the true experts that each of PREDICTORS names, on held-out
    text, `precision_top1` how often its most certain one is among them. Unless `predictable`, `reason`
    says why.

    Of `convert.train`: an `adapter`, and for the sidecar's network the layer's `embedding` f32 [width],
    `mlp_scale`, and `mlp_base`, what it is added to: as an adapter's, or "none".
    """

    block: int
    default_vectors: Halves
    counts: npt.NDArray[np.int64]
    shared_mean: Floats | None = None
    source: int | None = None
    delta_w: Halves | None = None
    delta_b: Floats | None = None
    recall: Mapping[str, float] = field(default_factory=dict)
    precision_top1: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "none"
    predictable: bool = False
    reason: str = ""
    adapter: Adapter | None = None
    embedding: Floats | None = None
    mlp_scale: float = 1.0
    mlp_base: str = "none"

    @property
    def seen(self) -> npt.NDArray[np.bool_]:
        """Bool [n_expert]: whether any token of the calibration text selected the expert."""
        return self.counts > 0

    def mean_output(self, ids: npt.NDArray[np.int32], weights: Floats) -> Floats:
        """d = sum over executed (e, w) of w * D[e]: float32 [n, n_embd] from two arrays [n, k]."""
        return mean_output(self.default_vectors, ids, weights)

    def estimator(self, gate: Gate) -> Gate | None:
        """`gate`, the router of this block, made the ridge estimator of itself; None without one."""
        return with_delta(gate, self.delta_w, self.delta_b)


@dataclass(frozen=True, slots=True)
class Quality:
    """What executing predicted experts costs, against the true router on the same text: `kl` is the mean
    KL(exact || lossy) in nats, `top1` the share of positions with the same most likely token, both over
    `tokens` positions."""

    kl: float
    top1: float
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar:
    """A calibrated model. `text_bytes` is the UTF-8 length of the text, `tokens` and `held_out` what
    was used of it; `layers` has all MoE layers in order; `quality` what `eval` measured of these very
    layers, by "MODE/WEIGHTS" ("speculate/true"): who changes a layer leaves it out."""

    fingerprint: str
    routers: str
    text_sha256: str
    text_bytes: int
    tokens: int
    held_out: int
    layers: tuple[LayerCalibration, ...]
    quality: Mapping[str, Quality] = field(default_factory=dict)
    mlp: SharedMlp | None = None
    training: Training | None = None

    def gate(self, block: int, gate: Gate, who: str) -> Gate | None:
        """`gate`, the router of MoE layer `block`, made the predictor `who`: one of STRATEGIES, or
        `estimator` for the best one there is. None where the layer has no such one.
        """
        layer = self.layer(block)
        if who == "quasi-hidden":
            return gate
        if who == "estimator":
            made = {name: self.gate(block, gate, name) for name in ("ridge", *TRAINED)}
            known = [name for name, estimator in made.items() if estimator is not None]
            # Of equals the first, which costs least.
            return made[max(known, key=lambda name: layer.recall.get(name, 0.0))] if known else None
        if who == "ridge":
            return layer.estimator(gate)
        if who == "adapter" and layer.adapter is not None:
            base = self.gate(block, gate, layer.adapter.base)
            return None if base is None else layer.adapter.added_to(base)
        if who == "mlp" and self.mlp is not None and layer.embedding is not None:
            base = gate if layer.mlp_base == "none" else self.gate(block, gate, layer.mlp_base)
            mlp = Mlp(self.mlp, layer.embedding, layer.mlp_scale, layer.mlp_base != "none")
            return None if base is None else replace(base, mlp=mlp)
        return None

    def layer(self, block: int) -> LayerCalibration:
        """The MoE layer at `block` of the model; KeyError if that layer is dense."""
        for layer in self.layers:
            if layer.block == block:
                return layer
        raise KeyError(f"layer {block} has no experts")

    def mean(self, kind: str, predictor: str) -> float | None:
        """Mean `kind` ("recall" or "precision_top1") of a predictor over the predictable layers that
        have it; None if none has."""
        found = [getattr(layer, kind).get(predictor) for layer in self.layers if layer.predictable]
        known = [value for value in found if value is not None]
        return float(np.mean(known)) if known else None

    def write(self, path: Path) -> None:
        """Write to `path`, which appears whole or stays as it was. Raises OSError."""
        metadata, tensors = _contents(self)
        temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.tmp")
        writer = gguf.GGUFWriter(temporary, _ARCHITECTURE)
        for key, value in metadata.items():
            _add(writer, key, value)
        writer.add_string("speculoe.sha256", _digest(metadata, tensors))
        for name, array in tensors.items():
            writer.add_tensor(name, array)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path, model: ModelMap) -> Sidecar:
        """Read the sidecar of `model` at `path`.

        Raises SidecarError when it is missing, damaged, of another version or of another model.
        """
        header = _header(path)
        if header.metadata.get("general.architecture") != _ARCHITECTURE:
            raise SidecarError(f"{shown(path)} is a GGUF but no sidecar; {_AGAIN}")
        if header.version != gguf.GGUF_VERSION:  # read alike, and not covered by the hash
            raise _damaged(path, f"it says it is a GGUF of version {header.version}")
        version = header.metadata.get("speculoe.version")
        if version != VERSION:
            raise SidecarError(
                f"{shown(path)} is a sidecar of version {str(version)[:20]}, {VERSION} is read; {_AGAIN}"
            )
        tensors = {tensor.name: _array(tensor) for tensor in header.tensors}
        metadata = {k: v for k, v in header.metadata.items() if k != "speculoe.sha256"}
        _same_types(header)
        if header.metadata.get("speculoe.sha256") != _digest(metadata, tensors):
            raise _damaged(path, "its bytes do not have the SHA-256 it names")
        named = _Named(path, metadata, tensors)
        _same_model(named, model)
        return cls(
            fingerprint=named.value("fingerprint", str),
            routers=named.value("routers", str),
            text_sha256=named.value("text.sha256", str),
            text_bytes=named.value("text.bytes", int),
            tokens=named.value("text.tokens", int),
            held_out=named.value("text.held_out", int),
            layers=tuple(
                _layer(named, layer.index, layer.n_expert, model.n_embd) for layer in model.layers
            ),
            quality=_quality(named),
            mlp=_mlp(named, model),
            training=_training(named),
        )


def sidecar_path(model: Path) -> Path:
    """Where the sidecar of the GGUF `model` lies by default; of a split model, without shard number."""
    return model.with_name(_SHARD.sub("", model.stem) + ".speculoe.gguf")


def router_digest(model: ModelMap) -> str:
    """SHA-256 (hex) over the first 64 KiB of each MoE layer's router; ModelError if unreadable."""
    digest = hashlib.sha256()
    for layer in model.layers:
        router = model.tensors.get(f"blk.{layer.index}.ffn_gate_inp.weight")
        if router is None:
            continue
        raw = _bytes(router, min(router.nbytes, _ROUTER_BYTES))
        digest.update(f"{router.name} {len(raw)}\n".encode())
        digest.update(raw)
    return digest.hexdigest()


def mean_output(vectors: npt.NDArray[Any], ids: npt.NDArray[np.int32], weights: Floats) -> Floats:
    """Sum over k of weights [n, k] times rows `ids` [n, k] of `vectors`: float32 [n, n_embd]."""
    total = np.zeros((len(ids), vectors.shape[1]), np.float32)
    for rank in range(ids.shape[1]):
        total += weights[:, rank, None] * vectors[ids[:, rank]].astype(np.float32)
    return total


def with_delta(gate: Gate, delta_w: Halves | None, delta_b: Floats | None) -> Gate | None:
    """`gate` with `delta_w` added to its router and `delta_b` to its bias; None without them."""
    if delta_w is None or delta_b is None:
        return None
    bias = delta_b if gate.bias is None else gate.bias + delta_b
    return replace(gate, router=gate.router + delta_w.astype(np.float32), bias=bias)


Scalar = int | float | bool | str


def _contents(sidecar: Sidecar) -> tuple[dict[str, Scalar], dict[str, npt.NDArray[Any]]]:
    """All metadata but the hash, as a reader will see it, and all tensors."""
    metadata: dict[str, Scalar] = {
        "general.architecture": _ARCHITECTURE,
        "speculoe.version": VERSION,
        "speculoe.fingerprint": sidecar.fingerprint,
        "speculoe.routers": sidecar.routers,
        "speculoe.text.sha256": sidecar.text_sha256,
        "speculoe.text.bytes": sidecar.text_bytes,
        "speculoe.text.tokens": sidecar.tokens,
        "speculoe.text.held_out": sidecar.held_out,
    }
    for run, quality in sidecar.quality.items():
        key = f"speculoe.quality.{run.replace('/', '.')}"
        metadata[f"{key}.kl"] = float(np.float32(quality.kl))
        metadata[f"{key}.top1"] = float(np.float32(quality.top1))
        metadata[f"{key}.tokens"] = quality.tokens
    tensors: dict[str, npt.NDArray[Any]] = {}
    for layer in sidecar.layers:
        key, name = f"speculoe.block.{layer.block}", f"blk.{layer.block}"
        metadata[f"{key}.strategy"] = layer.strategy
        metadata[f"{key}.predictable"] = layer.predictable
        metadata[f"{key}.reason"] = layer.reason
        metadata[f"{key}.source"] = -1 if layer.source is None else layer.source
        for kind in ("recall", "precision_top1"):
            for who, value in getattr(layer, kind).items():
                metadata[f"{key}.{kind}.{who}"] = float(np.float32(value))
        tensors[f"{name}.default"] = layer.default_vectors
        tensors[f"{name}.counts"] = layer.counts
        for part in ("shared_mean", "delta_w", "delta_b"):
            if (array := getattr(layer, part)) is not None:
                tensors[f"{name}.{part}"] = array
        if (adapter := layer.adapter) is not None:
            metadata[f"{key}.adapter.base"] = adapter.base
            metadata[f"{key}.adapter.rank"] = len(adapter.down)
            for part in ("up", "down", "bias"):
                tensors[f"{name}.adapter_{part}"] = getattr(adapter, part)
        if layer.embedding is not None:
            tensors[f"{name}.mlp_embedding"] = layer.embedding
            metadata[f"{key}.mlp.scale"] = float(np.float32(layer.mlp_scale))
            metadata[f"{key}.mlp.base"] = layer.mlp_base
    if (mlp := sidecar.mlp) is not None:
        metadata |= {"speculoe.mlp.width": mlp.width, "speculoe.mlp.hidden": mlp.hidden}
        tensors |= mlp_tensors(mlp)
    if (training := sidecar.training) is not None:
        metadata |= {f"speculoe.training.{k}": v for k, v in asdict(training).items()}
    return metadata, {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Scalar) -> None:
    if key == "general.architecture":
        return  # the writer has it already
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)  # add_string drops an empty one


def _digest(metadata: Mapping[str, Any], tensors: Mapping[str, npt.NDArray[Any]]) -> str:
    """SHA-256 over each key with its value, by key, then each tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for key, value in sorted(metadata.items()):
        digest.update(f"{key!r} {value!r}\n".encode())
    for name, array in sorted(tensors.items()):
        digest.update(f"{name!r} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _damaged(path: Path, problem: str) -> SidecarError:
    return SidecarError(f"{shown(path)} is damaged: {problem}; {_AGAIN}")


def _header(path: Path) -> Header:
    if not path.exists():
        raise SidecarError(
            f"{shown(path)} does not exist; run `speculoe-local calibrate` to make it"
        )
    try:
        return read_header(path)
    except ModelError as error:  # what it advises is for models: a sidecar is made here
        problem, _, _ = str(error).rpartition("; ")
        raise SidecarError(f"{problem or error}; {_AGAIN}") from error


def _same_types(header: Header) -> None:
    """The hash covers values, and another type of integer may say the same value: refuse that too."""
    with header.path.open("rb") as file:
        raw = file.read(header.data_offset)
    for key, value in header.metadata.items():
        name = key.encode()
        entry = struct.pack("<Q", len(name)) + name + struct.pack("<I", _KINDS.get(type(value), 0))
        if entry not in raw:
            raise _damaged(header.path, f"{key} does not have the type it was written with")


def _bytes(tensor: TensorInfo, count: int) -> bytes:
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            raw = file.read(count)
    except OSError as error:
        raise ModelError(
            f"{shown(tensor.path)} cannot be read: {error.strerror}; check it"
        ) from error
    if len(raw) != count:
        raise ModelError(f"{shown(tensor.path)} got shorter while in use; start again")
    return raw


def _array(tensor: TensorInfo) -> npt.NDArray[Any]:
    kind = _TYPES.get(tensor.ggml_type)
    if kind is None:
        raise _damaged(tensor.path, f"tensor {tensor.name!r} has ggml type {tensor.ggml_type}")
    try:
        raw = _bytes(tensor, tensor.nbytes)
    except ModelError as error:
        raise SidecarError(str(error)) from error
    return np.frombuffer(raw, kind).reshape(tensor.shape[::-1])


@dataclass(frozen=True, slots=True)
class _Named:
    """The file's contents, asked for by name; SidecarError where they are not what they must be."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[Any]]

    def value(self, name: str, kind: type[T]) -> T:
        value = self.metadata.get(f"speculoe.{name}")
        if type(value) is not kind:
            raise _damaged(self.path, f"speculoe.{name} is {str(value)[:40]!r}, no {kind.__name__}")
        return value

    def rates(self, prefix: str, names: Iterable[str]) -> dict[str, float]:
        keys = {name: f"{prefix}.{name}" for name in names}
        return {
            name: self.value(key, float)
            for name, key in keys.items()
            if f"speculoe.{key}" in self.metadata
        }

    def tensor(self, name: str, kind: type[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        array = self.tensors.get(name)
        if array is None or array.dtype != kind or array.shape != shape:
            found = "missing" if array is None else f"{array.dtype} {array.shape}"
            raise _damaged(
                self.path, f"tensor {name} is {found}, {kind.__name__} {shape} is needed"
            )
        return array

    def optional(self, name: str, kind: type[Any], shape: tuple[int, ...]) -> Any:
        return self.tensor(name, kind, shape) if name in self.tensors else None


def _same_model(named: _Named, model: ModelMap) -> None:
    ours = {"fingerprint": model.fingerprint, "routers": router_digest(model)}
    for name, expected in ours.items():
        found = named.value(name, str)
        if found != expected:
            raise SidecarError(
                f"{shown(named.path)} is the sidecar of another model ({name} {found[:12]}, this model "
                f"has {expected[:12]}); {_AGAIN}"
            )


def _quality(named: _Named) -> dict[str, Quality]:
    keys = {run: "quality." + run.replace("/", ".") for run in _LOSSY}
    return {
        run: Quality(
            kl=named.value(f"{key}.kl", float),
            top1=named.value(f"{key}.top1", float),
            tokens=named.value(f"{key}.tokens", int),
        )
        for run, key in keys.items()
        if f"speculoe.{key}.kl" in named.metadata
    }


def _mlp(named: _Named, model: ModelMap) -> SharedMlp | None:
    if "speculoe.mlp.width" not in named.metadata:
        return None
    width, hidden = (named.value(f"mlp.{side}", int) for side in ("width", "hidden"))
    n_expert = max((layer.n_expert for layer in model.layers), default=0)
    try:
        return mlp_from(named.tensor, shapes(model.n_embd, width, hidden, n_expert))
    except ModelError as error:
        raise _damaged(named.path, str(error)) from error


def _training(named: _Named) -> Training | None:
    if "speculoe.training.seed" not in named.metadata:
        return None
    return Training(
        text_sha256=named.value("training.text_sha256", str),
        tokens=named.value("training.tokens", int),
        validation=named.value("training.validation", int),
        held_out=named.value("training.held_out", int),
        seed=named.value("training.seed", int),
    )


def _adapter(named: _Named, block: int, n_expert: int, n_embd: int) -> Adapter | None:
    key, name = f"block.{block}.adapter", f"blk.{block}.adapter"
    if f"speculoe.{key}.rank" not in named.metadata:
        return None
    rank, base = named.value(f"{key}.rank", int), named.value(f"{key}.base", str)
    if base not in BASES:
        raise _damaged(named.path, f"the adapter of layer {block} has base {base[:20]!r}")
    return Adapter(
        up=named.tensor(f"{name}_up", np.float16, (n_expert, rank)),
        down=named.tensor(f"{name}_down", np.float16, (rank, n_embd)),
        bias=named.tensor(f"{name}_bias", np.float32, (n_expert,)),
        base=base,
    )


def _layer(named: _Named, block: int, n_expert: int, n_embd: int) -> LayerCalibration:
    key, name = f"block.{block}", f"blk.{block}"
    source = named.value(f"{key}.source", int)
    strategy = named.value(f"{key}.strategy", str)
    if strategy not in STRATEGIES:
        raise _damaged(named.path, f"layer {block} has strategy {strategy[:20]!r}")
    matrix = (n_expert, n_embd)
    embedding, scale, base = None, 1.0, "none"
    if f"speculoe.{key}.mlp.base" in named.metadata:
        width = named.value("mlp.width", int)
        embedding = named.tensor(f"{name}.mlp_embedding", np.float32, (width,))
        scale, base = named.value(f"{key}.mlp.scale", float), named.value(f"{key}.mlp.base", str)
        if base not in (*BASES, "none"):
            raise _damaged(named.path, f"the network of layer {block} has base {base[:20]!r}")
    return LayerCalibration(
        block=block,
        default_vectors=named.tensor(f"{name}.default", np.float16, matrix),
        counts=named.tensor(f"{name}.counts", np.int64, (n_expert,)),
        shared_mean=named.optional(f"{name}.shared_mean", np.float32, (n_embd,)),
        source=None if source < 0 else source,
        delta_w=named.optional(f"{name}.delta_w", np.float16, matrix),
        delta_b=named.optional(f"{name}.delta_b", np.float32, (n_expert,)),
        recall=named.rates(f"{key}.recall", (*PREDICTORS, *TRAINED)),
        precision_top1=named.rates(f"{key}.precision_top1", (*PREDICTORS, *TRAINED)),
        strategy=strategy,
        predictable=named.value(f"{key}.predictable", bool),
        reason=named.value(f"{key}.reason", str),
        adapter=_adapter(named, block, n_expert, n_embd),
        embedding=embedding,
        mlp_scale=scale,
        mlp_base=base,
    )
