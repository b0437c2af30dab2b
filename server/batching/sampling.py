"""From a row of logits to a token: sampler chain, grammar and log probabilities of one job.

llama.cpp ends the process where a grammar is fed what it does not allow, so nothing is fed unasked, and a
sleeping grammar is woken here. Knows nothing of sequences, batches or text.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.lib import llama
from speculoe_local.runtime.llama import Context, Vocabulary
from speculoe_local.runtime.options import Sampling
from speculoe_local.runtime.sampler import make_chain
from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar import gbnf
from speculoe_local.server.jobs import Job, TokenLogprob

__all__ = ["Chooser", "Constraint", "logprob_of", "make_chooser", "prompt_logprobs"]

Logits = npt.NDArray[np.float32]
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_ROOT = b"root"


class Constraint:
    """A GBNF grammar that follows an answer. Close it.

    With `triggers` it sleeps until one of these regular expressions is found in the answer so far; the
    grammar then applies from the expression's first group on. Where the text found there does not fit the
    grammar, it sleeps on: what a model writes freely is never an error.
    """

    def __init__(self, grammar: str, triggers: Sequence[str], vocab: Vocabulary) -> None:
        """Raises GrammarError."""
        gbnf.check(grammar)
        self._source = grammar.encode()
        self._vocab = vocab
        self._grammar = self._make()
        self._triggers = [re.compile(text.encode()) for text in triggers]
        self._asleep = bool(self._triggers)
        self._text = bytearray()
        self._one = np.zeros(1, _CANDIDATE)

    @property
    def active(self) -> bool:
        return not self._asleep

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with `token`."""
        if self._asleep:
            return True
        self._one[0] = (token, 0.0, 0.0)
        self.mask(self._one)
        return bool(self._one["logit"][0] > -np.inf)

    def mask(self, candidates: npt.NDArray[np.void]) -> None:
        """Give those of `candidates` (id, logit, p) that are not allowed a logit of -inf."""
        llama.llama_sampler_apply(self._grammar, ctypes.byref(_array_over(candidates)))

    def accept(self, token: int) -> None:
        """The answer goes on with `token`, which it `allows`."""
        if not self._asleep:
            llama.llama_sampler_accept(self._grammar, token)
            return
        self._text += self._vocab.piece(token, special=True)
        for trigger in self._triggers:
            found = trigger.search(self._text)
            if found is not None:
                start = found.start(1) if trigger.groups else found.start()
                self._wake(bytes(self._text[start:]))
                return

    def close(self) -> None:
        handle, self._grammar = self._grammar, None
        if handle:
            llama.llama_sampler_free(handle)

    def _make(self) -> Any:
        handle = llama.llama_sampler_init_grammar(self._vocab.handle, self._source, _ROOT)
        if not handle:
            raise GrammarError("llama.cpp refuses the grammar; see grammars/README.md of llama.cpp")
        return handle

    def _wake(self, text: bytes) -> None:
        """Let the grammar read what was written since the trigger; sleep on where it does not fit."""
        try:
            whole = text.decode()
        except UnicodeDecodeError:
            return  # a character is unfinished: the next token's search finds the trigger again
        self._asleep = False
        for token in self._vocab.tokenize(whole, add_bos=False):
            if not self.allows(token):
                llama.llama_sampler_free(self._grammar)
                self._grammar = self._make()
                self._asleep = True
                self._text.clear()
                return
            llama.llama_sampler_accept(self._grammar, token)


