"""Random answers under a grammar, drawn by llama.cpp's own grammar sampler over the tiny vocabulary."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.lib import llama
from speculoe_local.runtime.llama import Vocabulary

__all__ = ["in_language", "walk"]

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_FREE_TOKENS = 20


@cache
def _pieces(vocab: Vocabulary) -> tuple[bytes, ...]:
    return tuple(vocab.piece(token) for token in range(vocab.size))


@contextmanager
def _sampler(vocab: Vocabulary, grammar: str) -> Iterator[ctypes.c_void_p]:
    sampler = llama.llama_sampler_init_grammar(vocab.handle, grammar.encode(), b"root")
    assert sampler, grammar
    try:
        yield sampler
    finally:
        llama.llama_sampler_free(sampler)


def _allowed(vocab: Vocabulary, sampler: ctypes.c_void_p) -> list[int]:
    items: npt.NDArray[np.void] = np.zeros(vocab.size, _CANDIDATE)
    items["id"] = np.arange(vocab.size)
    array = llama.llama_token_data_array(
        data=items.ctypes.data_as(ctypes.POINTER(llama.llama_token_data)),
        size=vocab.size,
        selected=-1,
        sorted=False,
    )
    llama.llama_sampler_apply(sampler, ctypes.byref(array))
    return [int(token) for token in np.flatnonzero(items["logit"] == 0)]


def _sound(piece: bytes) -> bool:
    """No byte that begins no character, or one llama.cpp takes for a longer one: models know better."""
    return all(byte < 0xE0 and byte not in (0xC0, 0xC1) for byte in piece)


def _toward(out: bytes, marks: Sequence[bytes]) -> set[bytes]:
    """The bytes with which `out` comes closer to containing the mark it has most of."""
    seen = {
        mark: next(n for n in range(len(mark) - 1, -1, -1) if out.endswith(mark[:n]))
        for mark in marks
    }
    most = max(seen.values(), default=0)
    return {mark[n : n + 1] for mark, n in seen.items() if n == most}


def walk(
    vocab: Vocabulary, grammar: str, seed: int, *, limit: int = 400, marks: Sequence[bytes] = ()
) -> str | None:
    """One random text of the grammar's language; None where `limit` tokens did not reach an end.

    The longer it gets the more it tends to close what is open, and to write one of `marks`.
    """
    draw = random.Random(seed)
    pieces = _pieces(vocab)
    out = b""
    with _sampler(vocab, grammar) as sampler:
        for count in range(limit):
            allowed = _allowed(vocab, sampler)
            assert allowed, f"dead end after {out!r}"
            ending = [token for token in allowed if vocab.ends(token)]
            if ending and (len(ending) == len(allowed) or draw.random() < 0.3 + count / limit):
                return out.decode()
            inner = [token for token in allowed if token not in ending and _sound(pieces[token])]
            closing = [token for token in inner if pieces[token][:1] in (b'"', b"}", b"]")]
            marking: list[int] = []
            if count > _FREE_TOKENS and draw.random() < 0.9:
                wanted = _toward(out, marks)
                marking = [token for token in inner if pieces[token] in wanted]
            if not marking and closing and draw.random() < count / 60:
                marking = closing
            token = draw.choice(marking or inner)
            llama.llama_sampler_accept(sampler, token)
            out += pieces[token]
    return None


def in_language(vocab: Vocabulary, grammar: str, text: str) -> bool:
    """Whether the whole of `text` is in the grammar's language."""
    pieces = _pieces(vocab)
    with _sampler(vocab, grammar) as sampler:
        for byte in text.encode():
            token = pieces.index(bytes([byte]))
            if token not in _allowed(vocab, sampler):
                return False
            llama.llama_sampler_accept(sampler, token)
        return any(vocab.ends(token) for token in _allowed(vocab, sampler))
