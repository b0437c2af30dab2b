"""From a GGUF path to answers: opens a model by its placement and drives decoding.

    ModelMap -> Placement -> Model (experts left on disk) + ExpertSlots -> Context -> tokens -> text

One engine answers one request at a time; a second one waits. Engines share nothing.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.errors import BackendError, ContextError, SourceError
from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.runtime.opened import Opened, open_model
from speculoe_local.runtime.options import EngineOptions, Message, Sampling
from speculoe_local.runtime.placement import Placement
from speculoe_local.runtime.sampler import Sampler
from speculoe_local.runtime.sidecar import Quality
from speculoe_local.runtime.slots import ExpertSlots, SlotStats
from speculoe_local.runtime.stats import Stats, Tier
from speculoe_local.runtime.template import choose, prewarm, render
from speculoe_local.runtime.text import StopMatcher, Utf8Stream

__all__ = ["Engine", "ModelInfo", "Step"]

FinishReason = Literal["stop", "length", "cancel"]
_ABORTED = 2  # llama_decode's status when the abort callback ended a graph


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was opened. `mode` is exact where all experts are resident, whatever was asked for; `quality`
    is what a lossy one was measured to cost."""

    name: str
    architecture: str
    path: Path
    n_layer: int
    n_expert: int
    n_expert_used: int
    placement: Placement
    template: str | None
    n_ctx: int
    tier: Tier
    mode: str
    quality: Quality | None
    rounded: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer.

    `text` is what may be shown now: whole characters, no part of a stop string. The last step has a
    `finish_reason`; `stats` cover the answer up to here.
    """

    token: int
    text: str
    finish_reason: FinishReason | None
    stats: Stats


class Engine:
    """A model that answers. Use as a context manager, or close it."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._map = opened.model_map
        self._model = opened.model
        self._context = opened.context
        self._slots = opened.slots
        self._orchestrator = opened.orchestrator
        self.predictor = opened.predictor
        self._load_s = opened.load_s
        self._lock = threading.RLock()
        self._interrupted = threading.Event()
        self._past: list[int] = []  # tokens whose KV the context holds
        self._closed = False
        self.info = ModelInfo(
            name=opened.model_map.name,
            architecture=opened.model_map.architecture,
            path=opened.model_map.files[0],
            n_layer=opened.model_map.n_layer,
            n_expert=opened.model_map.n_expert,
            n_expert_used=opened.model_map.n_expert_used,
            placement=opened.placed,
            template=opened.model.chat_template(),
            n_ctx=opened.context.n_ctx,
            tier=opened.tier,
            mode=opened.mode,
            quality=opened.quality,
            rounded=opened.rounded,
        )

    @classmethod
    def open(
        cls,
        path: str | bytes | os.PathLike[str],
        *,
        options: EngineOptions = EngineOptions(),  # noqa: B008  # frozen
        progress: Callable[[float], None] | None = None,
    ) -> Engine:
        """Plan, load and attach. `progress` gets 0..1 while weights are read.

        Raises ModelError, BudgetError, OptionError, SourceError or BackendError.
        """
        prewarm()  # the template process starts while weights are read
        return cls(open_model(path, options=options, progress=progress))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling = Sampling(),  # noqa: B008  # frozen
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        cancel: threading.Event | None = None,
        logits_hash: bool = False,
    ) -> Iterator[Step]:
        """Answer a conversation through the GGUF's own chat template.

        Raises TemplateError, and what `generate` raises.
        """
        vocab = self._model.vocab
        chosen = choose(self.info.template)
        prompt = render(
            chosen.source,
            messages,
            bos=vocab.text_of(vocab.bos),
            eos=vocab.text_of(vocab.eos),
        )
        return self.generate(
            vocab.tokenize(prompt, add_bos=not prompt.startswith(vocab.text_of(vocab.bos) or "\0")),
            sampling=sampling,
            max_tokens=max_tokens,
            stop=[*stop, *chosen.stops],
            cancel=cancel,
            logits_hash=logits_hash,
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling = Sampling(),  # noqa: B008  # frozen
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        cancel: threading.Event | None = None,
        logits_hash: bool = False,
        ignore_end: bool = False,
    ) -> Iterator[Step]:
        """Continue a prompt, token by token.

        `cancel`, set by any thread, ends the answer within one token (one ubatch of a prompt);
        `interrupt()` ends it within one graph node. With `logits_hash` the stats carry the SHA-256
        over the float32 logits of every sampled position. `ignore_end` goes on after the model's own
        end of generation, for measurements of equal length.

        Raises ContextError when the prompt leaves no room, SourceError when expert weights cannot
        be read (the engine stays usable), BackendError when a graph fails.
        """
        tokens = self._model.vocab.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise ContextError("the prompt is empty; give at least one token")
        room = self._context.n_ctx - len(tokens)
        if room < 1:
            raise ContextError(
                f"the prompt has {len(tokens)} tokens, the context holds {self._context.n_ctx}; "
                "shorten it or raise --ctx"
            )
        limit = room if max_tokens is None else min(max_tokens, room)
        return self._answer(
            tokens, sampling, limit, StopMatcher(stop), cancel, logits_hash, ignore_end
        )

    def _answer(
        self,
        tokens: list[int],
        sampling: Sampling,
        limit: int,
        stops: StopMatcher,
        cancel: threading.Event | None,
        logits_hash: bool,
        ignore_end: bool,
    ) -> Iterator[Step]:
        with self._lock, closing(Sampler(sampling, self._model.vocab)) as sampler:
            self._interrupted.clear()
            if self._slots is not None:
                self._slots.reset()
            meter = _Meter(self, len(tokens))
            digest = hashlib.sha256() if logits_hash else None
            characters = Utf8Stream()
            token, count = -1, 0
            finish: FinishReason | None = None
            if not self._prefill(tokens, meter, cancel):
                finish = "cancel"
            while finish is None:
                if digest is not None:
                    digest.update(self._context.logits().tobytes())
                token = sampler.sample(self._context.handle)
                count += 1
                meter.sampled(count, digest)
                text = ""
                if not ignore_end and self._model.vocab.ends(token):
                    finish = "stop"
                else:
                    text = stops.feed(characters.feed(self._model.vocab.piece(token)))
                    if stops.hit is not None:
                        finish = "stop"
                    elif count >= limit:
                        finish = "length"
                    elif _is_set(cancel):
                        finish = "cancel"
                if finish is not None:
                    break
                yield Step(token, text, None, meter.stats())
                if _is_set(cancel) or not self._step(token):
                    finish, text = "cancel", ""
            else:
                text = ""
            if stops.hit is None:
                text += stops.feed(characters.flush()) + stops.flush()
            yield Step(token, text, finish, meter.stats())

    def score(
        self, tokens: Sequence[int], *, prompt: int = 1, cancel: threading.Event | None = None
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Run given tokens as an answer would: `tokens[:prompt]` as a prompt, the others one by one.

        Yields the logits [n_vocab] float32 behind each token from the prompt's last one on,
        `len(tokens) - prompt + 1` rows, fewer once `cancel` is set or `interrupt()` called. A row is a
        view that the next step overwrites. Nothing that the context held before is reused.

        Raises ContextError when the tokens do not fit, and what `generate` raises while running.
        """
        if not 1 <= prompt <= len(tokens):
            raise ContextError(
                f"a prompt of {prompt} of {len(tokens)} tokens; give 1 to all of them"
            )
        if len(tokens) > self._context.n_ctx:
            raise ContextError(
                f"{len(tokens)} tokens to score, the context holds {self._context.n_ctx}; "
                "score fewer or raise --ctx"
            )
        return self._score(list(tokens), prompt, cancel)

    def _score(
        self, tokens: list[int], prompt: int, cancel: threading.Event | None
    ) -> Iterator[npt.NDArray[np.float32]]:
        with self._lock:
            self._interrupted.clear()
            if self._slots is not None:
                self._slots.reset()
            self.forget()
            going = self._prefill(tokens[:prompt], _Meter(self, prompt), cancel)
            for token in tokens[prompt:]:
                if not going:
                    return
                yield self._context.logits()
                going = not _is_set(cancel) and self._step(token)
            if going:
                yield self._context.logits()

    def _prefill(self, tokens: list[int], meter: _Meter, cancel: threading.Event | None) -> bool:
        """Run the prompt from where it departs from what the context holds. False: cancelled."""
        keep = _common(self._past, tokens[:-1])
        if keep < len(self._past):
            if self._context.forget(keep):
                del self._past[keep:]
            else:  # a recurrent state cannot go back
                self._context.clear()
                self._past.clear()
        start = len(self._past)
        meter.cached_tokens = start
        self._opened.speculate(False)
        size = self._context.n_batch
        for at in range(start, len(tokens), size):
            if _is_set(cancel):
                return False
            if not self._run(tokens[at : at + size], logits=at + size >= len(tokens)):
                return False
        return True

    def _step(self, token: int) -> bool:
        """One token of an answer. False: interrupted."""
        self._opened.speculate(True)
        return self._run([token])

    def _run(self, tokens: list[int], *, logits: bool = True) -> bool:
        """One llama_decode at the end of the timeline. False: interrupted."""
        if self._interrupted.is_set():
            return False
        status = self._context.decode(tokens, len(self._past), logits=logits)
        if status == 0:
            self._past += tokens
            return True
        # What ran of this batch must not stay: the next request continues from `_past`.
        if not self._context.forget(len(self._past)):
            self._context.clear()
            self._past.clear()
        reason = self._slots.reset() if self._slots is not None else ""
        if reason and not self._context.fault:
            raise SourceError(reason)
        if status == _ABORTED and self._interrupted.is_set():
            return False
        raise BackendError(
            self._context.fault
            or f"llama_decode failed with status {status} at {len(self._past)} tokens"
        )

    def forget(self) -> None:
        """Drop the context's KV, so that the next prompt is run whole."""
        with self._lock:
            self._context.clear()
            self._past.clear()

    def interrupt(self) -> None:
        """End the running answer within one graph node. Any thread; harmless when none runs."""
        self._interrupted.set()
        if self._slots is not None and not self._closed:
            self._slots.interrupt()

    def slot_stats(self) -> SlotStats:
        """Counters of the expert slots since opening; zeros where all experts are resident."""
        return self._slots.stats() if self._slots is not None else SlotStats()

    @property
    def vocab(self) -> Vocabulary:
        """The model's own tokenizer; not usable after `close`."""
        return self._model.vocab

    @property
    def slots(self) -> ExpertSlots | None:
        """The expert slots, for tools that look inside; None where all experts are resident."""
        return self._slots

    @property
    def prediction_seconds(self) -> float:
        """Mean time of one prediction with its queueing; 0 before the first."""
        by = self._orchestrator
        return by.seconds / by.predictions if by is not None and by.predictions else 0.0

    def check(self) -> None:
        """Raises BackendError when a slot table breaks an invariant. For tests and idle time."""
        if self._slots is not None:
            self._slots.check()

    def close(self) -> None:
        """Frees everything, in order. A running answer is interrupted and waited for."""
        self.interrupt()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._opened.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Meter:
    """The clock and counters of one answer."""

    def __init__(self, engine: Engine, prompt_tokens: int) -> None:
        self._engine = engine
        self._begin = self._first = self._last = time.perf_counter()
        self._before = engine.slot_stats()
        self._base = Stats(
            prompt_tokens=prompt_tokens,
            cached_tokens=0,
            completion_tokens=0,
            load_s=engine._load_s,
            ttft_s=0.0,
            decode_s=0.0,
            tier=engine.info.tier,
            budget_bytes=engine.info.placement.used_bytes,
            n_slots=engine.info.placement.slots,
            residency=engine.info.placement.residency,
            predictor=engine.predictor,
            mode=engine.info.mode,
            kl=engine.info.quality.kl if engine.info.quality else None,
            top1=engine.info.quality.top1 if engine.info.quality else None,
            rounded=engine.info.rounded,
            experts_per_token=sum(layer.n_expert_used for layer in engine._map.layers),
        )
        self.cached_tokens = 0
        self._count = 0
        self._digest: hashlib._Hash | None = None

    def sampled(self, count: int, digest: hashlib._Hash | None) -> None:
        self._last = time.perf_counter()
        if count == 1:
            self._first = self._last
        self._count = count
        self._digest = digest

    def stats(self) -> Stats:
        return replace(
            self._base,
            cached_tokens=self.cached_tokens,
            completion_tokens=self._count,
            ttft_s=self._first - self._begin,
            decode_s=self._last - self._first,
            slots=self._engine.slot_stats().since(self._before)
            if self._engine.slots is not None
            else self._before,
            logits_sha256=self._digest.hexdigest() if self._digest is not None else None,
        )


def _is_set(cancel: threading.Event | None) -> bool:
    return cancel is not None and cancel.is_set()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
