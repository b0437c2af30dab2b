"""A timeline of one answer: compute, stalls, uploads and predictions, in the Chrome trace format.

The format is the JSON object of complete events ("ph": "X", microseconds) that Perfetto and Chrome's
tracing page open. `as_svg` draws the same for a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculoe_local.runtime import native
from speculoe_local.runtime.engine import Engine
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.options import Message, Sampling

__all__ = ["Event", "Trace", "as_chrome", "as_svg", "excerpt", "record"]

_CAPACITY = 1 << 20
# Track, colour and what a span of the kind is called; by spo_span_kind.
_KINDS = (
    ("compute", "#4c78a8", "layer {block}"),
    ("stalls", "#bab0ac", "waits for layer {block}"),
    ("uploads: demand", "#e45756", "layer {block}, expert {expert}"),
    ("uploads: predicted", "#54a24b", "layer {block}, expert {expert}"),
    ("uploads: prompt", "#f58518", "layer {block}, expert {expert} ..."),
    ("predictions", "#b279a2", "layer {block}"),
    ("misses on the CPU", "#72b7b2", "layer {block}"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """One span, in microseconds since the first."""

    track: str
    name: str
    begin_us: float
    end_us: float
    block: int
    expert: int


@dataclass(frozen=True, slots=True)
class Trace:
    """`overlap`: share of predicted upload time that lies under compute."""

    events: tuple[Event, ...]
    text: str

    @property
    def overlap(self) -> float:
        compute = [(e.begin_us, e.end_us) for e in self.events if e.track == "compute"]
        predicted = [e for e in self.events if e.track == "uploads: predicted"]
        total = sum(e.end_us - e.begin_us for e in predicted)
        under = sum(_covered(e.begin_us, e.end_us, compute) for e in predicted)
        return under / total if total else 0.0


def record(engine: Engine, question: str, *, max_tokens: int) -> Trace:
    """Answer `question` and keep what happened.

    Raises OptionError where all experts are resident: there is nothing to see.
    """
    if engine.slots is None:
        raise OptionError("all experts are resident, so nothing is uploaded; lower --expert-budget")
    engine.slots.start_trace(_CAPACITY)
    steps = engine.chat(
        [Message("user", question)], sampling=Sampling(temp=0), max_tokens=max_tokens
    )
    text = "".join(step.text for step in steps)
    spans = engine.slots.take_trace(_CAPACITY)
    engine.slots.start_trace(0)
    return Trace(tuple(_events(spans)), text)


def _events(spans: Sequence[native.Span]) -> list[Event]:
    first = min((span.begin_ns for span in spans), default=0)
    events = []
    for span in sorted(spans, key=lambda s: s.begin_ns):
        track, _, name = _KINDS[span.kind]
        events.append(
            Event(
                track,
                name.format(block=span.block, expert=span.expert),
                (span.begin_ns - first) / 1e3,
                (span.end_ns - first) / 1e3,
                span.block,
                span.expert,
            )
        )
    return events


def as_chrome(trace: Trace) -> dict[str, Any]:
    """The JSON object that a trace viewer opens."""
    tracks = [track for track, _, _ in _KINDS]
    named = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}}
        for tid, track in enumerate(tracks)
    ]
    spans = [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.track,
            "pid": 1,
            "tid": tracks.index(event.track),
            "ts": round(event.begin_us, 3),
            "dur": round(event.end_us - event.begin_us, 3),
            "args": {"layer": event.block, "expert": event.expert},
        }
        for event in trace.events
    ]
    process = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "speculoe-local"}}
    return {"traceEvents": [process, *named, *spans], "displayTimeUnit": "ms"}


def as_svg(trace: Trace, begin_us: float, end_us: float, width: int = 960) -> str:
    """The part of a trace between two times, one row per track."""
    row, left = 26, 130
    scale = (width - left - 10) / (end_us - begin_us)
    shown = [e for e in trace.events if e.end_us > begin_us and e.begin_us < end_us]
    tracks = [kind for kind in _KINDS if any(e.track == kind[0] for e in shown)]
    height = row * len(tracks) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, (track, colour, _) in enumerate(tracks):
        y = 8 + row * number
        parts.append(f'<text x="6" y="{y + 14}">{track}</text>')
        for event in shown:
            if event.track == track:
                x = left + max(0.0, event.begin_us - begin_us) * scale
                span = min(event.end_us, end_us) - max(event.begin_us, begin_us)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(0.5, span * scale - 0.3):.1f}" '
                    f'height="{row - 8}" fill="{colour}"><title>{event.name}</title></rect>'
                )
    y = 8 + row * len(tracks)
    parts.append(f'<line x1="{left}" y1="{y}" x2="{width - 10}" y2="{y}" stroke="black"/>')
    for tick in range(5):
        x = left + (width - left - 10) * tick / 4
        parts.append(
            f'<text x="{x:.0f}" y="{y + 16}" text-anchor="{"end" if tick == 4 else "middle"}">'
            f"{(end_us - begin_us) * tick / 4000:.2f} ms</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def excerpt(trace: Trace, layers: int = 6) -> tuple[float, float]:
    """Begin and end, in microseconds, of a typical run of consecutive layers while decoding."""
    compute = [event for event in trace.events if event.track == "compute"]
    runs = [
        (compute[i].begin_us, compute[i + layers - 1].end_us)
        for i in range(len(compute) - layers + 1)
        if compute[i + layers - 1].block - compute[i].block == layers - 1
    ]
    if not runs:
        return 0.0, max((event.end_us for event in trace.events), default=1.0)
    return sorted(runs, key=lambda run: run[1] - run[0])[len(runs) // 2]


def _covered(begin: float, end: float, spans: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans)
