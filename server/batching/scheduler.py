"""One loaded model that answers several requests at once: queue, lanes, fairness, cancellation.

A thread of its own opens nothing and owns everything: all graphs run there, everyone else leaves jobs
and waits for deltas. Knows no dialect and no other model.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from speculoe_local.runtime.errors import SpeculoeError
from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.runtime.opened import Opened
from speculoe_local.runtime.slots import SlotStats
from speculoe_local.server.batching.answers import Answer, Place
from speculoe_local.server.batching.checks import check
from speculoe_local.server.batching.diskcache import DiskCache, Stored
from speculoe_local.server.batching.layers import LayerWatch
from speculoe_local.server.batching.runner import NoRoom, Runner
from speculoe_local.server.batching.sampling import Chooser, make_chooser
from speculoe_local.server.batching.tickets import LiveTicket, Mail
from speculoe_local.server.batching.views import experts_of, info_of, lane_view
from speculoe_local.server.errors import ContextOverflow, QueueFull, ShuttingDown
from speculoe_local.server.jobs import (
    Delta,
    Job,
    LaneView,
    LayerView,
    ModelEntry,
    Snapshot,
    Timings,
)

__all__ = ["Observer", "Scheduler"]

_log = logging.getLogger("speculoe_local.server")
_STORE_S = 1.0  # spent on what rests when the server ends
_WORTH_READING = 64  # tokens that a stored prefix must know beyond what memory holds

_HOW = ("stop", "length", "cancel", "error")
_COUNTED = ("accepted", "prompt", "cached", "predicted", *_HOW)

Observer = Callable[[str, str, Timings], None]


@dataclass(slots=True)
class _Waiting:
    ticket: LiveTicket
    chooser: Chooser | None
    at: float
    stored: Stored | None = None  # on its way from disk


class Scheduler:
    """Fulfils `jobs.Backend`. Close it: that also frees the model."""

    def __init__(
        self,
        opened: Opened,
        entry: ModelEntry,
        *,
        parallel: int,
        queue: int,
        shared: bool = False,
        disk: DiskCache | None = None,
        observe: Observer | None = None,
    ) -> None:
        """`opened` has `sequences_for(parallel, shared)` sequences. `observe` gets the name of each
        answer's model, how it ended (a finish, or "error") and its timings, in the worker's thread."""
        self.vocab: Vocabulary = opened.model.vocab
        self.info = info_of(opened, entry, parallel)
        self._opened = opened
        self._disk = disk
        self._observe = observe
        self._shared = shared
        self._runner = Runner(opened, parallel=parallel, shared=shared, tell=self._tell)
        self._ends = [t for t in range(self.vocab.size) if self.vocab.ends(t)]
        self._limit = queue
        self._lanes: list[Answer | None] = [None] * parallel
        self._before: dict[str, SlotStats] = {}  # expert counters at the start of each answer
        self._mail = Mail()
        self._clock = 0
        self._owed = 0.0  # seconds that answers get before the next prompt's turn
        self._embed_next = False
        self._counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._seconds: Counter[str] = Counter()
        self._kv_tokens = 0
        self._changed = threading.Condition()
        self._inbox: deque[_Waiting] = deque()  # guarded by `_changed`, as is what follows
        self._queue: deque[_Waiting] = deque()  # changed by the worker alone
        self._running: frozenset[LiveTicket] = frozenset()  # those of the batch that runs now
        self._stop = False
        self._freed = False
        self._watch: LayerWatch | None = None
        self.last_used = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def submit(self, job: Job) -> LiveTicket:
        """Raises QueueFull, ContextOverflow, GrammarError, BadRequest or ShuttingDown."""
        check(job, n_vocab=self.vocab.size, n_ctx=self.info.n_ctx)
        self.last_used = time.monotonic()
        ticket = LiveTicket(job, asyncio.get_running_loop(), self._wake)
        chooser = None
        if not job.embeddings:
            chooser = await make_chooser(job, self.vocab, n_ctx=self.info.n_ctx, ends=self._ends)
        try:
            with self._changed:
                if self._stop:
                    raise ShuttingDown
                waiting = len(self._inbox) + len(self._queue)
                if waiting >= self._limit + len(self._free_lanes()):
                    raise QueueFull(waiting, self._retry_after(waiting))
                self._inbox.append(_Waiting(ticket, chooser, time.perf_counter()))
                self._counts["accepted"] += 1
                self._changed.notify()
        except BaseException:
            if chooser is not None:
                chooser.close()
            raise
        return ticket

    def snapshot(self, *, layers: bool = False) -> Snapshot:
        """Any thread."""
        with self._changed:
            lanes = tuple(self._view(i, answer) for i, answer in enumerate(self._lanes))
            queued = len(self._inbox) + len(self._queue)
        counts = Counter(self._counts)
        return Snapshot(
            lanes=lanes,
            queued=queued,
            n_ctx=self.info.n_ctx,
            kv_tokens=self._kv_tokens,
            accepted=counts["accepted"],
            finished={how: counts[how] for how in _HOW},
            prompt_tokens=counts["prompt"],
            cached_tokens=counts["cached"],
            predicted_tokens=counts["predicted"],
            prompt_s=self._seconds["prompt"],
            predicted_s=self._seconds["predicted"],
            slots=self._slot_stats(),
            residency=self.info.residency,
            layers=self._layer_views() if layers else (),
            kv_size=self.info.n_ctx * (1 if self._shared else len(self._lanes)),
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        with self._changed:
            return not (self._inbox or self._queue or any(self._lanes))

    def close(self, timeout: float = 10.0) -> bool:
        """End all answers with ShuttingDown and free the model. False: a graph runs on, nothing was
        freed. Any thread but the worker's; again and again."""
        with self._changed:
            self._stop = True
            self._changed.notify()
            self._interrupt()
            waiting = [w.ticket for w in (*self._inbox, *self._queue)]
            open_ = [a.ticket for a in self._lanes if a is not None] + waiting
        told = Mail()  # now, and not after a graph that may take long
        for ticket in open_:
            told.put(ticket, ShuttingDown())
        told.flush()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- the worker's thread

    def _work(self) -> None:
        try:
            while self._wait():
                try:
                    self._collect()
                    self._admit()
                    self._step()
                except Exception as error:
                    _log.exception("a step failed; what ran is given up")
                    self._give_up(error)
                self._kv_tokens = self._runner.sequences.n_tokens
                self._mail.flush()
        finally:
            self._give_up(ShuttingDown())
            self._mail.flush()
            self._store_resting()
            with self._changed:
                self._freed = True
            self._opened.close()

    def _wait(self) -> bool:
        """Until there is something to do. False: to stop."""
        with self._changed:
            while not (self._stop or self._inbox or any(self._lanes) or self._ready()):
                self._changed.wait()
            return not self._stop

    def _ready(self) -> bool:
        return any(w.ticket.cancelled or w.stored is None or w.stored.done for w in self._queue)

    def _wake(self, ticket: LiveTicket) -> None:
        """A client left. Where it was the only one that waited for the graph that runs, end that."""
        with self._changed:
            self._changed.notify()
            if self._running and all(t.cancelled for t in self._running):
                self._interrupt()

    def _collect(self) -> None:
        """Take what was left in the inbox, and let those go who left."""
        with self._changed:
            fresh = list(self._inbox)
            self._inbox.clear()
            self._queue.extend(fresh)
        for waiting in fresh:
            self._look_on_disk(waiting)
        for waiting in [w for w in self._queue if w.ticket.cancelled]:
            self._leave_queue(waiting)
            self._counts["cancel"] += 1
            if self._observe is not None:
                self._observe(self.info.name, "cancel", Timings())
            self._mail.put(waiting.ticket, Delta(finish="cancel", timings=Timings()))
            if waiting.chooser is not None:
                waiting.chooser.close()
        for answer in [a for a in self._lanes if a is not None and a.ticket.cancelled]:
            self._tell(answer, answer.cancelled())

    def _admit(self) -> None:
        """Give free lanes to those who waited longest and whose prompt has room."""
        for waiting in list(self._queue):
            free = self._free_lanes()
            if not free:
                return
            if waiting.stored is not None and not waiting.stored.done:
                continue
            if not self._fits(waiting):
                return
            self._leave_queue(waiting)
            wish = waiting.ticket.job.slot
            try:
                if self._start(waiting, wish if wish in free else free[0]):
                    return
            except SpeculoeError as error:
                self._mail.put(waiting.ticket, error)

    def _start(self, waiting: _Waiting, lane: int) -> bool:
        """Whether KV was copied: llama.cpp does that at the next batch, before which nothing may be
        written where it copies from or to."""
        job = waiting.ticket.job
        sequences = self._runner.sequences
        reuse = job.cache_prompt and not job.embeddings and not job.echo_logprobs
        if waiting.stored is not None and waiting.stored.state is not None:
            sequences.restore(waiting.stored.tokens, waiting.stored.state)
        number, cached, source = sequences.place(job.tokens, reuse=reuse)
        if source is not None and self._disk is not None and self._disk.wants(job.tokens[:cached]):
            # Two conversations begin alike: what they share will be asked for again.
            self._disk.put(sequences.tokens(source), sequences.state(source))
        answer = Answer(
            waiting.ticket,
            waiting.chooser,
            Place(lane, number, cached),
            vocab=self.vocab,
            n_ctx=self.info.n_ctx,
            queued_at=waiting.at,
            figures=self._figures,
        )
        self._before[waiting.ticket.id] = self._slot_stats()
        with self._changed:
            self._lanes[lane] = answer
        return source is not None

    def _step(self) -> None:
        """One batch: prompts and answers take turns so that answers get at least half of the time."""
        running = [a for a in self._lanes if a is not None and not a.parked]
        embeds = [a for a in running if a.job.embeddings]
        texts = [a for a in running if not a.job.embeddings]
        prompts = [a for a in texts if a.in_prompt or self._runner.behind(a) > 1]
        answers = [a for a in texts if a not in prompts]
        begin = time.perf_counter()
        try:
            if answers and (self._owed > 0 or not (prompts or embeds)):
                chosen = sorted(answers, key=lambda a: a.stepped)[: self._runner.width]
                self._mark(chosen)
                self._runner.run_answers(chosen)
                self._owed -= time.perf_counter() - begin
            elif prompts or embeds:
                if embeds and (self._embed_next or not prompts):
                    self._mark(embeds[:1])
                    self._runner.run_embedding(embeds[0])
                else:
                    chosen = self._runner.next_prompts(prompts)
                    self._mark(chosen)
                    self._runner.run_prompts(chosen)
                self._embed_next = not self._embed_next
                self._owed = time.perf_counter() - begin if answers else 0.0
        except NoRoom:
            self._make_room(running)
        finally:
            with self._changed:
                self._running = frozenset()

    def _mark(self, chosen: list[Answer]) -> None:
        self._clock += 1
        for answer in chosen:
            answer.stepped = self._clock
        with self._changed:
            self._running = frozenset(answer.ticket for answer in chosen)

    def _make_room(self, running: list[Answer]) -> None:
        """The one that came last gives up its KV until another is done."""
        victim = max(running, key=lambda a: a.started)
        if len(running) == 1:
            self._tell(victim, ContextOverflow(len(victim.tokens), self.info.n_ctx))
        else:
            self._runner.park(victim)

    def _fits(self, waiting: _Waiting) -> bool:
        """Whether the prompt has room beside the answers that run; alone it always has."""
        if not self._shared:
            return True
        running = [a for a in self._lanes if a is not None]
        used = sum(len(a.tokens) - a.place.cached for a in running)
        job = waiting.ticket.job
        known = self._runner.sequences.known(job.tokens) if job.cache_prompt else 0
        return not running or used + len(job.tokens) - known < self.info.n_ctx

    def _tell(self, answer: Answer, news: Delta | SpeculoeError) -> None:
        self._mail.put(answer.ticket, news)
        if isinstance(news, SpeculoeError):
            self._end(answer, "error", Timings(), keep=False)
        elif news.finish is not None:
            keep = answer.job.cache_prompt and not answer.job.embeddings
            self._end(answer, news.finish, news.timings or Timings(), keep=keep)

    def _end(self, answer: Answer, how: str, timings: Timings, *, keep: bool) -> None:
        if self._lanes[answer.place.lane] is not answer:
            return
        with self._changed:
            self._lanes[answer.place.lane] = None
        self._runner.sequences.release(answer.place.sequence, keep=keep)
        self._before.pop(answer.ticket.id, None)
        answer.close()
        for other in self._lanes:
            if other is not None:
                other.parked = False
        prompt_s, predicted_s = answer.seconds
        self._counts.update(
            {
                how: 1,
                "prompt": timings.prompt_n,
                "cached": timings.cached_n,
                "predicted": timings.predicted_n,
            }
        )
        self._seconds.update({"prompt": prompt_s, "predicted": predicted_s})
        self.last_used = time.monotonic()
        if self._observe is not None:
            self._observe(self.info.name, how, timings)

    def _give_up(self, error: Exception) -> None:
        """End whatever runs, and with ShuttingDown also what waits."""
        for answer in [a for a in self._lanes if a is not None]:
            self._mail.put(answer.ticket, error)
            self._end(answer, "error", Timings(), keep=isinstance(error, ShuttingDown))
        if isinstance(error, ShuttingDown):
            with self._changed:
                self._queue.extend(self._inbox)
                self._inbox.clear()
            for waiting in list(self._queue):
                self._leave_queue(waiting)
                self._mail.put(waiting.ticket, error)
                if waiting.chooser is not None:
                    waiting.chooser.close()

    def _leave_queue(self, waiting: _Waiting) -> None:
        with self._changed:
            self._queue.remove(waiting)

    def _look_on_disk(self, waiting: _Waiting) -> None:
        """Begin to read what is stored of a prompt where that is much more than memory holds."""
        job = waiting.ticket.job
        if self._disk is None or not job.cache_prompt or job.embeddings or job.echo_logprobs:
            return
        held = self._runner.sequences.known(job.tokens)
        waiting.stored = self._disk.fetch(
            job.tokens, beyond=held + _WORTH_READING, then=self._notify
        )

    def _store_resting(self) -> None:
        """Last used first, as long as nobody has to wait for it."""
        if self._disk is None:
            return
        end = time.monotonic() + _STORE_S
        for number, tokens in self._runner.sequences.resting():
            if time.monotonic() < end and self._disk.wants(tokens):
                self._disk.put(tokens, self._runner.sequences.state(number))
        self._disk.close()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    # --- figures

    def _slot_stats(self) -> SlotStats:
        with self._changed:
            slots = None if self._freed else self._opened.slots
            return slots.stats() if slots is not None else SlotStats()

    def _layer_views(self) -> tuple[LayerView, ...]:
        with self._changed:
            opened = self._opened
            if opened.slots is None or self._freed:
                return ()
            if self._watch is None:
                self._watch = LayerWatch(opened.slots, opened.model_map, opened.placed)
            return self._watch.read()

    def _interrupt(self) -> None:
        """End the graph that runs, if there is one, within one node. With the lock held."""
        if self._opened.slots is not None and not self._freed:
            self._opened.slots.interrupt()

    def _figures(self, answer: Answer) -> Mapping[str, Any]:
        slots = self._opened.slots
        before = self._before.get(answer.ticket.id, SlotStats())
        spent = slots.stats().since(before) if slots is not None else SlotStats()
        return experts_of(self._opened, answer, spent)

    def _view(self, lane: int, answer: Answer | None) -> LaneView:
        held = self._runner.sequences.tokens(answer.place.sequence) if answer else ()
        return lane_view(lane, answer, len(held))

    def _free_lanes(self) -> list[int]:
        return [i for i, answer in enumerate(self._lanes) if answer is None]

    def _retry_after(self, waiting: int) -> int:
        """Seconds until a place in the queue is free, from what answers took so far."""
        done = sum(self._counts[how] for how in ("stop", "length"))
        each = (self._seconds["prompt"] + self._seconds["predicted"]) / done if done else 1.0
        return max(1, min(60, round(each / len(self._lanes))))
