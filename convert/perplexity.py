"""Perplexity of a GGUF on a text, through llama.cpp's C API and the libllama the bindings load.

Windows of 512 tokens that do not overlap; the first half of each is context only and the second half
is scored, as llama.cpp's own perplexity tool does, so a scored token has seen at least 256 others.
Knows nothing about how a model was made.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculoe_local.convert.tokens import WINDOW, encode
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError

_ROWS_AT_ONCE = 32  # 32 rows of 49,152 logits in float64 are 12 MB


@dataclass(frozen=True, slots=True)
class Perplexity:
    """`value` = exp(`mean_nll`, in nats) over `scored` tokens in `windows` windows."""

    value: float
    mean_nll: float
    scored: int
    windows: int


def token_nll(logits: NDArray[np.floating], targets: NDArray[np.integer]) -> NDArray[np.float64]:
    """Negative log-likelihood (nats) [n] of ids `targets` [n] under `logits` [n, vocabulary]."""
    out = np.empty(len(targets), dtype=np.float64)
    for at in range(0, len(targets), _ROWS_AT_ONCE):
        rows = logits[at : at + _ROWS_AT_ONCE].astype(np.float64)
        picked = rows[np.arange(len(rows)), targets[at : at + _ROWS_AT_ONCE]]
        peak = rows.max(axis=1)
        out[at : at + len(rows)] = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1)) - picked
    return out


def perplexity(
    model: Path,
    text: str,
    *,
    window: int = WINDOW,
    max_windows: int | None = None,
    threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Perplexity:
    """Perplexity of `model` on the first `max_windows` windows of `text` (all of them by default).

    Runs on the CPU with `threads` threads (default: the cores this process may use). Raises ModelError
    when the model cannot be loaded, OptionError when the text fills no window, BackendError when
    decoding fails.
    """
    if window < 4 or window % 2:
        raise OptionError(f"window is {window}, an even number of at least 4 is needed")
    with opened(model, window, threads or usable_cores()) as opened_model:
        tokens = opened_model.tokenize(text)
        count = len(tokens) // window
        if max_windows is not None:
            count = min(count, max_windows)
        if count == 0:
            raise OptionError(
                f"text has {len(tokens)} tokens, {window} fill one window; give a longer text"
            )
        losses = []
        for index in range(count):
            ids = tokens[index * window : (index + 1) * window]
            logits = opened_model.logits(ids, first=window // 2 - 1)
            losses.append(token_nll(logits[:-1], ids[window // 2 :]))
            if progress is not None:
                progress((index + 1) / count)
    nll = np.concatenate(losses)
    return Perplexity(math.exp(float(nll.mean())), float(nll.mean()), len(nll), count)


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class Window:
    """A loaded model and one context, used for one window at a time."""

    api: Any
    model: Any
    context: Any
    path: Path

    def tokenize(self, text: str) -> NDArray[np.int32]:
        return encode(self.api, self.api.llama_model_get_vocab(self.model), text)

    def logits(self, ids: NDArray[np.int32], first: int) -> NDArray[np.float32]:
        """Logits [len(ids) - first, vocabulary] from `first` on, valid until the next call."""
        api, n = self.api, len(ids)
        batch = api.llama_batch_init(n, 0, 1)
        try:
            for at, token in enumerate(ids):
                batch.token[at], batch.pos[at] = int(token), at
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
                batch.logits[at] = at >= first
            batch.n_tokens = n
            api.llama_memory_clear(api.llama_get_memory(self.context), True)
            code = api.llama_decode(self.context, batch)
        finally:
            api.llama_batch_free(batch)
        if code:
            raise BackendError(f"{self.path}: llama_decode of {n} tokens failed with code {code}")
        n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        flat = api.llama_get_logits(self.context)
        rows: NDArray[np.float32] = np.ctypeslib.as_array(flat, shape=(n - first, n_vocab))
        return rows


@contextmanager
def opened(path: Path, window: int, threads: int) -> Iterator[Window]:
    """Load `path` on the CPU for windows of at most `window` tokens; freed on leaving.

    Raises ModelError when it cannot be loaded, BackendError when there is no room for the context.
    """
    # Imported here: it loads libllama, and whoever chooses which one must come first.
    from llama_cpp import llama_cpp as api

    from speculoe_local.runtime.lib import on_cpu

    if not path.is_file():
        raise ModelError(f"{path}: no such file; give a GGUF model")
    api.llama_backend_init()
    model_params = on_cpu(api.llama_model_default_params())
    model = api.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        raise ModelError(f"{path}: llama.cpp cannot load it; check it with `inspect`")
    context = None
    try:
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = window
        params.n_threads = params.n_threads_batch = threads
        context = api.llama_init_from_model(model, params)
        if not context:
            raise BackendError(f"{path}: no context of {window} tokens; free some memory")
        yield Window(api, model, context, path)
    finally:
        if context:
            api.llama_free(context)
        api.llama_model_free(model)


def main(argv: list[str] | None = None) -> int:
    """`python -m speculoe_local.convert.perplexity MODEL... --text FILE`: one line per model."""
    parser = argparse.ArgumentParser(description="perplexity of GGUF models on a text")
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--windows", type=int, default=None, help="at most this many windows of 512"
    )
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args(argv)
    content = args.text.read_text(encoding="utf-8")
    base: float | None = None
    for model in args.models:
        got = perplexity(model, content, max_windows=args.windows, threads=args.threads)
        base = base or got.value
        print(
            f"{model.name}: perplexity {got.value:.3f} over {got.scored} tokens"
            f" in {got.windows} windows, {got.value / base:.3f} times the first"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
