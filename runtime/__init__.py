"""Run a Mixture-of-Experts GGUF with part of its experts in fast memory, bit-exactly.

with Engine.open("model.gguf", options=EngineOptions(expert_budget="25%")) as engine:
    for step in engine.chat([Message("user", "Why is the sky blue?")]):
        print(step.text, end="", flush=True)
"""

from __future__ import annotations

from speculoe_local.runtime.engine import Engine, ModelInfo, Step
from speculoe_local.runtime.errors import SpeculoeError
from speculoe_local.runtime.options import EngineOptions, Message, Sampling
from speculoe_local.runtime.stats import Stats

__all__ = [
    "Engine",
    "EngineOptions",
    "Message",
    "ModelInfo",
    "Sampling",
    "SpeculoeError",
    "Stats",
    "Step",
]
