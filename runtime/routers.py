"""How each architecture routes: one row of a table per name llama.cpp knows, nothing computed.

Read from src/models/*.cpp and `build_moe_ffn` of src/llama-graph.cpp at the pin; a test compares the
rows with that source. Knows no file and no tensor's content: `gating` reads those by these names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

__all__ = ["RULES", "UNPREDICTABLE", "Gating", "Rule", "Selection"]


class Gating(IntEnum):
    """How logits become weights; the numbers are those of `expert_gating_func` in a GGUF."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_WEIGHT = 3  # selection by logits, softmax over the selected ones alone
    SQRT_SOFTPLUS = 4


class Selection(IntEnum):
    """What experts are ranked by; the selection bias comes on top of PROBS alone."""

    PROBS = 0  # what the gating gives; for SOFTMAX_WEIGHT that is the logits
    LOGITS = 1
    SIGMOID = 2  # of the logits, whatever the gating


@dataclass(frozen=True, slots=True)
class Rule:
    """One architecture. None means that the file's metadata decides.

    `default` is what llama.cpp assumes where `expert_gating_func` is missing; None: it refuses.
    `scaled`: `expert_weights_scale` is read, else it is ignored. `norm` and `norm_over_width` say
    which tensor of the layer weights the router's normed input, divided by sqrt(n_embd) if so.
    """

    gating: Gating | None = Gating.SOFTMAX
    default: Gating | None = None
    selection: Selection = Selection.PROBS
    norm_weights: bool | None = True
    scaled: bool = False
    norm: str = "ffn_norm.weight"
    norm_over_width: bool = False


_AFTER_ATTENTION: Final = "post_attention_norm.weight"
_SOFTMAX: Final = Rule()
_PLAIN: Final = Rule(norm_weights=False)
_NAMED: Final = Rule(gating=None, norm_weights=None, scaled=True)
_SIGMOID: Final = replace(_NAMED, default=Gating.SIGMOID)


def _same(rule: Rule, names: Iterable[str]) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


RULES: Final[dict[str, Rule]] = {
    # Softmax over all experts, the chosen weights made to sum to one.
    **_same(
        _SOFTMAX,
        (
            *("ernie4_5-moe", "granite", "granite_swa", "granitehybrid", "granitemoe", "grok"),
            *("hunyuan-moe", "llama", "llama-embed", "maple", "mellum", "minicpm", "minimax-01"),
            *("mistral3", "phimoe", "qwen3moe", "qwen3vlmoe", "rnd1"),
        ),
    ),
    **_same(replace(_SOFTMAX, norm=_AFTER_ATTENTION), ("qwen35moe", "qwen3next")),
    # Its experts run beside attention, on the residual before it.
    "arctic": replace(_SOFTMAX, norm="ffn_norm_exps.weight"),
    "gemma4": replace(_SOFTMAX, norm="ffn_gate_inp.scale", norm_over_width=True),
    "grovemoe": replace(_SOFTMAX, selection=Selection.SIGMOID),
    # The same, weights as they come.
    **_same(_PLAIN, ("jamba", "llada-moe", "olmoe", "qwen2moe")),
    "deepseek": replace(_PLAIN, scaled=True),
    "bailingmoe": Rule(norm_weights=None, scaled=True),
    "gpt-oss": Rule(Gating.SOFTMAX_WEIGHT, norm_weights=False, norm=_AFTER_ATTENTION),
    # Sigmoid by name.
    "llama4": Rule(Gating.SIGMOID, selection=Selection.LOGITS, norm_weights=False),
    "mimo2": Rule(Gating.SIGMOID),
    **_same(
        Rule(Gating.SIGMOID, norm_weights=None, scaled=True, norm="attn_norm.weight"),
        ("nemotron_h", "nemotron_h_moe"),
    ),
    # The file names the gating.
    **_same(
        _NAMED,
        (
            *("bailingmoe2", "bailingmoe3", "deepseek32", "dots1", "dots3note", "exaone-moe"),
            "minimax-m3",
        ),
    ),
    "kimi-linear": replace(_NAMED, norm_weights=True),
    **_same(Rule(gating=None), ("lfm2moe", "minimax-m2")),
    # The file may name it.
    **_same(_SIGMOID, ("afmoe", "glm-dsa", "hy_v3", "laguna", "step35")),
    "cohere2moe": replace(_SIGMOID, norm="attn_norm.weight"),
    "glm4moe": replace(_SIGMOID, norm=_AFTER_ATTENTION),
    **_same(replace(_NAMED, default=Gating.SOFTMAX), ("deepseek2", "deepseek2-ocr", "mistral4")),
}

_STREAMS: Final = "its router reads a learned mix of several residual streams"

# Why the router's input is not the RMS norm of one residual.
UNPREDICTABLE: Final[dict[str, str]] = {
    "dbrx": "its router reads a layer norm, which also subtracts the mean",
    "deepseek4": _STREAMS,
    "dflash": "it drafts for another model, whose hidden states it reads",
    "glm5-next": _STREAMS,
    "hy_v4": _STREAMS,
    "kimi-k3": "its router reads a learned mix of the residuals of earlier layers",
    "nomic-bert-moe": "its router reads a layer norm, which also subtracts the mean",
    "qwen4exp": _STREAMS,
    "smallthinker": "its router reads the layer's input before attention, without a norm",
}
