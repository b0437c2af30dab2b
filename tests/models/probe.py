"""Run a model with llama.cpp's own graph and report logits and which experts were chosen.

Independent of the engine under test: nothing of speculoe_local is used, only libllama.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as _low

_NO_DEVICES: Final = (ctypes.c_void_p * 1)(None)
_ARGSORT: Final = b"ffn_moe_argsort-"  # int32 [n_tokens, n_expert], best first

See = Callable[[int, bool, int | None], bool]


@dataclass(frozen=True, slots=True)
class Run:
    """`logits` is float32 [n_tokens, n_vocab]; `chosen` maps a layer to int32 [n_tokens, used]."""

    logits: npt.NDArray[np.float32]
    chosen: dict[int, npt.NDArray[np.int32]]


@contextmanager
def loaded(path: Path, *, mmap: bool = True) -> Iterator[Any]:
    """Yield a `llama_model *` of `path`, kept on the CPU; freed on exit."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    # As runtime.lib.on_cpu, which is not imported: this also drives the unpatched library.
    params.devices = ctypes.cast(_NO_DEVICES, ctypes.c_void_p)
    params.n_gpu_layers = 0
    params.use_mmap = mmap
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp refused {path}; its log above says why")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def tokenize(model: Any, text: str) -> list[int]:
    """Return the ids of `text`, special tokens parsed, none added."""
    vocab = llama_cpp.llama_model_get_vocab(model)
    raw = text.encode()
    ids = (llama_cpp.llama_token * (len(raw) + 8))()
    n = llama_cpp.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, True)
    return list(ids[:n])


def detokenize(model: Any, ids: Sequence[int]) -> bytes:
    vocab = llama_cpp.llama_model_get_vocab(model)
    array = (llama_cpp.llama_token * len(ids))(*ids)
    text = ctypes.create_string_buffer(64 * len(ids) + 64)
    n = llama_cpp.llama_detokenize(vocab, array, len(ids), text, len(text), False, True)
    return text.raw[:n]


def run(model: Any, tokens: Sequence[int], *, n_expert: int = 0, n_used: int = 0) -> Run:
    """Decode `tokens` as one batch, logits of every position; records routing if `n_expert`."""
    chosen: dict[int, npt.NDArray[np.int32]] = {}

    def see(tensor: int, ask: bool, _: int | None) -> bool:
        name = tensor_name(tensor)
        if ask or not name.startswith(_ARGSORT):
            return name.startswith(_ARGSORT)
        order = np.empty((len(tokens), n_expert), np.int32)
        read_tensor(tensor, order)
        chosen[int(name[len(_ARGSORT) :])] = order[:, :n_used].copy()
        return True

    return Run(decode(model, tokens, see if n_expert else None), chosen)


def decode(model: Any, tokens: Sequence[int], see: See | None = None) -> npt.NDArray[np.float32]:
    """Decode `tokens` as one batch: logits [n_tokens, n_vocab] of every position.

    `see(tensor, ask, None)` is llama.cpp's cb_eval: asked which nodes it wants, then shown those.
    """
    failures: list[Exception] = []

    def guarded(tensor: int, ask: bool, user_data: int | None) -> bool:
        try:
            return see is not None and see(tensor, ask, user_data)
        except Exception as error:  # ctypes would print and forget it
            failures.append(error)
            return False  # ends the graph, if asked with a result

    callback = llama_cpp.ggml_backend_sched_eval_callback(guarded)  # outlives the context below
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(64, len(tokens))
    params.n_threads = params.n_threads_batch = 1
    if see:
        params.cb_eval = callback
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp refused to make a context; its log above says why")
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        status = llama_cpp.llama_decode(context, batch)
        if failures:
            raise failures[0]
        if status:
            raise RuntimeError(f"llama_decode returned {status}; its log above says why")
        n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        logits = np.ctypeslib.as_array(
            llama_cpp.llama_get_logits(context), shape=(len(tokens), n_vocab)
        )
        return np.array(logits, np.float32)
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)


def tensor_name(tensor: int) -> bytes:
    name: bytes = _get_name(tensor)
    return name


def read_tensor(tensor: int, into: npt.NDArray[Any]) -> None:
    """Copy the bytes of a contiguous tensor into `into`, which is as large."""
    _tensor_get(tensor, into.ctypes.data, 0, into.nbytes)


# libllama depends on libggml-base, so its handle resolves these too. Indexing gives a fresh function
# object: prototypes set here do not reach other users of the same library.
_get_name = _low._lib["ggml_get_name"]
_get_name.argtypes = [ctypes.c_void_p]
_get_name.restype = ctypes.c_char_p
_tensor_get = _low._lib["ggml_backend_tensor_get"]
_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_tensor_get.restype = None
