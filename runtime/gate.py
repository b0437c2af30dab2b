"""One layer's router in numpy, the readable reference: normed input, picks, weights.

After `build_moe_ffn` of src/llama-graph.cpp at the pin. Knows nothing of files or of where a residual
comes from: predicting layer l + 1 is asking its gate with layer l's residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.mlp import Mlp
from speculoe_local.runtime.ranking import top_k
from speculoe_local.runtime.routers import Gating, Selection

__all__ = ["Gate", "Routing"]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

_MIN_SUM: Final = np.float32(6.103515625e-5)  # of chosen weights before they divide; 2^-14


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """What a router says of n tokens.

    `ids` int32 [n, n_ids], best first, as llama.cpp orders them; the first n_used are executed with
    `weights` float32 [n, n_used]. `probs` float32 [n, n_expert] is what the gating gives each expert
    without selection bias: of SOFTMAX_WEIGHT the softmax over all, otherwise llama.cpp's own.
    """

    ids: Ids
    weights: Floats
    probs: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """The router of one MoE layer, with the norm before it. All arrays are float32.

    `router` [n_expert, n_embd]; `norm` [n_embd] weighs the RMS norm, `norm_bias` is added to it;
    `bias` [n_expert] is added to logits, `selection_bias` [n_expert] to the probabilities that
    rank. Only the best `group_used` of `groups` equal runs of experts are looked at (0: of all).
    With an `mlp`, logits are its own instead of `router`'s product, or both added; all else stays.
    """

    router: Floats
    norm: Floats
    n_used: int
    gating: Gating = Gating.SOFTMAX
    eps: float = 1e-6
    bias: Floats | None = None
    selection_bias: Floats | None = None
    norm_bias: Floats | None = None
    selection: Selection = Selection.PROBS
    groups: int = 0
    group_used: int = 0
    norm_weights: bool = False
    scale: float = 1.0
    mlp: Mlp | None = None

    def __post_init__(self) -> None:
        """Raises ModelError when shapes or counts do not fit together, or a bias is not finite."""
        shapes = {
            "norm": (self.norm, self.n_embd),
            "norm bias": (self.norm_bias, self.n_embd),
            "bias": (self.bias, self.n_expert),
            "selection bias": (self.selection_bias, self.n_expert),
        }
        for name, (array, size) in shapes.items():
            if array is not None and array.shape != (size,):
                raise ModelError(
                    f"a router's {name} has shape {array.shape}, ({size},) is needed; convert it again"
                )
            if array is not None and not np.isfinite(array).all():
                raise ModelError(f"a router's {name} is not finite; convert the model again")
        if not 1 <= self.n_used <= self.n_expert:
            raise ModelError(
                f"a router uses {self.n_used} of {self.n_expert} experts; convert it again"
            )
        if self.mlp is not None and (
            self.mlp.shared.n_embd != self.n_embd or self.mlp.shared.n_expert < self.n_expert
        ):
            raise ModelError(
                f"an estimator maps {self.mlp.shared.n_embd} inputs to {self.mlp.shared.n_expert} experts, "
                f"a router {self.n_embd} to {self.n_expert}; train it again"
            )
        if self.groups > 1 and not (
            self.n_expert % self.groups == 0
            and self.n_expert // self.groups >= 2  # a group is worth its two best
            and 1 <= self.group_used < self.groups
        ):
            raise ModelError(
                f"a router uses {self.group_used} of {self.groups} groups of {self.n_expert} experts; "
                "convert it again"
            )

    @property
    def n_expert(self) -> int:
        return int(self.router.shape[0])

    @property
    def n_embd(self) -> int:
        return int(self.router.shape[1])

    def normed(self, r: Floats) -> Floats:
        """The router's input from residuals `r` float32 [n, n_embd]: same shape and type."""
        mean = np.mean((r * r).astype(np.float64), axis=-1, keepdims=True).astype(np.float32)
        x: Floats = r * (np.float32(1) / np.sqrt(mean + np.float32(self.eps))) * self.norm
        return x if self.norm_bias is None else x + self.norm_bias

    def logits(self, x: Floats) -> Floats:
        """Logits float32 [n, n_expert] of normed inputs `x` float32 [n, n_embd], before any bias."""
        if self.mlp is None:
            product: Floats = x @ self.router.T
            return product
        estimated = self.mlp.logits(x, self.n_expert)
        return estimated + x @ self.router.T if self.mlp.adds else estimated

    def route(self, x: Floats, n_ids: int | None = None) -> Routing:
        """Route normed inputs `x` float32 [n, n_embd]; `n_ids` from n_used (default) to n_expert.

        Raises ModelError when logits are not finite, ValueError for another `n_ids`.
        """
        n_ids = self.ids_wanted(n_ids)
        logits = self.logits(x)
        if self.bias is not None:
            logits = logits + self.bias
        if not np.isfinite(logits).all():
            raise ModelError(
                "router logits are not finite; the residual or the router has inf or nan"
            )
        probs = _gated(logits, self.gating)
        ids = top_k(self._scores(logits, probs), n_ids)
        chosen = ids[:, : self.n_used]
        if self.gating is Gating.SOFTMAX_WEIGHT:
            weights = _softmax(np.take_along_axis(logits, chosen, axis=1))
        else:
            weights = np.take_along_axis(probs, chosen, axis=1)
        if self.norm_weights:
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), _MIN_SUM)
        if self.scale not in (0.0, 1.0):
            weights = weights * np.float32(self.scale)
        return Routing(ids, weights, probs)

    def _scores(self, logits: Floats, probs: Floats) -> Floats:
        """What experts are ranked by, those of other groups at -inf: float32 [n, n_expert]."""
        if self.selection is Selection.SIGMOID:
            scores = _gated(logits, Gating.SIGMOID)
        elif self.selection is Selection.LOGITS or self.gating is Gating.SOFTMAX_WEIGHT:
            scores = logits
        else:
            scores = probs
        if self.selection is Selection.PROBS and self.selection_bias is not None:
            scores = scores + self.selection_bias
        if self.groups <= 1:
            return scores
        grouped = scores.reshape(len(scores), self.groups, -1)
        worth = np.take_along_axis(grouped, top_k(grouped, 2), axis=2).sum(axis=2)
        best = top_k(worth, self.group_used)
        kept = np.full_like(grouped, -np.inf)
        rows = np.arange(len(scores))[:, None]
        kept[rows, best] = grouped[rows, best]
        return kept.reshape(scores.shape)

    def ids_wanted(self, n_ids: int | None) -> int:
        """`n_ids`, by default n_used; ValueError outside n_used to n_expert."""
        n_ids = self.n_used if n_ids is None else n_ids
        if not self.n_used <= n_ids <= self.n_expert:
            raise ValueError(f"{n_ids} ids; use {self.n_used} to {self.n_expert}")
        return n_ids


def _gated(logits: Floats, gating: Gating) -> Floats:
    if gating is Gating.SIGMOID:
        with np.errstate(over="ignore"):  # exp may reach inf, and 1 / inf is the 0 that is meant
            sigmoid: Floats = np.reciprocal(1 + np.exp(-logits))
        return sigmoid
    if gating is Gating.SQRT_SOFTPLUS:
        # As ggml has it: the logit itself where it is large, 0 where its power vanishes beside 1.
        soft = np.log(1 + np.exp(np.minimum(logits, np.float32(20))))
        root: Floats = np.sqrt(np.where(logits > 20, logits, soft))
        return root
    return _softmax(logits)


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Floats = powers / powers.sum(axis=1, keepdims=True)
    return result
