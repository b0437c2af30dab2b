"""One answer in progress: its tokens, its text, its clock. For the worker thread alone.

Turns rows of logits into deltas. Knows nothing of batches, queues or other answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.llama import Context, Vocabulary
from speculoe_local.runtime.text import StopMatcher, Utf8Stream
from speculoe_local.server.batching.sampling import Chooser, logprob_of, prompt_logprobs
from speculoe_local.server.batching.tickets import LiveTicket
from speculoe_local.server.jobs import Delta, Finish, Timings, TokenLogprob

__all__ = ["Answer", "Place", "Pooling"]

Pooling = Literal["mean", "first", "last"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an answer runs: its lane, its sequence, and how many tokens that held at the start."""

    lane: int
    sequence: int
    cached: int


class Answer:
    """A job that runs. `chooser` is None for embeddings. Close it."""

    def __init__(
        self,
        ticket: LiveTicket,
        chooser: Chooser | None,
        place: Place,
        *,
        vocab: Vocabulary,
        n_ctx: int,
        queued_at: float,
        figures: Callable[[Answer], Mapping[str, Any]],
    ) -> None:
        """`figures` gives the expert figures of `timings` when the answer ends."""
        job = ticket.job
        self.ticket = ticket
        self.job = job
        self.place = place
        self.tokens = list(job.tokens)
        self.parked = False  # lost its KV to others, waits until one of them is done
        self.stepped = 0  # the scheduler's clock when it last ran
        self.n_prompt = len(job.tokens)
        self.n_predicted = 0
        self.started = time.perf_counter()
        self._chooser = chooser
        self._vocab = vocab
        self._limit = _limit(job.max_tokens, n_ctx - self.n_prompt)
        self._queue_s = self.started - queued_at
        self._first = self._last = self.started
        self._figures = figures
        self._characters = Utf8Stream()
        self._stops = StopMatcher(job.stop)
        self._prompt_logprobs: list[TokenLogprob | None] = [None] if job.echo_logprobs else []
        self._hidden: npt.NDArray[np.float64] | None = None  # what comes of the rows read so far

    @property
    def in_prompt(self) -> bool:
        """Whether no token of the answer exists yet."""
        return self.n_predicted == 0

    @property
    def needs_logits(self) -> bool:
        return self._limit > 0

    def progress(self, held: int) -> Delta:
        """`held` tokens of the prompt are done."""
        return Delta(prompt_done=min(held / self.n_prompt, 1.0), lane=self.place.lane)

    def read_prompt(self, context: Context, at: int, n: int, row: int) -> None:
        """Rows `row` to `row + n` of the batch were the prompt's tokens from `at` on; all have logits."""
        known = min(n, self.n_prompt - 1 - at)
        self._prompt_logprobs += prompt_logprobs(
            [context.logits(row + i) for i in range(known)],
            self.tokens[at + 1 : at + 1 + known],
            self.job.top_logprobs or 0,
            self._piece,
        )

    def read_hidden(self, context: Context, n: int, pooling: Pooling) -> None:
        """The batch's `n` rows were tokens of the prompt; all have hidden states."""
        if pooling == "last":
            self._hidden = context.embedding(n - 1).astype(np.float64)
        elif pooling == "first":
            if self._hidden is None:
                self._hidden = context.embedding(0).astype(np.float64)
        else:
            total = np.zeros(context.n_embd, np.float64)
            for row in range(n):
                total += context.embedding(row)
            self._hidden = total if self._hidden is None else self._hidden + total

    def embed(self) -> Delta:
        """The whole prompt is read: what came of its hidden states, of unit length."""
        assert self._hidden is not None
        self._tick()
        length = float(np.linalg.norm(self._hidden))
        found = self._hidden / length if length else self._hidden
        return Delta(
            finish="stop",
            timings=self._timings(last=True),
            embedding=found.astype(np.float32),
            lane=self.place.lane,
        )

    def end_prompt(self) -> Delta:
        """The prompt is run and nothing was asked for beyond it."""
        self._tick()
        return self._delta((), (), "", "length")

    def step(self, context: Context, row: int) -> Delta:
        """The next token, by a row of the last batch. Its delta has a `finish` when it was the last."""
        assert self._chooser is not None
        if self.in_prompt:
            self._chooser.accept_prompt(self.tokens[: self.n_prompt])
        token = self._chooser.choose(context, row)
        self.n_predicted += 1
        self._tick()
        if token is None:
            return self._delta((), (), "", "stop")
        logprobs: tuple[TokenLogprob, ...] = ()
        if self.job.top_logprobs is not None:
            logprobs = (logprob_of(context.logits(row), token, self.job.top_logprobs, self._piece),)
        if not self.job.ignore_end and self._vocab.ends(token):
            # Who asks for a prompt's scores and one token drops the last score: there must be one for an end, too.
            return self._delta((), logprobs if self.job.echo_logprobs else (), "", "stop")
        self.tokens.append(token)
        piece = self._vocab.piece(token, special=self.job.special)
        text = self._stops.feed(self._characters.feed(piece))
        return self._delta((token,), logprobs, text, self._finish())

    def cancelled(self) -> Delta:
        """The client left."""
        return self._delta((), (), "", "cancel")

    def close(self) -> None:
        if self._chooser is not None:
            self._chooser.close()

    def _finish(self) -> Finish | None:
        if self._stops.hit is not None:
            return "stop"
        late = self.job.max_ms is not None and (self._last - self._first) * 1e3 >= self.job.max_ms
        return "length" if late or self.n_predicted >= self._limit else None

    def _delta(
        self,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        text: str,
        finish: Finish | None,
    ) -> Delta:
        if finish is not None and self._stops.hit is None:
            text += self._stops.feed(self._characters.flush()) + self._stops.flush()
            if self._stops.hit is not None:
                finish = "stop"
        echoed, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return Delta(
            text=text,
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            stop_hit=self._stops.hit,
            timings=self._timings(last=finish is not None),
            prompt_logprobs=echoed,
            lane=self.place.lane,
        )

    def _tick(self) -> None:
        self._last = time.perf_counter()
        if self.n_predicted <= 1:
            self._first = self._last

    def _timings(self, *, last: bool) -> Timings:
        return Timings(
            prompt_n=self.n_prompt - self.place.cached,
            cached_n=self.place.cached,
            prompt_ms=(self._first - self.started) * 1e3,
            predicted_n=self.n_predicted,
            predicted_ms=(self._last - self._first) * 1e3,
            queue_ms=self._queue_s * 1e3,
            experts=self._figures(self) if last else {},
        )

    @property
    def seconds(self) -> tuple[float, float]:
        """Time from the start to the first token, and from there to the last."""
        return self._first - self.started, self._last - self._first

    def _piece(self, token: int) -> bytes:
        return self._vocab.piece(token, special=True)


def _limit(asked: int | None, room: int) -> int:
    return room if asked is None or asked < 0 else min(asked, room)
