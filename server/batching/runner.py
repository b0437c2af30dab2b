"""Runs steps: one batch of prompts, of answers, or of an embedding, and what each row comes to.

Owns the opened model and its sequences. For the worker thread alone; knows nothing of queues or loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speculoe_local.runtime.errors import BackendError, SourceError, SpeculoeError
from speculoe_local.runtime.lib import llama
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.opened import Opened
from speculoe_local.server.batching.answers import Answer, Pooling
from speculoe_local.server.batching.batches import decode_width, output_rows, share
from speculoe_local.server.batching.sequences import Sequences
from speculoe_local.server.jobs import Delta

__all__ = ["NoRoom", "Runner", "sequences_for"]

_NO_ROOM = 1  # llama_decode's status when the KV has no cells left
_ABORTED = 2  # when the abort callback ended a graph

_WORTH_COPYING = 64  # tokens; a copy between contexts moves all of one

_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "first", 3: "last"}  # llama_pooling_type

Tell = Callable[[Answer, Delta | SpeculoeError], None]


def _pooling(model: ModelMap) -> Pooling:
    """Which hidden states stand for a text: what the header says, the mean of all where it says nothing."""
    found = model.metadata.get(f"{model.architecture}.pooling_type")
    return _POOLINGS.get(found, "mean") if isinstance(found, int) else "mean"


def sequences_for(parallel: int, *, shared: bool) -> int:
    """Sequences of a context for `parallel` answers; where they share it, as many again rest as a cache."""
    return 2 * parallel if shared else parallel


class NoRoom(Exception):
    """The KV is full of answers that run: one must give up its part."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one answer runs in a batch; `outputs`: logits of all its tokens, else of the last or none."""

    answer: Answer
    held: int  # tokens of it that were run before
    tokens: list[int]
    outputs: bool
    last: bool


