"""Which metadata and tensors each model family has: one function where the tensors differ.

Written against llama.cpp's `src/models/*.cpp`. Shapes are numpy order: (rows, row length).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.models import vocab
from tests.models.draft import Draft, Value

_BRANCH_GAIN: Final = 0.5  # residual branches add less than they read, as in trained models


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table: the name llama.cpp knows, and the expert type to use by default."""

    arch: str
    describe: Callable[[Draft], None]
    quant: str = "Q8_0"
    routed: bool = True


def _common(draft: Draft, hparams: dict[str, Value]) -> None:
    """Add what all have: sizes, rotary dimensions, embedding, final norm."""
    d = draft.dims
    sizes: dict[str, Value] = {
        "block_count": d.n_layer,
        "context_length": d.n_ctx,
        "embedding_length": d.n_embd,
        "feed_forward_length": d.n_ff,
        "attention.head_count": d.n_head,
        "attention.head_count_kv": d.n_head_kv,
        "attention.key_length": d.head_dim,
        "attention.value_length": d.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": d.head_dim,
        "rope.freq_base": 10000.0,
    }
    draft.hparams({**sizes, **hparams})
    # Unit-size embeddings: what the first block reads then depends on the token.
    draft.vector("token_embd.weight", len(vocab.tokens()), d.n_embd, spread=1.0)
    draft.norm("output_norm.weight", d.n_embd)


def _routed(draft: Draft) -> dict[str, Value]:
    d = draft.dims
    return {
        "expert_count": d.n_expert,
        "expert_used_count": d.n_used,
        "expert_feed_forward_length": d.n_ff_exp,
    }


def _head(draft: Draft) -> None:
    draft.matrix("output.weight", len(vocab.tokens()), draft.dims.n_embd, gain=3.0)


def _attention(draft: Draft, blk: str, *, qk_norm: bool = False, bias: bool = False) -> None:
    d = draft.dims
    q, kv = d.n_head * d.head_dim, d.n_head_kv * d.head_dim
    draft.norm(f"{blk}.attn_norm.weight", d.n_embd)
    for part, rows in (("q", q), ("k", kv), ("v", kv)):
        draft.matrix(f"{blk}.attn_{part}.weight", rows, d.n_embd)
        if bias:
            draft.vector(f"{blk}.attn_{part}.bias", rows)
    draft.matrix(f"{blk}.attn_output.weight", d.n_embd, q, gain=_BRANCH_GAIN)
    if bias:
        draft.vector(f"{blk}.attn_output.bias", d.n_embd)
    if qk_norm:
        draft.norm(f"{blk}.attn_q_norm.weight", d.head_dim)
        draft.norm(f"{blk}.attn_k_norm.weight", d.head_dim)


def _mlp(draft: Draft, blk: str, size: int, suffix: str = "") -> None:
    """Add a dense gated network: `suffix` is empty, or `_shexp` for a shared expert."""
    n_embd = draft.dims.n_embd
    draft.matrix(f"{blk}.ffn_gate{suffix}.weight", size, n_embd)
    draft.matrix(f"{blk}.ffn_up{suffix}.weight", size, n_embd)
    draft.matrix(f"{blk}.ffn_down{suffix}.weight", n_embd, size, gain=_BRANCH_GAIN)


def _moe(draft: Draft, blk: str, *, fused: bool = False) -> None:
    d = draft.dims
    gate, up = f"{blk}.ffn_gate_exps.weight", f"{blk}.ffn_up_exps.weight"
    draft.router(f"{blk}.ffn_gate_inp.weight")
    if fused:
        name = f"{blk}.ffn_gate_up_exps.weight"
        draft.fused_experts(name, (gate, up), d.n_ff_exp, d.n_embd)
    else:
        draft.experts(gate, d.n_ff_exp, d.n_embd)
        draft.experts(up, d.n_ff_exp, d.n_embd)
    # The silu halves what it gates and weights sum to one: a gain above 1 keeps experts visible.
    draft.experts(f"{blk}.ffn_down_exps.weight", d.n_embd, d.n_ff_exp, gain=2.0)


def _qwen3moe(draft: Draft) -> None:
    _common(draft, _routed(draft))
    _head(draft)
    for i in range(draft.dims.n_layer):
        _attention(draft, f"blk.{i}", qk_norm=True)
        draft.norm(f"blk.{i}.ffn_norm.weight", draft.dims.n_embd)
        _moe(draft, f"blk.{i}")