class Chooser:
    """Chooses the tokens of one answer. Close it."""

    def __init__(self, job: Job, vocab: Vocabulary, *, n_ctx: int, ends: Sequence[int]) -> None:
        """`ends` are the tokens that end a generation. Raises GrammarError."""
        bias = dict(job.logit_bias)
        if job.ignore_end:
            bias |= dict.fromkeys(ends, float("-inf"))
        self._constraint = (
            Constraint(job.grammar, job.grammar_triggers, vocab) if job.grammar else None
        )
        self._chain: Any = make_chain(job.sampling, vocab, n_ctx=n_ctx, bias=bias)
        self._window = _window(job.sampling, n_ctx)

    def choose(self, context: Context, row: int) -> int | None:
        """The next token by a row of the last batch; None where the grammar allows none."""
        constraint = self._constraint
        if constraint is None or not constraint.active:
            token: int = llama.llama_sampler_sample(self._chain, context.handle, row)
            if constraint is not None:
                constraint.accept(token)
            return token
        candidates = _candidates(context.logits(row))
        chosen = self._apply(candidates)
        if chosen is None or not constraint.allows(chosen):
            # Few answers come here: to judge one token is much cheaper than to judge them all.
            candidates = _candidates(context.logits(row))
            constraint.mask(candidates)
            chosen = self._apply(candidates[candidates["logit"] > -np.inf])
            if chosen is None or not constraint.allows(chosen):
                return None
        llama.llama_sampler_accept(self._chain, chosen)
        constraint.accept(chosen)
        return chosen

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Let penalties, where there are any, look back into the prompt."""
        for token in tokens[max(0, len(tokens) - self._window) :]:
            llama.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        chain, self._chain = self._chain, None
        if chain:
            llama.llama_sampler_free(chain)
        if self._constraint is not None:
            self._constraint.close()

    def _apply(self, candidates: npt.NDArray[np.void]) -> int | None:
        if not len(candidates):
            return None
        array = _array_over(candidates)
        llama.llama_sampler_apply(self._chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            return None
        return int(array.data[array.selected].id)


async def make_chooser(job: Job, vocab: Vocabulary, *, n_ctx: int, ends: Sequence[int]) -> Chooser:
    """A Chooser, made in a thread where that may take a while. Raises GrammarError."""

    def make() -> Chooser:
        return Chooser(job, vocab, n_ctx=n_ctx, ends=ends)

    if not job.grammar:
        return make()
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close_made)
        raise


def _close_made(making: asyncio.Future[Chooser]) -> None:
    """Whoever wanted it has gone."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()


def logprob_of(
    logits: Logits, token: int, n_top: int, piece: Callable[[int], bytes]
) -> TokenLogprob:
    """The natural log probability of `token` in one row of logits [n_vocab], and the `n_top` likeliest."""
    return _logprob(logits, token, _log_sum(logits), n_top, piece)


def prompt_logprobs(
    logits: Sequence[Logits],
    following: Sequence[int],
    n_top: int,
    piece: Callable[[int], bytes],
) -> list[TokenLogprob]:
    """The same for a prompt: `following[i]` is the token that came behind row i."""
    return [
        _logprob(row, token, _log_sum(row), n_top, piece)
        for row, token in zip(logits, following, strict=True)
    ]


def _window(sampling: Sampling, n_ctx: int) -> int:
    """How many tokens back any sampler looks."""
    found = 0
    if (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (
        1,
        0,
        0,
    ):
        found = n_ctx if sampling.repeat_last_n < 0 else sampling.repeat_last_n
    if sampling.dry_multiplier:
        found = max(found, n_ctx if sampling.dry_last_n < 0 else sampling.dry_last_n)
    return found


def _log_sum(logits: Logits) -> float:
    highest = float(logits.max())
    return highest + float(np.log(np.exp(logits - np.float32(highest), dtype=np.float64).sum()))


def _logprob(
    logits: Logits, token: int, log_sum: float, n_top: int, piece: Callable[[int], bytes]
) -> TokenLogprob:
    top: tuple[tuple[int, bytes, float], ...] = ()
    n = min(n_top, len(logits))
    if n > 0:
        likeliest = np.argpartition(logits, -n)[-n:]
        order = likeliest[np.lexsort((likeliest, -logits[likeliest]))]
        top = tuple((int(t), piece(int(t)), float(logits[t]) - log_sum) for t in order)
    return TokenLogprob(token, piece(token), float(logits[token]) - log_sum, top)


def _candidates(logits: Logits) -> npt.NDArray[np.void]:
    found = np.empty(len(logits), _CANDIDATE)
    found["id"] = np.arange(len(logits), dtype=np.int32)
    found["logit"] = logits
    found["p"] = 0
    return found


def _array_over(candidates: npt.NDArray[np.void]) -> Any:
    return llama.llama_token_data_array(
        data=candidates.ctypes.data_as(ctypes.POINTER(llama.llama_token_data)),
        size=len(candidates),
        selected=-1,
        sorted=False,
    )
