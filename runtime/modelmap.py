"""Where a model's experts lie: architecture, MoE layers, and the bytes of each expert in each file.

Takes headers, gives tensor names their meaning (src/llama-arch.cpp and src/llama-model.cpp at the
pin), joins the shards of a split model. Reads no weight and knows nothing about memory: `placement`
decides what is kept.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.header import Array, Header, TensorInfo, Value, read_header, shown

__all__ = ["ExpertMatrix", "MatrixKind", "ModelMap", "MoeLayer"]

MatrixKind = Literal["gate", "up", "down", "gate_up"]

_KINDS: tuple[MatrixKind, ...] = ("gate", "up", "gate_up", "down")
_LAYER = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_SHARD = re.compile(r"-([0-9]{5})-of-([0-9]{5})\.gguf$")
_HASHED_ARRAY_LIMIT = 1 << 20  # bytes; longer ones count by type and length alone


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """One expert matrix of one layer, all experts of it: shape (ne0, ne1, n_expert), contiguous.

    `offset` is where expert 0 starts in `path`, in bytes.
    """

    kind: MatrixKind
    name: str
    ggml_type: int
    ne0: int
    ne1: int
    n_expert: int
    bytes_per_expert: int
    path: Path
    offset: int

    def expert_offset(self, expert: int) -> int:
        """Where `expert` starts in `path`, in bytes; IndexError outside 0 to n_expert - 1."""
        if not 0 <= expert < self.n_expert:
            raise IndexError(f"expert {expert} of {self.name}, which has {self.n_expert}")
        return self.offset + expert * self.bytes_per_expert

    @property
    def nbytes(self) -> int:
        return self.n_expert * self.bytes_per_expert


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """A layer with routed experts; `n_expert_used` is its k, `matrices` as they are used in turn.

    Biases and scales keep the router's ids and are small, so they count among the other weights,
    and so do the shared expert's tensors (`shared_bytes`).
    """

    index: int
    n_expert: int
    n_expert_used: int
    matrices: tuple[ExpertMatrix, ...]
    has_bias: bool = False
    has_scale: bool = False
    has_router: bool = True
    has_selection_bias: bool = False
    shared_bytes: int = 0

    @property
    def has_shared(self) -> bool:
        return self.shared_bytes > 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: all its matrices."""
        return sum(matrix.bytes_per_expert for matrix in self.matrices)

    @property
    def shape_class(self) -> tuple[tuple[MatrixKind, int, int, int], ...]:
        """Layers of equal class can share slots: same kinds, types and shapes."""
        return tuple((m.kind, m.ggml_type, m.ne0, m.ne1) for m in self.matrices)


@dataclass(frozen=True, slots=True)
class ModelMap:
    """A model as its files describe it. `layers` has the MoE layers alone: empty for a dense model.

    `n_layer` leaves out layers that only predict further tokens (nextn): the graph does not run
    them, so their experts count among the other weights, and so do chunk experts (`chexps`).
    `n_expert` and `n_expert_used` are the largest of any layer.
    """

    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    layers: tuple[MoeLayer, ...]
    total_bytes: int
    fingerprint: str
    files: tuple[Path, ...] = ()
    metadata: Mapping[str, Value] = field(default_factory=dict, repr=False)
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> ModelMap:
        """Read the model at `path`; of a split model any shard will do.

        Raises ModelError if a header is not right (see `read_header`), a shard is missing or of
        another model, or the metadata and the expert tensors do not fit together.
        """
        return cls.of(read_header(path))

    @classmethod
    def of(cls, header: Header) -> ModelMap:
        """The model that `header` belongs to, without reading that header again; errors as `read`."""
        return _map(_shards(header))

    @property
    def is_moe(self) -> bool:
        return bool(self.layers)

    @property
    def routed_bytes(self) -> int:
        """Bytes of all routed experts of all MoE layers: what `--expert-budget 100%` means."""
        return sum(layer.n_expert * layer.expert_bytes for layer in self.layers)

    @property
    def other_bytes(self) -> int:
        """Bytes of all weights that are not routed experts."""
        return self.total_bytes - self.routed_bytes

    def layer(self, index: int) -> MoeLayer:
        """The MoE layer at `index` of the model; KeyError if that layer is dense."""
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise KeyError(f"layer {index} has no experts")

    def expert_bytes(self, layer: int) -> int:
        """Bytes of one expert of the model's layer number `layer`; KeyError if it is dense."""
        return self.layer(layer).expert_bytes


