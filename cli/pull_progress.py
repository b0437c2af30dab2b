"""How far a pull is, on standard error: a bar at a terminal, now and then a line elsewhere, or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Final

from speculoe_local.cli.render import note, styles

if TYPE_CHECKING:
    from speculoe_local.hub.pull import Progress

__all__ = ["PullProgress", "Rate", "line"]

_LINE_PERIOD_S: Final = 10.0
_JSON_PERIOD_S: Final = 0.25
_WINDOW_S: Final = 10.0


class Rate:
    """Bytes per second over the last seconds. What was there before the first look does not count."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, now_s: float, done_bytes: int) -> float | None:
        """The rate after `done_bytes` at `now_s`; None until there is something to tell it from."""
        if self._seen and done_bytes < self._seen[-1][1]:
            self._seen.clear()  # begun again
        self._seen.append((now_s, done_bytes))
        while now_s - self._seen[0][0] > _WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        first_s, first = self._seen[0]
        return (done_bytes - first) / (now_s - first_s) if now_s > first_s else None


def line(progress: Progress, rate: float | None) -> str:
    """One line for people, without the model's name."""
    from speculoe_local.runtime.placement import format_bytes

    if progress.phase == "listing":
        return "asking the hub"
    file = f"file {progress.number} of {progress.files}"
    done = f"{format_bytes(progress.done_bytes)} of {format_bytes(progress.total_bytes)}"
    if progress.phase == "waiting":
        return f"{file}: another process is fetching it, {done}"
    if progress.phase == "verifying":
        return f"{file}: verifying, {done}"
    if not rate:
        return f"{file}: {done}"
    left = (progress.total_bytes - progress.done_bytes) / rate
    return f"{file}: {done}, {format_bytes(int(rate))}/s, {_clock(left)} left"


class PullProgress:
    """Takes `Progress` by `update`; a context manager, so that the bar is gone when it ends."""

    def __init__(self, name: str, *, as_json: bool) -> None:
        self._name = name
        self._json = as_json
        self._rate = Rate()
        self._last: tuple[str, int] | None = None
        self._shown_s = time.monotonic()
        self._bar = None if as_json or not styles(sys.stderr) else _Bar(name)

    def update(self, progress: Progress) -> None:
        now = time.monotonic()
        rate = None
        if progress.phase in ("downloading", "waiting"):
            rate = self._rate.update(now, progress.done_bytes)
        if self._bar is not None:
            self._bar.update(progress, rate)
            return
        step = (progress.phase, progress.number)
        fresh = step != self._last
        if self._json:
            whole = progress.done_bytes == progress.total_bytes
            if fresh or whole or now - self._shown_s >= _JSON_PERIOD_S:
                self._show(now, step)
                shown = {**progress.to_json(), "name": self._name}
                if rate:
                    shown["bytes_per_s"] = round(rate)
                    shown["eta_s"] = round((progress.total_bytes - progress.done_bytes) / rate, 1)
                print(json.dumps(shown), file=sys.stderr, flush=True)
        elif now - self._shown_s >= _LINE_PERIOD_S or (fresh and progress.phase == "waiting"):
            self._show(now, step)
            note(f"{self._name}: {line(progress, rate)}")

    def _show(self, now: float, step: tuple[str, int]) -> None:
        self._shown_s, self._last = now, step

    def __enter__(self) -> PullProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Bar:
    def __init__(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._bars = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(stderr=True, highlight=False),
            transient=True,
            refresh_per_second=8,
        )
        self._task = self._bars.add_task(name, total=None, text="")

    def start(self) -> None:
        self._bars.start()

    def update(self, progress: Progress, rate: float | None) -> None:
        self._bars.update(
            self._task,
            total=progress.total_bytes or None,
            completed=progress.done_bytes,
            text=line(progress, rate),
        )

    def stop(self) -> None:
        self._bars.stop()


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
