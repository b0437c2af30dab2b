"""The thread between taps and uploads: takes a tap, asks the predictor, queues what it says.

Nothing it does changes an answer: late, wrong or dead, it costs speed at most. A predictor that raises
is switched off, and `failure` says why.
"""

from __future__ import annotations

import logging
import threading
import time

from speculoe_local.runtime.predict import Predictor, QuasiHidden, Tap
from speculoe_local.runtime.slots import ExpertSlots, TapRoom

__all__ = ["NativeLoop", "Orchestrator"]

_logger = logging.getLogger(__name__)
_CLOSED = -2
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
                n = room.n_used
                guess = self._predictor.predict(
                    Tap(block, room.residual, room.shared, room.ids[:n], room.weights[:n])
                )
                if guess is not None:
                    self._slots.prefetch(guess.block, guess.experts)
                self.predictions += 1
                self.seconds += time.perf_counter() - begin
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            _logger.warning("predictor=%s failed=%s", type(self._predictor).__name__, self.failure)
            self._slots.close_taps()

    def close(self) -> None:
        self._slots.close_taps()
        self._thread.join()
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