def _shards(header: Header) -> tuple[Header, ...]:
    """All headers of the model that `header` belongs to, in order."""
    count = _uint(header, "split.count", 1)
    if count <= 1:
        return (header,)
    name = _SHARD.search(header.path.name)
    if name is None or int(name[2]) != count:
        raise ModelError(
            f"{shown(header.path)} is one of {count} shards, so its name must end in "
            f"-00001-of-{count:05d}.gguf; give all shards their names back"
        )
    stem = header.path.name[: name.start()]
    headers = []
    for index in range(count):
        path = header.path.with_name(f"{stem}-{index + 1:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise ModelError(
                f"{shown(path)} is missing: shard {index + 1} of {count}; download it beside the others"
            )
        shard = read_header(path)
        number = _uint(shard, "split.no", -1)
        if number != index or _uint(shard, "split.count", count) != count:
            raise ModelError(
                f"{shown(path)} says it is shard {number + 1} of {_uint(shard, 'split.count', count)}, "
                f"its name says {index + 1} of {count}; download it again"
            )
        headers.append(shard)
    found = sum(len(shard.tensors) for shard in headers)
    expected = _uint(headers[0], "split.tensors.count", found)
    if found != expected:
        raise ModelError(
            f"{shown(headers[0].path)} and its shards hold {found} tensors, split.tensors.count says "
            f"{expected}; download all {count} again"
        )
    return tuple(headers)


def _map(headers: tuple[Header, ...]) -> ModelMap:
    head = headers[0]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise ModelError(
                    f"{shown(header.path)} repeats tensor {tensor.name!r} of "
                    f"{shown(tensors[tensor.name].path)}; download both again"
                )
            tensors[tensor.name] = tensor

    architecture = _text(head, "general.architecture")
    n_blocks = _uint(head, f"{architecture}.block_count")
    n_nextn = _uint(head, f"{architecture}.nextn_predict_layers", 0)
    if not 0 <= n_nextn < n_blocks:
        raise ModelError(
            f"{shown(head.path)} has {n_blocks} blocks, {n_nextn} of them for further tokens; one must "
            "be left, convert it again"
        )
    n_layer = n_blocks - n_nextn
    layers = _layers(head, tensors, architecture, n_layer, n_blocks)
    return ModelMap(
        architecture=architecture,
        name=_text(head, "general.name", head.path.stem),
        n_layer=n_layer,
        n_embd=_uint(head, f"{architecture}.embedding_length"),
        n_vocab=_n_vocab(head, tensors, architecture),
        n_expert=max((layer.n_expert for layer in layers), default=0),
        n_expert_used=max((layer.n_expert_used for layer in layers), default=0),
        layers=layers,
        total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        fingerprint=_fingerprint(head, tensors),
        files=tuple(header.path for header in headers),
        metadata=head.metadata,
        tensors=tensors,
    )


