"""A split: which expert each FFN neuron of a dense model goes into, and the routers.

Knows shapes and consistency, and how a split is stored in a small .npz. Knows nothing about GGUF
files or how a split is found.

The .npz holds `shared` int16 [L, S], `experts` int16 [L, E, F], `router` float16 [L, E, D] with
`router_scale` float32 [L] (their product is what llama.cpp multiplies the normed FFN input with),
`down_gain` float16 [L, N], `used` (experts per token) and `provenance`, a JSON object.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculoe_local.runtime.errors import ModelError

# Raise it when `repack` writes other bytes for the same split: it is part of cached files' names.
REPACK_VERSION = 1
# A softmax renormalised over the picked experts gives each almost 1/k when scores differ little: with
# the largest router weight at this value the picks are the same and the weights nearly uniform.
FLAT_ROUTER_PEAK = 0.02


@dataclass(frozen=True, slots=True)
class Split:
    """A dense FFN stack taken apart: L layers of N neurons, of which S shared and E x F routed.

    shared: int16 [L, S], most important first. experts: int16 [L, E, F].
    router: float32 [L, E, D], scores of the experts from the normed FFN input (D = n_embd).
    down_gain: float32 [L, N], factor on each neuron's output (without the factor k of routed ones).
    used: k, experts per token. provenance: how it was made, copied into the GGUF's metadata.
    """

    shared: NDArray[np.int16]
    experts: NDArray[np.int16]
    router: NDArray[np.float32]
    down_gain: NDArray[np.float32]
    used: int
    provenance: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_layers, n_shared = self.shared.shape
        n_experts, width = self.experts.shape[1:]
        n = n_shared + n_experts * width
        if self.experts.shape[0] != n_layers or self.router.shape[:2] != (n_layers, n_experts):
            raise ModelError(
                f"split: shared {self.shared.shape}, experts {self.experts.shape} and router"
                f" {self.router.shape} disagree; analyse the model again"
            )
        if self.down_gain.shape != (n_layers, n):
            raise ModelError(
                f"split: down_gain is {self.down_gain.shape}, {(n_layers, n)} expected"
            )
        if not 1 <= self.used <= n_experts:
            raise ModelError(f"split: {self.used} experts per token, 1 to {n_experts} possible")
        together = np.concatenate([self.shared, self.experts.reshape(n_layers, -1)], axis=1)
        wrong = np.flatnonzero((np.sort(together, axis=1) != np.arange(n)).any(axis=1))
        if wrong.size:
            raise ModelError(f"split: layer {wrong[0]} does not hold each of {n} neurons once")
        if not (np.isfinite(self.router).all() and np.isfinite(self.down_gain).all()):
            raise ModelError("split: router or gains are not finite; analyse the model again")

    @property
    def n_layers(self) -> int:
        return int(self.shared.shape[0])

    @property
    def n_shared(self) -> int:
        return int(self.shared.shape[1])

    @property
    def n_experts(self) -> int:
        return int(self.experts.shape[1])

    @property
    def expert_width(self) -> int:
        return int(self.experts.shape[2])

    @property
    def n_neurons(self) -> int:
        return self.n_shared + self.n_experts * self.expert_width

    @property
    def n_embd(self) -> int:
        return int(self.router.shape[2])


def flat_router(router: NDArray[np.floating]) -> NDArray[np.float32]:
    """`router` [L, E, D] scaled per layer so that picked experts weigh almost 1/k; same picks."""
    peak = np.abs(router).max(axis=(1, 2), keepdims=True)
    scaled: NDArray[np.floating] = router * (FLAT_ROUTER_PEAK / np.maximum(peak, 1e-12))
    return scaled.astype(np.float32)


def pack_split(split: Split) -> bytes:
    """The bytes of `split` as a compressed .npz; equal splits give equal bytes."""
    scale = np.abs(split.router).max(axis=(1, 2)).astype(np.float32)
    arrays: dict[str, NDArray[Any]] = {
        "shared": split.shared.astype(np.int16),
        "experts": split.experts.astype(np.int16),
        "router": (split.router / np.maximum(scale, 1e-12)[:, None, None]).astype(np.float16),
        "router_scale": scale,
        "down_gain": split.down_gain.astype(np.float16),
        "used": np.array(split.used, dtype=np.int32),
        "provenance": np.array(json.dumps(split.provenance, sort_keys=True)),
    }
    store = io.BytesIO()
    with zipfile.ZipFile(store, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            # np.savez stamps the time of day; a ZipInfo without one keeps equal splits equal.
            member = zipfile.ZipInfo(f"{name}.npy")
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return store.getvalue()


def unpack_split(packed: bytes, name: str = "split") -> Split:
    """The split in the .npz bytes `packed`; raises ModelError when it is not one."""
    try:
        with np.load(io.BytesIO(packed), allow_pickle=False) as npz:
            return Split(
                shared=npz["shared"].astype(np.int16),
                experts=npz["experts"].astype(np.int16),
                router=npz["router"].astype(np.float32) * npz["router_scale"][:, None, None],
                down_gain=npz["down_gain"].astype(np.float32),
                used=int(npz["used"]),
                provenance=json.loads(str(npz["provenance"])),
            )
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as exc:
        raise ModelError(f"{name}: not a split ({exc}); make it with `upcycle`") from exc


def load_split(path: Path) -> Split:
    """Read a split from `path`; raises ModelError when it is missing or not a split."""
    try:
        packed = path.read_bytes()
    except OSError as exc:
        raise ModelError(
            f"{path}: cannot be read ({exc.strerror}); make it with `upcycle`"
        ) from exc
    return unpack_split(packed, str(path))


def digest(packed: bytes) -> str:
    """Sha256 of packed bytes, hexadecimal."""
    return hashlib.sha256(packed).hexdigest()
