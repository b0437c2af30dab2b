"""Text to tokens and back, by a model's own vocabulary. Knows nothing of contexts or weights."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from speculoe_local.runtime.errors import BackendError, OptionError
from speculoe_local.runtime.lib import llama

__all__ = ["Fim", "Vocabulary"]

_FIM = ("pre", "suf", "mid", "pad", "rep", "sep")


@dataclass(frozen=True, slots=True)
class Fim:
    """Tokens of fill-in-the-middle; -1 where the vocabulary has none."""

    prefix: int
    suffix: int
    middle: int
    pad: int
    repository: int
    separator: int

    @property
    def complete(self) -> bool:
        """Whether a middle can be asked for at all."""
        return min(self.prefix, self.suffix, self.middle) >= 0


class Vocabulary:
    """Text to tokens and back, in any thread.

    Once the model is closed, all methods raise BackendError. llama.cpp ends the process for a token
    that is none: here that is an OptionError.
    """

    def __init__(self, model: Any) -> None:
        self._vocab = llama.llama_model_get_vocab(model)
        self._users = 0  # guarded by `_idle`, as is `_closed`
        self._closed = False
        self._idle = threading.Condition(threading.Lock())
        self.size: int = llama.llama_vocab_n_tokens(self._vocab)
        self.bos: int = llama.llama_vocab_bos(self._vocab)
        self.eos: int = llama.llama_vocab_eos(self._vocab)
        self.adds_bos: bool = llama.llama_vocab_get_add_bos(self._vocab)
        self.fim = Fim(*(getattr(llama, f"llama_vocab_fim_{n}")(self._vocab) for n in _FIM))

    @property
    def handle(self) -> Any:
        """The llama_vocab, for samplers; alive as long as the model."""
        return self._vocab

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = True) -> list[int]:
        """Tokens of `text`; with `special`, control tokens written in it count as such."""
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 8
        with self._open() as vocab:
            while True:
                tokens = (llama.llama_token * room)()
                n = llama.llama_tokenize(vocab, raw, len(raw), tokens, room, add_bos, special)
                if n >= 0:
                    return list(tokens[:n])
                room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for in an answer; nothing for control tokens, unless `special`."""
        self._check(token)
        buffer = ctypes.create_string_buffer(64)
        with self._open() as vocab:
            n = llama.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
            if n < 0:
                buffer = ctypes.create_string_buffer(-n)
                n = llama.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:n]

    def text_of(self, token: int) -> str:
        """How a template writes a special token; "" when there is none."""
        if token < 0:
            return ""
        self._check(token)
        with self._open() as vocab:
            raw: bytes | None = llama.llama_vocab_get_text(vocab, token)
            return (raw or b"").decode("utf-8", "replace")

    def controls(self) -> tuple[str, ...]:
        """How all control tokens are written; asks llama.cpp once per token, so keep what it returns."""
        with self._open() as vocab:
            found = [t for t in range(self.size) if llama.llama_vocab_is_control(vocab, t)]
        return tuple(self.text_of(token) for token in found)

    def ends(self, token: int) -> bool:
        """Whether the token ends a generation."""
        self._check(token)
        with self._open() as vocab:
            return bool(llama.llama_vocab_is_eog(vocab, token))

    def close(self) -> None:
        """The model is about to go: waits for calls that run."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._users)

    def _check(self, token: int) -> None:
        if not 0 <= token < self.size:
            raise OptionError(
                f"token {token} is not in 0..{self.size - 1}; use one of this model's"
            )

    @contextmanager
    def _open(self) -> Iterator[Any]:
        with self._idle:
            if self._closed:
                raise BackendError("the model was closed; open it again")
            self._users += 1
        try:
            yield self._vocab
        finally:
            with self._idle:
                self._users -= 1
                if self._closed:
                    self._idle.notify_all()
