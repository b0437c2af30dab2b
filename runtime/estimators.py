"""Trained estimators as a sidecar holds them: arrays, their names, and the gates they make.

`adapter` is added to one layer's router (or to the ridge estimator of it), so that it stays a matrix;
`mlp` is one network for all layers (`runtime.mlp`). Knows names and shapes; `runtime.sidecar` knows the
file, `convert.train` how they are found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.mlp import MATRICES, VECTORS, SharedMlp

__all__ = ["BASES", "TRAINED", "Adapter", "Training", "mlp_from", "mlp_tensors", "rounded"]

TRAINED: Final = ("adapter", "mlp")
BASES: Final = ("quasi-hidden", "ridge")  # what an adapter may be added to

_HALF_MAX: Final = float(np.finfo(np.float16).max)

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A change of one layer's router: `up` f16 [n_expert, rank] times `down` f16 [rank, n_embd], and
    `bias` f32 [n_expert]. It was trained on top of `base`, one of BASES, and is worth nothing without."""

    up: Halves
    down: Halves
    bias: Floats
    base: str

    def added_to(self, gate: Gate) -> Gate:
        """`gate`, which must be the base, with the change added: a plain matrix and bias again."""
        change = self.up.astype(np.float32) @ self.down.astype(np.float32)
        bias = self.bias if gate.bias is None else gate.bias + self.bias
        return replace(gate, router=gate.router + change, bias=bias)


@dataclass(frozen=True, slots=True)
class Training:
    """Where estimators come from: SHA-256 of the text, tokens learned from, tokens that said when to
    stop, other tokens that all predictors were measured on, and the seed of what was drawn."""

    text_sha256: str
    tokens: int
    validation: int
    held_out: int
    seed: int


def rounded(values: npt.NDArray[Any]) -> Halves:
    """`values` as the file has them: the nearest float16, the largest where there is none."""
    halves: Halves = np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)
    return halves


def mlp_tensors(mlp: SharedMlp) -> dict[str, npt.NDArray[Any]]:
    """The network by the names it has in the file: matrices as float16, vectors as float32."""
    return {f"mlp.{name}": rounded(getattr(mlp, name)) for name in MATRICES} | {
        f"mlp.{name}": getattr(mlp, name) for name in VECTORS
    }


def mlp_from(
    take: Callable[[str, type[Any], tuple[int, ...]], npt.NDArray[Any]],
    expected: Mapping[str, tuple[int, ...]],
) -> SharedMlp:
    """The network whose arrays have the `expected` shapes (`mlp.shapes`).

    `take` returns the tensor of a name, type and shape, and raises where there is no such one.
    """
    arrays: dict[str, Floats] = {
        name: take(f"mlp.{name}", np.float16, expected[name]).astype(np.float32)
        for name in MATRICES
    }
    arrays |= {name: take(f"mlp.{name}", np.float32, expected[name]) for name in VECTORS}
    return SharedMlp(**arrays)
