"""One network that estimates the router logits of every layer, told apart by an embedding of the layer.

After arXiv 2603.19289: the normed quasi-hidden state is narrowed, the layer's embedding is added, then
one SiLU network with a residual, a layer norm, and a head. Ours are the layer's scale, and that it may
estimate what a router's product lacks instead of all. In numpy, the readable reference of what
native/src/gate.cpp does. Knows nothing of routing, files or training.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.errors import ModelError

__all__ = ["MATRICES", "NORM_EPS", "VECTORS", "Mlp", "SharedMlp"]

Floats = npt.NDArray[np.float32]

NORM_EPS: Final = 1e-5  # of the layer norm; SPO_MLP_EPS in native/include/speculoe/speculoe.h
MATRICES: Final = ("narrow", "expand", "contract", "head")
VECTORS: Final = ("expand_bias", "contract_bias", "norm", "norm_bias", "head_bias")


@dataclass(frozen=True, slots=True, eq=False)
class SharedMlp:
    """What all layers share, float32. With d the width of the model, w the narrowed one, h the
    expanded one and E the experts of the layer that has most:

    `narrow` [w, d]; `expand` [h, w] and `expand_bias` [h]; `contract` [w, h] and `contract_bias` [w];
    `norm` and `norm_bias` [w]; `head` [E, w] and `head_bias` [E].
    """

    narrow: Floats
    expand: Floats
    expand_bias: Floats
    contract: Floats
    contract_bias: Floats
    norm: Floats
    norm_bias: Floats
    head: Floats
    head_bias: Floats

    def __post_init__(self) -> None:
        """Raises ModelError when the shapes do not fit together or a number is not finite."""
        expected = shapes(self.n_embd, self.width, self.hidden, self.n_expert)
        for name, shape in expected.items():
            array = getattr(self, name)
            if array.shape != shape:
                raise ModelError(
                    f"an estimator's {name} has shape {array.shape}, {shape} is needed; train it again"
                )
            if not np.isfinite(array).all():
                raise ModelError(f"an estimator's {name} is not finite; train it again")

    @property
    def n_embd(self) -> int:
        return int(self.narrow.shape[1])

    @property
    def width(self) -> int:
        return int(self.narrow.shape[0])

    @property
    def hidden(self) -> int:
        return int(self.expand.shape[0])

    @property
    def n_expert(self) -> int:
        return int(self.head.shape[0])

    @property
    def n_parameters(self) -> int:
        return sum(int(getattr(self, part.name).size) for part in fields(self))


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """The network as one layer uses it: `embedding` float32 [w] is the layer's own, and so is `scale`,
    by which its logits are multiplied (routers of one model differ in how far theirs spread). If it
    `adds`, they come on top of a router's product, otherwise they stand in its place."""

    shared: SharedMlp
    embedding: Floats
    scale: float
    adds: bool = False

    def __post_init__(self) -> None:
        if self.embedding.shape != (self.shared.width,):
            raise ModelError(
                f"an estimator's embedding has shape {self.embedding.shape}, "
                f"({self.shared.width},) is needed; train it again"
            )

    def logits(self, x: Floats, n_expert: int) -> Floats:
        """Router logits float32 [n, n_expert], before any bias, of normed inputs `x` [n, d]."""
        net = self.shared
        h = x @ net.narrow.T + self.embedding
        h = h + silu(h @ net.expand.T + net.expand_bias) @ net.contract.T + net.contract_bias
        centred = h - h.mean(axis=1, keepdims=True)
        variance = np.mean(centred * centred, axis=1, keepdims=True)
        h = centred / np.sqrt(variance + np.float32(NORM_EPS)) * net.norm + net.norm_bias
        logits = h @ net.head[:n_expert].T + net.head_bias[:n_expert]
        scaled: Floats = logits * np.float32(self.scale)
        return scaled


def shapes(d: int, w: int, h: int, n_expert: int) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a SharedMlp."""
    return {
        "narrow": (w, d),
        "expand": (h, w),
        "expand_bias": (h,),
        "contract": (w, h),
        "contract_bias": (w,),
        "norm": (w,),
        "norm_bias": (w,),
        "head": (n_expert, w),
        "head_bias": (n_expert,),
    }


def silu(x: npt.NDArray[Any]) -> Floats:
    """x / (1 + exp(-x)), which is 0 where the power is beyond float32."""
    with np.errstate(over="ignore"):
        result: Floats = x / (1 + np.exp(-x))
    return result
