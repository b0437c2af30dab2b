"""Token ids of texts, by the tokenizer inside a GGUF, through llama.cpp. Loads no weights."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculoe_local.runtime.errors import BackendError, ModelError, OptionError

WINDOW = 512


def tokenize(model: Path, texts: Iterable[str]) -> list[NDArray[np.int32]]:
    """Token ids of each text; special tokens written out in a text count as such.

    Raises ModelError when the tokenizer cannot be loaded, BackendError when a text is not accepted.
    """
    # Imported here: it loads libllama, and whoever chooses which one must come first.
    from llama_cpp import llama_cpp as api

    api.llama_backend_init()
    params = api.llama_model_default_params()
    params.vocab_only = True
    loaded = api.llama_model_load_from_file(str(model).encode(), params)
    if not loaded:
        raise ModelError(f"{model}: llama.cpp cannot read its tokenizer; check it with `inspect`")
    try:
        vocab = api.llama_model_get_vocab(loaded)
        return [encode(api, vocab, text) for text in texts]
    finally:
        api.llama_model_free(loaded)


def encode(api: Any, vocab: Any, text: str) -> NDArray[np.int32]:
    """Token ids of `text` by the loaded `vocab` of the bindings `api`; BackendError when refused."""
    raw = text.encode()
    ids = (ctypes.c_int32 * (len(raw) + 8))()
    n = api.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, True)
    if n < 0:
        raise BackendError(f"text of {len(raw)} bytes was not tokenized (code {n})")
    return np.array(ids[:n], dtype=np.int32)


def token_windows(
    model: Path, texts: Iterable[str], *, seed: int, window: int = WINDOW
) -> NDArray[np.int32]:
    """The texts' ids one after another, cut into windows [W, window], in an order drawn by `seed`.

    Raises OptionError when the texts fill no window.
    """
    pieces = tokenize(model, (text + "\n\n" for text in texts))
    joined = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
    count = len(joined) // window
    if count == 0:
        raise OptionError(f"texts have {len(joined)} tokens, {window} fill one window; give more")
    windows = joined[: count * window].reshape(count, window)
    return windows[np.random.default_rng(seed).permutation(count)]
