"""llama.cpp's sampler chain, in the order its own tools use. Knows no grammar and no request."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.lib import llama
from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.runtime.options import Sampling

__all__ = ["DEFAULT_SAMPLERS", "KNOWN_SAMPLERS", "Sampler", "make_chain"]

DEFAULT_SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
KNOWN_SAMPLERS = (*DEFAULT_SAMPLERS, "infill")
_TEMPERATURE_ONLY = ("penalties", "dry", "temperature")  # mirostat does the truncating itself
_MIROSTAT_M = 100  # llama.cpp's default
_ANY_LENGTH = 1 << 20  # of the penalties' window where the whole context is asked for


class Sampler:
    """Draws the next token from the logits of a context. Close it."""

    def __init__(self, sampling: Sampling, vocab: Vocabulary) -> None:
        self._chain: Any = make_chain(sampling, vocab)

    def sample(self, context: Any, row: int = -1) -> int:
        """Draw from a row of logits (default: the last) and remember the token for penalties."""
        token: int = llama.llama_sampler_sample(self._chain, context, row)
        return token

    def close(self) -> None:
        chain, self._chain = self._chain, None
        if chain:
            llama.llama_sampler_free(chain)


def make_chain(
    sampling: Sampling,
    vocab: Vocabulary,
    *,
    n_ctx: int = _ANY_LENGTH,
    bias: Mapping[int, float] | None = None,
) -> Any:
    """A llama_sampler chain that ends in a choice; whoever gets it frees it.

    `bias` adds to the logits of tokens before anything else; -inf forbids. `n_ctx` is what a penalty
    window of -1 comes to. Raises OptionError for a sampler that is not known.
    """
    names = sampling.samplers if sampling.samplers is not None else DEFAULT_SAMPLERS
    for name in names:
        if name not in KNOWN_SAMPLERS:
            raise OptionError(
                f"sampler {name[:40]!r} is not known; use some of {', '.join(KNOWN_SAMPLERS)}"
            )
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    seed = (secrets.randbits(32) if sampling.seed is None else sampling.seed) & 0xFFFFFFFF
    if bias:
        table = (llama.llama_logit_bias * len(bias))(
            *(llama.llama_logit_bias(token, value) for token, value in bias.items())
        )
        _add(chain, llama.llama_sampler_init_logit_bias(vocab.size, len(bias), table))
    greedy = sampling.temp <= 0
    if sampling.mirostat and not greedy:
        names = _TEMPERATURE_ONLY
    makers = _makers(sampling, vocab, n_ctx, seed)
    for name in names:
        if not greedy or name in ("penalties", "dry"):
            made = makers[name]()
            if made is not None:
                _add(chain, made)
    _add(chain, _choice(sampling, vocab, seed))
    return chain


def _add(chain: Any, sampler: Any) -> None:
    llama.llama_sampler_chain_add(chain, sampler)


def _choice(sampling: Sampling, vocab: Vocabulary, seed: int) -> Any:
    if sampling.temp <= 0:
        return llama.llama_sampler_init_greedy()
    tau, eta = sampling.mirostat_tau, sampling.mirostat_eta
    if sampling.mirostat == 1:
        return llama.llama_sampler_init_mirostat(vocab.size, seed, tau, eta, _MIROSTAT_M)
    if sampling.mirostat == 2:
        return llama.llama_sampler_init_mirostat_v2(seed, tau, eta)
    return llama.llama_sampler_init_dist(seed)


def _makers(s: Sampling, vocab: Vocabulary, n_ctx: int, seed: int) -> dict[str, Callable[[], Any]]:
    """By name, what makes a sampler, or gives None where it would change nothing."""
    keep = max(1, s.min_keep)

    def when(wanted: bool, make: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: make() if wanted else None

    penalties = (s.repeat_penalty, s.frequency_penalty, s.presence_penalty) != (1.0, 0.0, 0.0)
    return {
        "penalties": when(penalties and s.repeat_last_n != 0, lambda: _penalties(s, vocab, n_ctx)),
        "dry": when(s.dry_multiplier != 0 and s.dry_last_n != 0, lambda: _dry(s, vocab, n_ctx)),
        "top_n_sigma": when(
            s.top_n_sigma > 0, lambda: llama.llama_sampler_init_top_n_sigma(s.top_n_sigma)
        ),
        "top_k": when(s.top_k > 0, lambda: llama.llama_sampler_init_top_k(s.top_k)),
        "typ_p": when(s.typical_p < 1, lambda: llama.llama_sampler_init_typical(s.typical_p, keep)),
        "top_p": when(s.top_p < 1, lambda: llama.llama_sampler_init_top_p(s.top_p, keep)),
        "min_p": when(s.min_p > 0, lambda: llama.llama_sampler_init_min_p(s.min_p, keep)),
        "xtc": when(
            s.xtc_probability > 0,
            lambda: llama.llama_sampler_init_xtc(s.xtc_probability, s.xtc_threshold, keep, seed),
        ),
        "temperature": lambda: llama.llama_sampler_init_temp_ext(
            s.temp, s.dynatemp_range, s.dynatemp_exponent
        ),
        "infill": lambda: llama.llama_sampler_init_infill(vocab.handle),
    }


def _penalties(s: Sampling, vocab: Vocabulary, n_ctx: int) -> Any:
    return llama.llama_sampler_init_penalties(
        vocab.size,
        n_ctx if s.repeat_last_n < 0 else s.repeat_last_n,
        s.repeat_penalty,
        s.frequency_penalty,
        s.presence_penalty,
    )


def _dry(s: Sampling, vocab: Vocabulary, n_ctx: int) -> Any:
    breakers = (ctypes.c_char_p * len(s.dry_breakers))(
        *(text.encode("utf-8", "replace") for text in s.dry_breakers)
    )
    return llama.llama_sampler_init_dry(
        vocab.handle,
        s.dry_multiplier,
        s.dry_base,
        s.dry_allowed_length,
        n_ctx if s.dry_last_n < 0 else s.dry_last_n,
        breakers,
        len(s.dry_breakers),
    )