def _qwen35moe(draft: Draft) -> None:
    """Delta-net layers, every fourth (or the last) full attention; a gated shared expert."""
    d = draft.dims
    interval = min(4, d.n_layer)
    rotary = d.head_dim // 2
    hparams: dict[str, Value] = {
        **_routed(draft),
        "expert_shared_feed_forward_length": d.n_ff_exp,
        "full_attention_interval": interval,
        "rope.dimension_count": rotary,
        "rope.dimension_sections": [rotary // 2 - 4, 2, 2, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": d.head_dim,
        "ssm.group_count": d.n_head_kv,
        "ssm.time_step_rank": d.n_head,
        "ssm.inner_size": d.n_head * d.head_dim,
    }
    _common(draft, hparams)
    _head(draft)
    for i in range(d.n_layer):
        blk = f"blk.{i}"
        if (i + 1) % interval:
            _delta_net(draft, blk)
        else:
            _gated_attention(draft, blk)
        draft.norm(f"{blk}.post_attention_norm.weight", d.n_embd)
        _moe(draft, blk)
        draft.vector(f"{blk}.ffn_gate_inp_shexp.weight", d.n_embd)
        _mlp(draft, blk, d.n_ff_exp, "_shexp")


def _delta_net(draft: Draft, blk: str) -> None:
    d = draft.dims
    key, value = d.n_head_kv * d.head_dim, d.n_head * d.head_dim
    draft.norm(f"{blk}.attn_norm.weight", d.n_embd)
    draft.matrix(f"{blk}.attn_qkv.weight", 2 * key + value, d.n_embd)
    draft.matrix(f"{blk}.attn_gate.weight", value, d.n_embd)
    draft.vector(f"{blk}.ssm_conv1d.weight", 2 * key + value, 4, spread=0.5)
    draft.vector(f"{blk}.ssm_dt.bias", d.n_head)
    draft.vector(f"{blk}.ssm_a", d.n_head, mean=-0.5)  # negative: the state must decay
    draft.matrix(f"{blk}.ssm_beta.weight", d.n_head, d.n_embd)
    draft.matrix(f"{blk}.ssm_alpha.weight", d.n_head, d.n_embd)
    draft.norm(f"{blk}.ssm_norm.weight", d.head_dim)
    draft.matrix(f"{blk}.ssm_out.weight", d.n_embd, value, gain=_BRANCH_GAIN)


def _gated_attention(draft: Draft, blk: str) -> None:
    d = draft.dims
    q, kv = d.n_head * d.head_dim, d.n_head_kv * d.head_dim
    draft.norm(f"{blk}.attn_norm.weight", d.n_embd)
    draft.matrix(f"{blk}.attn_q.weight", 2 * q, d.n_embd)  # each head's query, then its gate
    draft.matrix(f"{blk}.attn_k.weight", kv, d.n_embd)
    draft.matrix(f"{blk}.attn_v.weight", kv, d.n_embd)
    draft.matrix(f"{blk}.attn_output.weight", d.n_embd, q, gain=_BRANCH_GAIN)
    draft.norm(f"{blk}.attn_q_norm.weight", d.head_dim)
    draft.norm(f"{blk}.attn_k_norm.weight", d.head_dim)


def _gpt_oss(draft: Draft) -> None:
    """Biases on attention, router and experts; attention sinks; every second layer windowed."""
    d = draft.dims
    _common(draft, {**_routed(draft), "attention.sliding_window": 32})
    _head(draft)
    for i in range(d.n_layer):
        blk = f"blk.{i}"
        _attention(draft, blk, bias=True)
        draft.vector(f"{blk}.attn_sinks.weight", d.n_head, spread=1.0)
        draft.norm(f"{blk}.post_attention_norm.weight", d.n_embd)
        _moe(draft, blk)
        draft.vector(f"{blk}.ffn_gate_inp.bias", d.n_expert)
        draft.vector(f"{blk}.ffn_gate_exps.bias", d.n_expert, d.n_ff_exp)
        draft.vector(f"{blk}.ffn_up_exps.bias", d.n_expert, d.n_ff_exp)
        draft.vector(f"{blk}.ffn_down_exps.bias", d.n_expert, d.n_embd)


def _deepseek2(draft: Draft, *, fused: bool = False) -> None:
    """Latent attention, a leading dense layer, sigmoid routing within the best expert groups."""
    d = draft.dims
    rank, rope, nope = 32, 16, d.head_dim
    hparams: dict[str, Value] = {
        **_routed(draft),
        "leading_dense_block_count": 1,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,  # sigmoid
        "attention.head_count_kv": 1,  # the latent is shared by all heads
        "attention.q_lora_rank": rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": d.head_dim,
        "rope.dimension_count": rope,
    }
    if d.n_expert % 4 == 0 and d.n_expert >= 8 and d.n_used <= d.n_expert // 2:
        hparams |= {"expert_group_count": 4, "expert_group_used_count": 2}
    _common(draft, hparams)
    _head(draft)
    for i in range(d.n_layer):
        blk = f"blk.{i}"
        draft.norm(f"{blk}.attn_norm.weight", d.n_embd)
        draft.matrix(f"{blk}.attn_q_a.weight", rank, d.n_embd)
        draft.norm(f"{blk}.attn_q_a_norm.weight", rank)
        draft.matrix(f"{blk}.attn_q_b.weight", d.n_head * (nope + rope), rank)
        draft.matrix(f"{blk}.attn_kv_a_mqa.weight", rank + rope, d.n_embd)
        draft.norm(f"{blk}.attn_kv_a_norm.weight", rank)
        draft.matrix(f"{blk}.attn_k_b.weight", d.n_head, rank, nope)
        draft.matrix(f"{blk}.attn_v_b.weight", d.n_head, d.head_dim, rank)
        out = d.n_head * d.head_dim
        draft.matrix(f"{blk}.attn_output.weight", d.n_embd, out, gain=_BRANCH_GAIN)
        draft.norm(f"{blk}.ffn_norm.weight", d.n_embd)
        if i == 0:
            _mlp(draft, blk, d.n_ff)
            continue
        _moe(draft, blk, fused=fused)
        draft.vector(f"{blk}.exp_probs_b.bias", d.n_expert)
        _mlp(draft, blk, d.n_ff_exp, "_shexp")


def _bailingmoe(draft: Draft) -> None:
    """Ungated shared expert; the chosen experts' weights are normalised."""
    hparams: dict[str, Value] = {
        **_routed(draft),
        "leading_dense_block_count": 0,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
    }
    _common(draft, hparams)
    _head(draft)
    for i in range(draft.dims.n_layer):
        _attention(draft, f"blk.{i}")
        draft.norm(f"blk.{i}.ffn_norm.weight", draft.dims.n_embd)
        _moe(draft, f"blk.{i}")
        _mlp(draft, f"blk.{i}", draft.dims.n_ff_exp, "_shexp")


def _gemma4(draft: Draft) -> None:
    """Gate and up in one tensor, per-expert output scales, a dense network beside the experts."""
    d = draft.dims
    windowed: list[bool] = [(i + 1) % 2 == 1 for i in range(d.n_layer)]
    hparams: dict[str, Value] = {
        **_routed(draft),
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": 0,
        "attention.key_length_swa": d.head_dim,
        "attention.value_length_swa": d.head_dim,
        "rope.dimension_count_swa": d.head_dim,
        "rope.freq_base_swa": 10000.0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }
    _common(draft, hparams)
    _head(draft)
    draft.vector("rope_freqs.weight", d.head_dim // 2, mean=1.0)
    for i in range(d.n_layer):
        blk = f"blk.{i}"
        _attention(draft, blk, qk_norm=True)
        norms = ("post_attention_norm", "ffn_norm", "post_ffw_norm")
        expert_norms = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        for norm in (*norms, *expert_norms):
            draft.norm(f"{blk}.{norm}.weight", d.n_embd)
        draft.vector(f"{blk}.layer_output_scale.weight", 1, mean=0.5)
        _mlp(draft, blk, d.n_ff)
        _moe(draft, blk, fused=True)
        # The graph divides the router's input by sqrt(n_embd); a trained scale undoes that.
        draft.vector(f"{blk}.ffn_gate_inp.scale", d.n_embd, mean=float(d.n_embd) ** 0.5)
        draft.vector(f"{blk}.ffn_down_exps.scale", d.n_expert, mean=1.0)


def _llama4(draft: Draft) -> None:
    """Routed only in every second layer; an expert's input, not its output, is weighted."""
    d = draft.dims
    if d.n_layer < 4:
        # Only every fourth layer reads the attention temperature; llama.cpp aborts if none does.
        raise ValueError(f"llama4 with {d.n_layer} layers; use 4 or more")
    _common(draft, {**_routed(draft), "interleave_moe_layer_step": 2})
    _head(draft)
    for i in range(d.n_layer):
        _attention(draft, f"blk.{i}")
        draft.norm(f"blk.{i}.ffn_norm.weight", d.n_embd)
        if i % 2:
            _moe(draft, f"blk.{i}")
            _mlp(draft, f"blk.{i}", d.n_ff_exp, "_shexp")
        else:
            _mlp(draft, f"blk.{i}", d.n_ff)


def _llama(draft: Draft) -> None:
    """No experts at all."""
    _common(draft, {})
    _head(draft)
    for i in range(draft.dims.n_layer):
        _attention(draft, f"blk.{i}")
        draft.norm(f"blk.{i}.ffn_norm.weight", draft.dims.n_embd)
        _mlp(draft, f"blk.{i}", draft.dims.n_ff)


FAMILY: Final[dict[str, Family]] = {
    "qwen3moe": Family("qwen3moe", _qwen3moe),
    "qwen35moe": Family("qwen35moe", _qwen35moe),
    "gpt-oss": Family("gpt-oss", _gpt_oss, quant="MXFP4"),
    "deepseek2": Family("deepseek2", _deepseek2),
    "deepseek2-fused": Family("deepseek2", partial(_deepseek2, fused=True)),
    "bailingmoe": Family("bailingmoe", _bailingmoe),
    "gemma4": Family("gemma4", _gemma4),
    "llama4": Family("llama4", _llama4),
    "llama": Family("llama", _llama, routed=False),
}
