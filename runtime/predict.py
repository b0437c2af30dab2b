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

__all__ = ["Floats", "Guess", "Ids", "Predictor", "QuasiHidden", "Tap", "make_predictor"]

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
    """The next layer's own router, on the quasi-hidden state."""

    def __init__(
        self, gates: Mapping[int, Gate], default_vectors: Mapping[int, Floats] | None = None
    ) -> None:
        """`gates` by block, without the layers that cannot be predicted; `default_vectors` by block,
        [n_expert, n_embd] float32. A layer without them is predicted from residual and shared output."""
        self.gates = {block: NativeGate(gate) for block, gate in gates.items()}
        self.default_vectors = default_vectors or {}

    @classmethod
    def of(cls, model: ModelMap) -> QuasiHidden:
        found = load_gates(model)
        return cls({block: gate for block, gate in found.items() if isinstance(gate, Gate)})

    def predict(self, tap: Tap) -> Guess | None:
        gate = self.gates.get(tap.block + 1)
        if gate is None:
            return None
        add = tap.shared
        default = self.default_vectors.get(tap.block)
        if default is not None:
            add = add + tap.weights @ default[tap.ids]
        return Guess(tap.block + 1, gate.best(tap.residual, add))

    def close(self) -> None:
        for gate in self.gates.values():
            gate.close()


def make_predictor(name: str, model: ModelMap) -> Predictor | None:
    """The predictor that `--predict NAME` means: quasi-hidden, none, or MODULE:CLASS.

    A class of one's own is called with the ModelMap. Raises OptionError for a name that is not known
    and for a class that cannot be had.
    """
    if name == "none":
        return None
    if name == "quasi-hidden":
        return QuasiHidden.of(model)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise OptionError(
            f"--predict {name!r} is not known; use quasi-hidden, none, or MODULE:CLASS"
        )
    try:
        return cast("Predictor", getattr(importlib.import_module(module), attribute)(model))
    except Exception as error:
        raise OptionError(f"--predict {name}: {type(error).__name__}: {error}") from error
