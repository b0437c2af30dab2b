"""The lossy modes: which layers execute their prediction, and what that is known to cost.

`speculate` executes what the next layer's own router says of the quasi-hidden state (Router-PF of arXiv
2603.19289), `estimate` what an estimator says wherever there is one, `hybrid` what the sidecar recommends
layer by layer; a layer without a prediction, and every prompt, takes its true router. Predictions are
made inside the graph (native/src/speculation.cpp), so that answers do not depend on timing.
"""

from __future__ import annotations

from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.options import EngineOptions
from speculoe_local.runtime.predict import QuasiHidden
from speculoe_local.runtime.sidecar import Quality, Sidecar
from speculoe_local.runtime.slots import ExpertSlots

__all__ = ["EXECUTES", "Speculation", "quality_of"]

# What `QuasiHidden.of` calls it.
EXECUTES = {"speculate": "quasi-hidden", "estimate": "estimator", "hybrid": "hybrid"}


class Speculation:
    """A lossy mode of one engine. Off at first; close it after the slots."""

    def __init__(
        self, options: EngineOptions, model: ModelMap, sidecar: Sidecar, slots: ExpertSlots
    ) -> None:
        """Raises OptionError when no layer can be predicted, BackendError when a gate is refused."""
        self._slots = slots
        self._predictor = QuasiHidden.of(model, sidecar, EXECUTES[options.mode])
        self._on = False
        self.layers = tuple(self._predictor.gates)
        if not self.layers:
            raise OptionError(
                f"--mode {options.mode}: no layer of {model.name} can be predicted; use exact"
            )
        slots.set_speculation(
            self._predictor.loop_gates(), model.n_embd, true_weights=options.weights == "true"
        )

    def switch(self, context: int, on: bool) -> None:
        """Whether decode steps execute predictions from now on; prompts must not. Between graphs."""
        if on != self._on:
            self._slots.speculate(context, on)
            self._on = on

    def close(self) -> None:
        self._predictor.close()


def quality_of(options: EngineOptions, model: ModelMap, sidecar: Sidecar | None) -> Quality | None:
    """What the lossy mode of `options` was measured to cost; None if nothing was and nobody minds.

    Raises OptionError without a sidecar, or without figures unless `unmeasured`: no run is lossy without
    saying by how much.
    """
    if sidecar is None:
        raise OptionError(
            f"--mode {options.mode} needs a sidecar; run `speculoe-local calibrate {model.files[0]}` first"
        )
    found = sidecar.quality.get(f"{options.mode}/{options.weights}")
    if found is None and not options.unmeasured:
        raise OptionError(
            f"--mode {options.mode} --weights {options.weights} was never measured on this model; run "
            f"`speculoe-local eval --modes {options.mode}` first, or add --unmeasured"
        )
    return found
