"""Text that the dense model writes itself: answers to the prompts list, and documents it continues.

Knows batched decoding through llama.cpp's C API and top-k sampling with a fixed seed. The same library on
the same machine gives the same text; another CPU may round otherwise, so recipes record the text's hash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculoe_local.convert import gguf_raw
from speculoe_local.convert.perplexity import usable_cores
from speculoe_local.convert.prompts import OPENINGS, chat_prompts
from speculoe_local.convert.tokens import encode
from speculoe_local.runtime.errors import BackendError, ModelError

LANES = 32
MAX_TOKENS = 160
TEMPERATURE = 0.8
TOP_K = 50


def sample_ids(
    logits: NDArray[np.float32], rng: np.random.Generator, temperature: float, top_k: int
) -> NDArray[np.int64]:
    """One id per row of `logits` [n, vocabulary], drawn from the `top_k` likeliest at `temperature`."""
    best = np.argpartition(logits, -top_k, axis=1)[:, -top_k:]
    scores = np.take_along_axis(logits, best, axis=1) / temperature
    pick = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    drawn: NDArray[np.int64] = best[np.arange(len(best)), pick]
    return drawn


def chat_text(template: str, user: str) -> str:
    """`user` as the first message of a chat, up to where the answer starts."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": user}]
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True)


def self_text(
    dense: Path,
    *,
    seed: int = 1,
    threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[str]:
    """One text per prompt and opening, prompt included, written by `dense` with sampling seed `seed`.

    Takes minutes. Raises ModelError when the model cannot be loaded or has no chat template,
    BackendError when decoding fails.
    """
    template = gguf_raw.read_gguf(dense).value("tokenizer.chat_template")
    starts = [chat_text(template, prompt) for prompt in chat_prompts()] + list(OPENINGS)
    # Neighbours in the list share a topic; a stride spreads topics over groups that decode together.
    order = [i for first in range(LANES) for i in range(first, len(starts), LANES)]
    writer = _Writer(dense, threads or usable_cores())
    try:
        written: list[str] = []
        for at in range(0, len(order), LANES):
            group = [starts[i] for i in order[at : at + LANES]]
            written += writer.write(group, np.random.default_rng([seed, at]))
            if progress is not None:
                progress(min(1.0, (at + LANES) / len(order)))
    finally:
        writer.close()
    return written


class _Writer:
    """A model and a context with one lane per sequence; must be closed."""

    def __init__(self, path: Path, threads: int) -> None:
        # Imported here: it loads libllama, and whoever chooses which one must come first.
        from llama_cpp import llama_cpp as api

        from speculoe_local.runtime.lib import on_cpu

        self._api: Any = api
        api.llama_backend_init()
        model_params = on_cpu(api.llama_model_default_params())
        self._model = api.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise ModelError(f"{path}: llama.cpp cannot load it; check it with `inspect`")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = LANES * 384, 512, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = LANES, threads, threads
        params.kv_unified = True
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            api.llama_model_free(self._model)
            raise BackendError(f"{path}: no context for {LANES} sequences; free some memory")
        self._vocab = api.llama_model_get_vocab(self._model)
        self._n_vocab = api.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    def write(self, starts: Sequence[str], rng: np.random.Generator) -> list[str]:
        """Each of at most LANES `starts` and its continuation."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        ids = [self._tokenize(start) for start in starts]
        rows = [
            self._decode([(lane, t, at) for at, t in enumerate(i)]) for lane, i in enumerate(ids)
        ]
        live = list(range(len(starts)))
        logits = np.concatenate(rows)
        for _ in range(MAX_TOKENS):
            picked = sample_ids(logits, rng, TEMPERATURE, TOP_K)
            for lane, token in zip(live, picked, strict=True):
                ids[lane].append(int(token))
            live = [n for n in live if not api.llama_vocab_is_eog(self._vocab, ids[n][-1])]
            if not live:
                break
            logits = self._decode([(n, ids[n][-1], len(ids[n]) - 1) for n in live], every=True)
        return [self._text(i) for i in ids]

    def _decode(
        self, tokens: Sequence[tuple[int, int, int]], every: bool = False
    ) -> NDArray[np.float32]:
        """Decode (lane, token, position) triples; logits of the last one, or of every one."""
        api, n = self._api, len(tokens)
        batch = api.llama_batch_init(n, 0, 1)
        try:
            for at, (lane, token, position) in enumerate(tokens):
                batch.token[at], batch.pos[at] = token, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, lane
                batch.logits[at] = every or at == n - 1
            batch.n_tokens = n
            code = api.llama_decode(self._context, batch)
        finally:
            api.llama_batch_free(batch)
        if code:
            raise BackendError(
                f"llama_decode of {n} tokens failed with code {code}; free some memory"
            )
        rows = n if every else 1
        flat = api.llama_get_logits(self._context)
        logits: NDArray[np.float32] = np.ctypeslib.as_array(flat, shape=(rows, self._n_vocab))
        return np.array(logits)

    def _tokenize(self, text: str) -> list[int]:
        return [int(token) for token in encode(self._api, self._vocab, text)]

    def _text(self, ids: Sequence[int]) -> str:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        room = 64 * len(ids)
        out = ctypes.create_string_buffer(room)
        n = self._api.llama_detokenize(self._vocab, tokens, len(ids), out, room, False, True)
        return out.raw[:n].decode("utf-8", "replace")