class Runner:
    """`tell` gets what became known of an answer: a delta, or the error that ends it."""

    def __init__(self, opened: Opened, *, parallel: int, shared: bool, tell: Tell) -> None:
        self.opened = opened
        self.context = opened.context
        handle = opened.model.handle
        recurrent = llama.llama_model_is_recurrent(handle) or llama.llama_model_is_hybrid(handle)
        self.sequences = Sequences(
            opened.context,
            sequences_for(parallel, shared=shared),
            whole_only=bool(recurrent),
            worth_copying=1 if shared else _WORTH_COPYING,
        )
        self.width = decode_width(opened.model_map, opened.placed, parallel)
        self._rows = output_rows(opened.context.n_vocab)
        self._tell = tell
        self._shared = shared
        self._pooling = _pooling(opened.model_map)

    def behind(self, answer: Answer) -> int:
        """Tokens of `answer` that its sequence does not hold yet."""
        return len(answer.tokens) - len(self.sequences.tokens(answer.place.sequence))

    def next_prompts(self, answers: Sequence[Answer]) -> list[Answer]:
        """Whose prompts the next batch takes. How a prompt is cut into batches decides about rounding: so
        each runs alone, as it would if nobody else asked. Sharing a context gives that up anyway."""
        if self._shared:
            return list(answers)
        return [min(answers, key=lambda answer: (answer.stepped, self.behind(answer)))]

    def run_prompts(self, answers: Sequence[Answer]) -> None:
        """One ubatch of `next_prompts`. Raises NoRoom, with nothing run."""
        self.opened.speculate(False)
        waiting = [self._wanted(answer) for answer in answers]
        parts = []
        for answer, n in zip(answers, share(waiting, self.context.n_ubatch), strict=True):
            if n:
                held = len(self.sequences.tokens(answer.place.sequence))
                tokens = answer.tokens[held : held + n]
                ends = held + n == len(answer.tokens)
                outputs = answer.job.echo_logprobs and answer.in_prompt
                parts.append(_Part(answer, held, tokens, outputs, ends and answer.needs_logits))
        self._run(parts, self._read_prompt)

    def run_answers(self, answers: Sequence[Answer]) -> None:
        """One token of each, at most `width` of them. Raises NoRoom, with nothing run."""
        self.opened.speculate(True)
        # llama.cpp runs neighbours of rising number together, and any others one graph after the other.
        parts = [
            _Part(answer, len(answer.tokens) - 1, answer.tokens[-1:], False, True)
            for answer in sorted(answers, key=lambda answer: answer.place.sequence)
        ]
        self._run(
            parts, lambda part, row: self._tell(part.answer, part.answer.step(self.context, row))
        )

    def run_embedding(self, answer: Answer) -> None:
        """The next tokens of a prompt that is to be embedded. Raises NoRoom, with nothing run."""
        self.opened.speculate(False)
        n = min(self.behind(answer), self.context.n_ubatch, self._rows)
        held = len(self.sequences.tokens(answer.place.sequence))
        self.context.set_embeddings(True)
        try:
            part = _Part(answer, held, answer.tokens[held : held + n], True, True)
            self._run([part], self._read_hidden)
        finally:
            self.context.set_embeddings(False)

    def park(self, answer: Answer) -> None:
        """Take an answer's KV; it starts anew once there is room."""
        self.sequences.drop(answer.place.sequence)
        answer.parked = True

    def _wanted(self, answer: Answer) -> int:
        behind = self.behind(answer)
        return min(behind, self._rows) if answer.job.echo_logprobs else behind

    def _read_prompt(self, part: _Part, row: int) -> None:
        """`row` is the part's last row in the batch."""
        answer, n = part.answer, len(part.tokens)
        held = len(self.sequences.tokens(answer.place.sequence))
        if part.outputs:
            answer.read_prompt(self.context, held - n, n, row - n + 1)
        if part.last:
            self._tell(answer, answer.step(self.context, row))
        elif held == len(answer.tokens):
            self._tell(answer, answer.end_prompt())
        else:
            self._tell(answer, answer.progress(held))

    def _read_hidden(self, part: _Part, row: int) -> None:
        answer = part.answer
        answer.read_hidden(self.context, len(part.tokens), self._pooling)
        held = len(self.sequences.tokens(answer.place.sequence))
        done = held == len(answer.tokens)
        self._tell(answer, answer.embed() if done else answer.progress(held))

    def _run(self, parts: list[_Part], read: Callable[[_Part, int], None]) -> None:
        """Run a batch and `read` each part. Where it fails, each part alone decides its own fate."""
        status = self._decode(parts)
        if status == 0:
            for part in parts:
                self.sequences.extend(part.answer.place.sequence, part.tokens)
            row = -1
            for part in parts:
                row += len(part.tokens)
                self._read(part, row, read)
            return
        if status == _NO_ROOM:
            raise NoRoom
        for part in parts:
            self.sequences.truncate(part.answer.place.sequence)
        reason = self.opened.slots.reset() if self.opened.slots is not None else ""
        if status == _ABORTED and not reason:
            return  # interrupted because nobody waits for it, or for one of them: the next step goes on
        if len(parts) > 1:
            for part in parts:
                if self.sequences.truncate(part.answer.place.sequence) == part.held:
                    self._run([part], read)
            return
        error = (
            SourceError(reason)
            if reason and not self.context.fault
            else BackendError(
                self.context.fault
                or f"llama_decode failed with status {status}; see the server's log"
            )
        )
        self._tell(parts[0].answer, error)

    def _read(self, part: _Part, row: int, read: Callable[[_Part, int], None]) -> None:
        try:
            read(part, row)
        except SpeculoeError as error:
            self._tell(part.answer, error)

    def _decode(self, parts: list[_Part]) -> int:
        """llama_decode's status, after resting sequences have made room."""
        rows: list[tuple[int, int, int, bool]] = []
        for part in parts:
            number = part.answer.place.sequence
            final = len(part.tokens) - 1
            rows += [
                (token, part.held + i, number, part.outputs or (part.last and i == final))
                for i, token in enumerate(part.tokens)
            ]
        while (status := self.context.decode_rows(rows)) == _NO_ROOM:
            if not self.sequences.evict():
                break
        return status