def _layers(
    head: Header, tensors: Mapping[str, TensorInfo], architecture: str, n_layer: int, n_blocks: int
) -> tuple[MoeLayer, ...]:
    by_layer: dict[int, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            by_layer.setdefault(int(match[1]), {})[match[2]] = tensor
    moe = {
        index: parts
        for index, parts in sorted(by_layer.items())
        if index < n_layer and any(f"ffn_{kind}_exps.weight" in parts for kind in _KINDS)
    }
    if not moe:
        return ()
    used = _used_counts(head, f"{architecture}.expert_used_count", n_blocks, moe)
    return tuple(_layer(head, index, parts, used[index]) for index, parts in moe.items())


def _layer(head: Header, index: int, parts: Mapping[str, TensorInfo], n_used: int) -> MoeLayer:
    matrices = tuple(
        _matrix(kind, parts[name])
        for kind in _KINDS
        if (name := f"ffn_{kind}_exps.weight") in parts
    )
    kinds = {matrix.kind for matrix in matrices}
    if "down" not in kinds or not kinds & {"up", "gate_up"}:
        raise ModelError(
            f"{shown(head.path)} has experts in layer {index} with {', '.join(sorted(kinds))} alone; "
            "down and up (or gate_up) are needed, convert it again"
        )
    counts = {matrix.n_expert for matrix in matrices}
    n_expert = max(counts)
    if len(counts) > 1 or not 1 <= n_used <= n_expert:
        raise ModelError(
            f"{shown(head.path)} has matrices of {sorted(counts)} experts in layer {index} and uses "
            f"{n_used} per token; convert it again"
        )
    expert_names = [name for name in parts if "_exps." in name]
    return MoeLayer(
        index=index,
        n_expert=n_expert,
        n_expert_used=n_used,
        matrices=matrices,
        has_bias=any(name.endswith(".bias") for name in expert_names),
        has_scale=any(name.endswith("scale") for name in expert_names),
        has_router="ffn_gate_inp.weight" in parts,
        has_selection_bias=any(name.split(".")[0] == "exp_probs_b" for name in parts),
        shared_bytes=sum(tensor.nbytes for name, tensor in parts.items() if "_shexp." in name),
    )


def _matrix(kind: MatrixKind, tensor: TensorInfo) -> ExpertMatrix:
    ne0, ne1, n_expert, rest = (*tensor.shape, 1, 1, 1)[:4]
    if rest != 1:
        raise ModelError(
            f"{shown(tensor.path)} has tensor {tensor.name!r} of shape {tensor.shape}, experts have three "
            "dimensions; convert it again"
        )
    return ExpertMatrix(
        kind=kind,
        name=tensor.name,
        ggml_type=tensor.ggml_type,
        ne0=ne0,
        ne1=ne1,
        n_expert=n_expert,
        bytes_per_expert=tensor.nbytes // n_expert,
        path=tensor.path,
        offset=tensor.offset,
    )


def _used_counts(head: Header, key: str, n_blocks: int, layers: Iterable[int]) -> dict[int, int]:
    """k of each of `layers`; as in llama.cpp one number, or an array with one for each block."""
    value = head.metadata.get(key)
    if not isinstance(value, Array):
        return dict.fromkeys(layers, _uint(head, key))
    if len(value) != n_blocks or (counts := value.numbers()).dtype.kind not in "iu":
        raise ModelError(
            f"{shown(head.path)} has {len(value)} values in {key[:80]!r} for {n_blocks} blocks, one "
            "whole number for each is needed; convert it again"
        )
    return {index: int(counts[index]) for index in layers}


def _n_vocab(head: Header, tensors: Mapping[str, TensorInfo], architecture: str) -> int:
    tokens = head.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Array):
        return len(tokens)
    embedding = tensors.get("token_embd.weight")
    rows = embedding.shape[1] if embedding and len(embedding.shape) > 1 else 0
    return _uint(head, f"{architecture}.vocab_size", rows)


def _fingerprint(head: Header, tensors: Mapping[str, TensorInfo]) -> str:
    """SHA-256 of the metadata (no tokenizer, no split) and of each tensor's name, type and shape.

    Where the file lies and how it is split do not enter, nor do the weights themselves: reading
    those would take minutes on the models this is for.
    """
    digest = hashlib.sha256()
    for key, value in sorted(head.metadata.items()):
        if key.startswith(("tokenizer.", "split.")):
            continue
        if isinstance(value, Array):
            raw = value.raw() if value.nbytes <= _HASHED_ARRAY_LIMIT else b""
            digest.update(f"{key!r} array {value.value_type} {value.count} {raw.hex()}\n".encode())
        else:
            digest.update(f"{key!r} {value!r}\n".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name!r} {tensor.ggml_type} {tensor.shape}\n".encode())
    return digest.hexdigest()


def _uint(header: Header, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, int) and not isinstance(value, bool) and (value >= 0 or value == default):
        return value
    found = "no" if value is None else f"{str(value)[:40]!r} as"
    raise ModelError(
        f"{shown(header.path)} has {found} {key[:80]!r}, a count is needed; is it a language model's GGUF?"
    )


def _text(header: Header, key: str, default: str | None = None) -> str:
    value = header.metadata.get(key, default)
    if isinstance(value, str) and value:
        return value
    raise ModelError(
        f"{shown(header.path)} has no text as {key!r}; is it a language model's GGUF? convert it again"
    )
