"""llama.cpp's sampler chain, in the order its own tools use."""

from __future__ import annotations

import secrets
from typing import Any

from speculoe_local.runtime.lib import llama
from speculoe_local.runtime.options import Sampling

__all__ = ["Sampler"]

_PENALTY_WINDOW = 64  # tokens, llama.cpp's default


class Sampler:
    """Draws the next token from the logits of a context. Close it."""

    def __init__(self, sampling: Sampling) -> None:
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        add = llama.llama_sampler_chain_add
        if sampling.repeat_penalty != 1.0:
            add(
                chain,
                llama.llama_sampler_init_penalties(
                    _PENALTY_WINDOW, sampling.repeat_penalty, 0.0, 0.0
                ),
            )
        if sampling.temp <= 0:
            add(chain, llama.llama_sampler_init_greedy())
        else:
            if sampling.top_k > 0:
                add(chain, llama.llama_sampler_init_top_k(sampling.top_k))
            if sampling.top_p < 1:
                add(chain, llama.llama_sampler_init_top_p(sampling.top_p, 1))
            if sampling.min_p > 0:
                add(chain, llama.llama_sampler_init_min_p(sampling.min_p, 1))
            add(chain, llama.llama_sampler_init_temp(sampling.temp))
            seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
            add(chain, llama.llama_sampler_init_dist(seed & 0xFFFFFFFF))
        self._chain: Any = chain

    def sample(self, context: Any) -> int:
        """Draw from the last row of logits and remember the token for penalties."""
        token: int = llama.llama_sampler_sample(self._chain, context, -1)
        return token

    def close(self) -> None:
        chain, self._chain = self._chain, None
        if chain:
            llama.llama_sampler_free(chain)
