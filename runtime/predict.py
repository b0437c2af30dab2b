"""Who predicts the next layer's experts from the residual stream of this one.

The quasi-hidden state (arXiv 2603.19289): q = r_l + d_l + s_l, with r_l the residual after attention of
layer l, d_l = sum of w * D[l, e] over its executed experts (D: mean output of expert e, from the
sidecar), s_l the output of its shared expert. Routed by the next layer's own norm and router, it says
which experts that layer will need; its attention is skipped by the approximation.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.gating import Gate, NativeGate, load_gates
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import Sidecar
from speculoe_local.runtime.slots import LoopGate

__all__ = [
    "Floats",
    "Guess",
    "Ids",
    "Predictor",
    "QuasiHidden",
    "Tap",
    "default_name",
    "make_predictor",
]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tap:
    """What left layer `block` for one token. The arrays are overwritten by the next tap.

    `residual`, `shared` [n_embd] float32; `ids` [k] int32 and `weights` [k] float32 as executed.
    """

    block: int
    residual: Floats
    shared: Floats
    ids: Ids
    weights: Floats


@dataclass(frozen=True, slots=True)
class Guess:
    """Experts of layer `block`, most certain first: its whole top-k, so that it can be judged."""

    block: int
    experts: Ids


class Predictor(Protocol):
    """Made once per engine with the model's map; asked once per layer and token."""

    def predict(self, tap: Tap) -> Guess | None: ...

    def close(self) -> None: ...


class QuasiHidden:
    """The next MoE layer's router, or an estimator in its place, on the quasi-hidden state."""

    def __init__(
        self,
        gates: Mapping[int, Gate],
        source: Mapping[int, int],
        default_vectors: Mapping[int, Floats] | None = None,
    ) -> None:
        """`gates` by the block they predict, `source` by it too: the block whose tap predicts it.
        `default_vectors` by block, [n_expert, n_embd] float32; a layer without them adds none."""
        self.gates = {block: NativeGate(gate) for block, gate in gates.items() if block in source}
        self.source = {block: source[block] for block in self.gates}
        self.default_vectors = default_vectors or {}
        self._target = {source: block for block, source in self.source.items()}

    @classmethod
    def of(
        cls, model: ModelMap, sidecar: Sidecar | None = None, who: str = "quasi-hidden"
    ) -> QuasiHidden:
        """`who`: quasi-hidden takes each layer's own router, estimator the sidecar's best estimator
        wherever there is one, hybrid what the sidecar recommends for the layer; an estimator's name
        (ridge, adapter, mlp) takes that one wherever there is it."""
        blocks = [layer.index for layer in model.layers]
        source = dict(zip(blocks[1:], blocks, strict=False))
        gates = {b: gate for b, gate in load_gates(model).items() if isinstance(gate, Gate)}
        if sidecar is None:
            return cls(gates, source)
        for layer in sidecar.layers:
            gate = gates.get(layer.block)
            if (
                gate is None
                or not layer.predictable
                or (who == "hybrid" and layer.strategy == "none")
            ):
                gates.pop(layer.block, None)
            else:
                asked = layer.strategy if who == "hybrid" else who
                gates[layer.block] = sidecar.gate(layer.block, gate, asked) or gate
        default = {
            layer.block: np.ascontiguousarray(layer.default_vectors, np.float32)
            for layer in sidecar.layers
        }
        return cls(gates, source, default)

    def loop_gates(self) -> dict[int, LoopGate]:
        """By the block predicted, what the library needs to predict by itself; borrowed from here."""
        return {
            block: (
                self.source[block],
                gate.params,
                self.default_vectors.get(self.source[block]),
            )
            for block, gate in self.gates.items()
        }

    def predict(self, tap: Tap) -> Guess | None:
        target = self._target.get(tap.block)
        if target is None:
            return None
        add = tap.shared
        default = self.default_vectors.get(tap.block)
        if default is not None:
            add = add + tap.weights @ default[tap.ids]
        return Guess(target, self.gates[target].best(tap.residual, add))

    def close(self) -> None:
        for gate in self.gates.values():
            gate.close()


def make_predictor(name: str | None, model: ModelMap, sidecar: Sidecar | None) -> Predictor | None:
    """The predictor that `--predict NAME` means: quasi-hidden, estimator, hybrid, none, MODULE:CLASS.

    None means hybrid with a sidecar and quasi-hidden without. A class of one's own is called with the
    ModelMap. Raises OptionError for a name that is not known, an estimator without a sidecar, and a
    class that cannot be had.
    """
    name = name or default_name(sidecar)
    if name == "none":
        return None
    if name in ("estimator", "hybrid") and sidecar is None:
        raise OptionError(f"--predict {name} needs a sidecar; run `speculoe-local calibrate` first")
    if name in ("quasi-hidden", "estimator", "hybrid"):
        return QuasiHidden.of(model, sidecar, name)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise OptionError(
            f"--predict {name!r} is not known; use quasi-hidden, estimator, hybrid, none, or MODULE:CLASS"
        )
    try:
        return cast("Predictor", getattr(importlib.import_module(module), attribute)(model))
    except Exception as error:
        raise OptionError(f"--predict {name}: {type(error).__name__}: {error}") from error


def default_name(sidecar: Sidecar | None) -> str:
    return "quasi-hidden" if sidecar is None else "hybrid"
