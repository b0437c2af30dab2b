"""Small models of more architectures than the engine's tests need: one for each way to route.

All have plain attention and experts; what differs is metadata, the names of norms, and what else
llama.cpp demands beside (src/models/*.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.models import families, vocab
from tests.models.draft import Dims, Draft, Value

DIMS: Final = Dims(
    n_layer=2, n_expert=24, n_used=3, n_embd=64, n_ff=64, n_ff_exp=64, n_head=2, n_head_kv=2
)


@dataclass(frozen=True, slots=True)
class Variant:
    """What one architecture has beside attention, experts and a router, in every layer alike."""

    arch: str
    hparams: dict[str, Value] = field(default_factory=dict)
    norm: str = "ffn_norm.weight"
    head_norms: int = 0  # rows of attn_q_norm and attn_k_norm
    selection_bias: bool = False
    shared: bool = False
    shared_gate: bool = False
    dense: bool = False  # a dense network beside the experts
    layer_norm_biases: bool = False
    fused_attention: bool = False
    chunks: bool = False


_FROM_FILE: Final[dict[str, Value]] = {
    "expert_shared_count": 1,
    "leading_dense_block_count": 0,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
}
_SHARED: Final[dict[str, Value]] = {"expert_shared_feed_forward_length": DIMS.n_ff_exp}

VARIANTS: Final[dict[str, Variant]] = {
    "mixtral": Variant("llama"),
    "qwen2moe": Variant("qwen2moe", _SHARED, shared=True, shared_gate=True),
    "olmoe": Variant("olmoe", head_norms=DIMS.n_embd),
    "granitemoe": Variant(
        "granitemoe", {"logit_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.2}
    ),
    "phimoe": Variant("phimoe", layer_norm_biases=True),
    "arctic": Variant("arctic", norm="ffn_norm_exps.weight", dense=True),
    "ernie4_5-moe": Variant(
        "ernie4_5-moe",
        {"interleave_moe_layer_step": 1, "leading_dense_block_count": 0},
        selection_bias=True,
    ),
    "hunyuan-moe": Variant("hunyuan-moe", _SHARED, head_norms=DIMS.head_dim, shared=True),
    "grovemoe": Variant(
        "grovemoe",
        {
            "experts_per_group": 2,
            "expert_group_scale": 0.05,
            "expert_chunk_feed_forward_length": DIMS.n_ff_exp,
        },
        head_norms=DIMS.head_dim,
        chunks=True,
    ),
    "dots1": Variant(
        "dots1",
        _FROM_FILE | {"expert_gating_func": 1, "expert_weights_norm": False},
        head_norms=DIMS.head_dim,
        shared=True,
    ),
    "bailingmoe2-sigmoid-groups": Variant(
        "bailingmoe2",
        _FROM_FILE
        | _SHARED
        | {"expert_gating_func": 2, "expert_group_count": 6, "expert_group_used_count": 2},
        head_norms=DIMS.head_dim,
        selection_bias=True,
        shared=True,
        fused_attention=True,
    ),
    "bailingmoe2-sqrt-softplus": Variant(
        "bailingmoe2",
        _FROM_FILE | _SHARED | {"expert_gating_func": 4},
        head_norms=DIMS.head_dim,
        selection_bias=True,
        shared=True,
        fused_attention=True,
    ),
    "glm4moe": Variant(
        "glm4moe",
        _FROM_FILE,
        norm="post_attention_norm.weight",
        selection_bias=True,
        shared=True,
    ),
    "minimax-m2": Variant(
        "minimax-m2", {"expert_gating_func": 2}, head_norms=DIMS.n_embd, selection_bias=True
    ),
}


def build(name: str, directory: Path) -> Path:
    """Write the model of `name` into `directory` and return its path; the same bytes every time."""
    variant, d = VARIANTS[name], DIMS
    draft = Draft(variant.arch, d, "Q8_0", seed=0)
    routed: dict[str, Value] = {
        "expert_count": d.n_expert,
        "expert_used_count": d.n_used,
        "expert_feed_forward_length": d.n_ff_exp,
    }
    families._common(draft, routed | variant.hparams)
    families._head(draft)
    if variant.layer_norm_biases:
        draft.vector("output_norm.bias", d.n_embd)
        draft.vector("output.bias", len(vocab.tokens()))
    for i in range(d.n_layer):
        _layer(draft, f"blk.{i}", variant)
    return draft.write(directory / f"{name}.gguf")


def _layer(draft: Draft, blk: str, variant: Variant) -> None:
    d = draft.dims
    if variant.fused_attention:
        draft.norm(f"{blk}.attn_norm.weight", d.n_embd)
        draft.matrix(f"{blk}.attn_qkv.weight", 3 * d.n_embd, d.n_embd)
        draft.matrix(f"{blk}.attn_output.weight", d.n_embd, d.n_embd)
    else:
        families._attention(draft, blk)
    if variant.head_norms:
        draft.norm(f"{blk}.attn_q_norm.weight", variant.head_norms)
        draft.norm(f"{blk}.attn_k_norm.weight", variant.head_norms)
    draft.norm(f"{blk}.{variant.norm}", d.n_embd)
    if variant.layer_norm_biases:
        for name in ("attn_norm", "attn_output", "ffn_norm"):
            draft.vector(f"{blk}.{name}.bias", d.n_embd)
    if variant.dense:
        draft.norm(f"{blk}.ffn_norm.weight", d.n_embd)
        families._mlp(draft, blk, d.n_ff)
    families._moe(draft, blk)
    if variant.selection_bias:
        draft.vector(f"{blk}.exp_probs_b.bias", d.n_expert)
    if variant.shared:
        families._mlp(draft, blk, d.n_ff_exp, "_shexp")
    if variant.shared_gate:
        draft.vector(f"{blk}.ffn_gate_inp_shexp.weight", d.n_embd)
    if variant.chunks:
        shape = (d.n_expert // 2, d.n_ff_exp, d.n_embd)
        for part in ("gate", "up"):
            draft.matrix(f"{blk}.ffn_{part}_chexps.weight", *shape)
        draft.matrix(f"{blk}.ffn_down_chexps.weight", shape[0], d.n_embd, d.n_ff_exp)
