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
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from speculoe_local.runtime import machine, placement
from speculoe_local.runtime.errors import (
    BackendError,
    ContextError,
    OptionError,
    SourceError,
)
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.options import EngineOptions, Message, Sampling, parse_link
from speculoe_local.runtime.orchestrator import NativeLoop, Orchestrator
from speculoe_local.runtime.placement import Placement
from speculoe_local.runtime.predict import Predictor, QuasiHidden, default_name, make_predictor
from speculoe_local.runtime.sampler import Sampler
from speculoe_local.runtime.sidecar import Sidecar, sidecar_path
from speculoe_local.runtime.slots import ExpertSlots, SlotStats
from speculoe_local.runtime.stats import Stats, Tier
from speculoe_local.runtime.template import choose, prewarm, render
from speculoe_local.runtime.text import StopMatcher, Utf8Stream

__all__ = ["Engine", "ModelInfo", "Step"]

FinishReason = Literal["stop", "length", "cancel"]
_ABORTED = 2  # llama_decode's status when the abort callback ended a graph


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was opened."""

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

    def __init__(
        self,
        model_map: ModelMap,
        placed: Placement,
        model: Model,
        context: Context,
        slots: ExpertSlots | None,
        orchestrator: Orchestrator | NativeLoop | None,
        predictor: str,
        tier: Tier,
        load_s: float,
    ) -> None:
        self._map = model_map
        self._model = model
        self._context = context
        self._slots = slots
        self._orchestrator = orchestrator
        self.predictor = predictor
        self._load_s = load_s
        self._lock = threading.RLock()
        self._interrupted = threading.Event()
        self._past: list[int] = []  # tokens whose KV the context holds
        self._closed = False
        self.info = ModelInfo(
            name=model_map.name,
            architecture=model_map.architecture,
            path=model_map.files[0],
            n_layer=model_map.n_layer,
            n_expert=model_map.n_expert,
            n_expert_used=model_map.n_expert_used,
            placement=placed,
            template=model.chat_template(),
            n_ctx=context.n_ctx,
            tier=tier,
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
        begin = time.perf_counter()
        prewarm()  # the template process starts while weights are read
        found = ModelMap.read(path)
        host = machine.look()
        budget = placement.parse_budget(options.expert_budget)
        if options.buffers == "two-layer":
            placed = placement.two_layers(found)
        else:
            placed = placement.plan(found, budget, available_bytes=host.available_bytes)
        slotted = placed.kind == "slotted"
        sidecar = _sidecar(options, found)
        if options.link and not slotted:
            raise OptionError(
                f"--link {options.link} models uploads, but all experts are resident; lower --expert-budget"
            )
        with ExitStack() as undo:
            model = undo.enter_context(
                closing(
                    Model(
                        found.files[0],
                        lazy_experts=slotted,
                        repack=options.repack,
                        progress=progress,
                    )
                )
            )
            slots = None
            if slotted:
                slots = ExpertSlots(
                    found,
                    placed,
                    source=_source(options, found, host),
                    policy=options.policy,
                    upload_threads=options.upload_threads,
                    forget=options.buffers == "two-layer",
                    repack=options.repack,
                    link=parse_link(options.link) if options.link else None,
                )
                undo.callback(slots.close)
            context = Context(
                model,
                Shape(
                    n_ctx=options.ctx,
                    n_batch=options.batch,
                    n_ubatch=options.ubatch,
                    n_threads=options.threads or host.cores,
                ),
            )
            orchestrator: Orchestrator | NativeLoop | None = None
            if slots is not None:
                slots.attach(context.handle)
                predictor = make_predictor(options.predict, found, sidecar)
                if predictor is not None:
                    orchestrator = _loop(options, slots, predictor, found)
            undo.pop_all()
        tier: Tier = "resident" if not slotted else "link" if options.link else "disk-ram"
        load_s = time.perf_counter() - begin
        predictor_name = options.predict or default_name(sidecar) if orchestrator else "none"
        return cls(found, placed, model, context, slots, orchestrator, predictor_name, tier, load_s)

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
        with self._lock, closing(Sampler(sampling)) as sampler:
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
                if _is_set(cancel) or not self._run([token]):
                    finish, text = "cancel", ""
            else:
                text = ""
            if stops.hit is None:
                text += stops.feed(characters.flush()) + stops.flush()
            yield Step(token, text, finish, meter.stats())

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
        size = self._context.n_batch
        for at in range(start, len(tokens), size):
            if _is_set(cancel):
                return False
            if not self._run(tokens[at : at + size], logits=at + size >= len(tokens)):
                return False
        return True

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
        if reason:
            raise SourceError(reason)
        if status == _ABORTED and self._interrupted.is_set():
            return False
        raise BackendError(f"llama_decode failed with status {status} at {len(self._past)} tokens")

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
            if self._orchestrator is not None:
                self._orchestrator.close()
            if self._slots is not None:
                self._slots.detach(self._context.handle)
            self._context.close()
            if self._slots is not None:
                self._slots.close()
            self._model.close()

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
            slots=self._engine.slot_stats().since(self._before),
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


def _loop(
    options: EngineOptions, slots: ExpertSlots, predictor: Predictor, model: ModelMap
) -> Orchestrator | NativeLoop:
    if options.loop == "python":
        most_used = max(layer.n_expert_used for layer in model.layers)
        return Orchestrator(slots, predictor, model.n_embd, most_used)
    if not isinstance(predictor, QuasiHidden):
        raise OptionError(f"--predict {options.predict} has no native loop; use the Python loop")
    return NativeLoop(slots, predictor, model.n_embd)


def _sidecar(options: EngineOptions, model: ModelMap) -> Sidecar | None:
    """The one that was named, or the one that lies beside the model. A damaged or foreign one is
    refused either way: to ignore it silently would be to answer with other figures than asked for."""
    path = options.sidecar or sidecar_path(model.files[0])
    return Sidecar.read(path, model) if options.sidecar or path.exists() else None


def _source(options: EngineOptions, model: ModelMap, host: machine.Machine) -> str:
    """How to read experts: through the page cache while it can hold them, around it otherwise."""
    if options.source != "auto":
        return options.source
    return "buffered" if model.total_bytes <= host.available_bytes else "direct"
