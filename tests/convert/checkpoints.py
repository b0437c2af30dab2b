"""Tiny random Hugging Face checkpoints: config, safetensors and tokenizer, as a hub folder has them.

The model classes are transformers' own, so what a folder means is decided there and not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from speculoe_local.convert.embedded import dense_model
from speculoe_local.runtime.header import Array, read_header
from tests.models import vocab

KNOWN_VOCABULARY: Final = 49152
_TOKENIZER_KEYS: Final = ("tokens", "merges", "token_type")
_CONTROL: Final = 3  # llama_token_type

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def qwen3moe(**more: Any) -> Any:
    """A Qwen3-MoE: 16 experts, 2 per token; its vocabulary is one that llama.cpp knows."""
    return transformers.Qwen3MoeConfig(
        **SIZES,
        vocab_size=KNOWN_VOCABULARY,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **more,
    )


def gpt_oss(**more: Any) -> Any:
    """A gpt-oss with an unknown vocabulary and 16-bit experts: biases, sinks, a windowed layer, YaRN."""
    return transformers.GptOssConfig(
        **SIZES,
        vocab_size=len(vocab.tokens()),
        intermediate_size=32,
        num_local_experts=16,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": True,  # as llama.cpp computes it
            "original_max_position_embeddings": 128,
        },
        **more,
    )


def write(config: Any, folder: Path, *, seed: int = 0, shards: bool = False) -> Any:
    """Write a random model of `config` to `folder`; returns it, for its logits."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            _draw(name, weights)
    model.eval()
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "1GB")
    tokenizer = known_tokenizer() if config.vocab_size == KNOWN_VOCABULARY else tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    return model


def _draw(name: str, weights: torch.Tensor) -> None:
    """Values of a trained model's size, so that layers and experts matter; 16-bit ones, so that
    converting to 16 bits loses nothing."""
    if "norm" in name:
        weights.normal_(1.0, 0.1)
    elif weights.ndim == 1 or "bias" in name:
        weights.normal_(0.0, 0.2)
    elif "embed" in name:
        weights.normal_(0.0, 1.0)
    else:
        weights.normal_(0.0, weights.shape[-1] ** -0.5 * (2.0 if "lm_head" in name else 1.0))
    weights.copy_(weights.half().float())


def tiny_tokenizer() -> Any:
    """The test vocabulary as byte-level BPE: a tokenizer.json nobody has seen."""
    return _tokenizer(
        vocab.tokens(),
        list(vocab.MERGES),
        list(vocab.SPECIALS),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    )


def known_tokenizer() -> Any:
    """The vocabulary inside the embedded model, split as its makers do: llama.cpp knows its hash."""
    metadata = read_header(dense_model()).metadata
    names, merges, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in _TOKENIZER_KEYS)
    assert isinstance(names, Array)
    assert isinstance(merges, Array)
    assert isinstance(kinds, Array)
    tokens = names.strings()
    specials = [tokens[at] for at in np.flatnonzero(kinds.numbers() == _CONTROL)]
    pieces = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    return _tokenizer(tokens, merges.strings(), specials, pre_tokenizers.Sequence(pieces))


def _tokenizer(names: list[str], merges: list[str], specials: list[str], pre: Any) -> Any:
    ids = {name: at for at, name in enumerate(names)}
    model = models.BPE(vocab=ids, merges=[tuple(merge.split(" ")) for merge in merges])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=vocab.BOS,
        eos_token=vocab.EOS,
        pad_token=vocab.BOS,
        additional_special_tokens=specials,
        chat_template=vocab.CHAT_TEMPLATE,
    )


def logits(model: Any, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """What transformers computes for `tokens`: float32 [n_tokens, n_vocab]."""
    with torch.no_grad():
        found = model(torch.tensor([list(tokens)])).logits[0]
    values: npt.NDArray[np.float32] = found.float().numpy()
    return values
