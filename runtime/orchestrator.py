"""The thread between taps and uploads: takes a tap, asks the predictor, queues what it says.

Nothing it does changes an answer: late, wrong or dead, it costs speed at most. A predictor that raises
is switched off, and `failure` says why.
"""

from __future__ import annotations

import logging
import threading
import time

from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.predict import Predictor, QuasiHidden, Tap
from speculoe_local.runtime.slots import ExpertSlots, Steps, TapRoom

__all__ = ["NativeLoop", "Orchestrator"]

_logger = logging.getLogger(__name__)
_CLOSED = -2
_NOT_FINITE = -2  # of ExpertSlots.take
_WAIT_MS = 1000  # a thread that waits costs nothing; this only bounds how long a lost wake-up hurts


class Orchestrator:
    """Runs from its making until `close`, which must come before the slots are closed."""

    def __init__(self, slots: ExpertSlots, predictor: Predictor, n_embd: int, n_used: int) -> None:
        self._slots = slots
        self._predictor = predictor
        self._room = TapRoom(n_embd, n_used)
        self.failure: str | None = None
        self.predictions = 0
        self.seconds = 0.0  # spent predicting and queueing
        # What ships is one foreign call per tap; a predictor of one's own is asked in Python.
        self._steps = (
            Steps(predictor.loop_gates(), n_embd) if isinstance(predictor, QuasiHidden) else None
        )
        slots.open_taps(n_embd)
        self._thread = threading.Thread(target=self._run, name="orchestrator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        room = self._room
        try:
            while (block := self._slots.next_tap(room, _WAIT_MS)) != _CLOSED:
                if block < 0:
                    continue
                begin = time.perf_counter()
                if self._steps is not None:
                    self._take(self._steps, block)
                else:
                    self._ask(block)
                self.predictions += 1
                self.seconds += time.perf_counter() - begin
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            _logger.warning("predictor=%s failed=%s", type(self._predictor).__name__, self.failure)
            self._slots.close_taps()

    def _take(self, steps: Steps, block: int) -> None:
        if self._slots.take(steps, block, self._room) == _NOT_FINITE:
            raise ModelError(f"logits predicted from layer {block} are not finite")

    def _ask(self, block: int) -> None:
        room = self._room
        n = room.n_used
        guess = self._predictor.predict(
            Tap(block, room.residual, room.shared, room.ids[:n], room.weights[:n])
        )
        if guess is not None:
            self._slots.prefetch(guess.block, guess.experts)

    def close(self) -> None:
        self._slots.close_taps()
        self._thread.join()
        if self._steps is not None:
            self._steps.close()
        self._predictor.close()


class NativeLoop:
    """The same loop in a thread of the library, to compare with. Quasi-hidden prediction only."""

    failure: str | None = None
    predictions = 0  # the library does not count
    seconds = 0.0

    def __init__(self, slots: ExpertSlots, predictor: QuasiHidden, n_embd: int) -> None:
        self._slots = slots
        self._predictor = predictor  # owns what the library borrows
        slots.start_loop(predictor.loop_gates(), n_embd)

    def close(self) -> None:
        self._slots.stop_loop()
        self._predictor.close()
