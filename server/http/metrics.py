"""Figures of the server in Prometheus' text format: requests and times as they end, states when asked.

A registry per server, so that two in one process never share a counter. Knows no dialect; its text is what
prometheus-client makes of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from speculoe_local.server.jobs import Backend, Backends, Snapshot, Timings
from speculoe_local.server.settings import Settings

__all__ = ["Metrics"]

# Seconds. A first token may wait for a long prompt; a further one comes within moments or from a slow disk.
_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_NS = 1e-9
_P = "speculoe"


class Metrics:
    """What answers cost. `observe` is called from any thread, once per answer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by = ("model",)
        self._requests = Counter(
            f"{_P}_requests",
            "Answers that ended, by how: stop, length, cancel, error.",
            ("model", "finish"),
            registry=self.registry,
        )
        self._prompt, self._cached, self._predicted = (
            Counter(f"{_P}_{name}", text, by, registry=self.registry)
            for name, text in (
                ("prompt_tokens", "Prompt tokens that were run."),
                ("cached_tokens", "Prompt tokens found in the cache."),
                ("predicted_tokens", "Tokens of answers."),
            )
        )
        self._ttft, self._tpot, self._queue = (
            Histogram(f"{_P}_{name}", text, by, buckets=buckets, registry=self.registry)
            for name, text, buckets in (
                ("ttft_seconds", "From acceptance to the first token.", _TTFT_S),
                ("tpot_seconds", "Time per token after the first.", _TPOT_S),
                ("queue_seconds", "From acceptance to the prompt.", _TTFT_S),
            )
        )

    def observe(self, model: str, how: str, timings: Timings) -> None:
        """An answer ended: a finish, or "error"."""
        self._requests.labels(model, how).inc()
        self._prompt.labels(model).inc(timings.prompt_n)
        self._cached.labels(model).inc(timings.cached_n)
        self._predicted.labels(model).inc(timings.predicted_n)
        if timings.predicted_n > 0:
            self._queue.labels(model).observe(timings.queue_ms / 1e3)
            self._ttft.labels(model).observe(timings.ttft_ms / 1e3)
        if timings.predicted_n > 1:
            gaps = timings.predicted_n - 1
            self._tpot.labels(model).observe(timings.predicted_ms / 1e3 / gaps)

    def router(self, backends: Backends, settings: Settings) -> APIRouter:
        """/metrics."""
        self.registry.register(_States(backends))
        routes = APIRouter(tags=["Observability"])

        @routes.get("/metrics", response_class=Response)
        async def metrics() -> Response:
            text = await asyncio.to_thread(generate_latest, self.registry)
            return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

        return routes


class _States(Collector):
    """What loaded models are doing, looked up when somebody asks."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        seen = [(backend, backend.snapshot()) for backend in self._backends.loaded()]
        yield _info(seen)
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(f"{_P}_{name}", text, labels=["model"])
            for backend, snapshot in seen:
                gauge.add_metric([backend.info.name], read(snapshot))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"{_P}_{name}", text, labels=["model"])
            for backend, snapshot in seen:
                counter.add_metric([backend.info.name], read(snapshot))
            yield counter


def _info(seen: list[tuple[Backend, Snapshot]]) -> Metric:
    family = InfoMetricFamily(f"{_P}_model", "What is loaded, and how it runs.", labels=["model"])
    for backend, _ in seen:
        info = backend.info
        values = {
            "mode": info.mode,
            "exactness": info.exactness,
            "tier": info.tier,
            "architecture": info.entry.architecture,
            "quantization": info.entry.quantization,
        }
        family.add_metric([info.name], values)
    return family


def _busy(snapshot: Snapshot) -> float:
    return sum(lane.job is not None for lane in snapshot.lanes)


_Rows = tuple[tuple[str, str, Callable[[Snapshot], float]], ...]
_GAUGES: _Rows = (
    ("requests_running", "Answers under way.", _busy),
    ("requests_waiting", "Requests in the queue.", lambda s: s.queued),
    ("lanes", "Answers that can run at a time.", lambda s: len(s.lanes)),
    ("kv_tokens", "Tokens held, those of idle conversations included.", lambda s: s.kv_tokens),
    ("kv_size_tokens", "Tokens that can be held.", lambda s: s.kv_size),
    ("kv_usage_ratio", "Share of these.", lambda s: s.kv_tokens / s.kv_size if s.kv_size else 0),
    ("expert_residency_ratio", "Share of the experts that have a slot.", lambda s: s.residency),
    ("expert_bank_bytes", "Memory of the slots.", lambda s: s.slots.bank_bytes),
    ("expert_staging_bytes", "Memory of the stages for prompts.", lambda s: s.slots.staging_bytes),
)
_COUNTERS: _Rows = (
    ("requests_accepted", "Requests that were accepted.", lambda s: s.accepted),
    ("prompt_seconds", "Time spent on prompts.", lambda s: s.prompt_s),
    ("predicted_seconds", "Time spent on tokens of answers.", lambda s: s.predicted_s),
    ("expert_requests", "Experts asked for while decoding.", lambda s: s.slots.requests),
    ("expert_hits", "Of these, resident before they were asked for.", lambda s: s.slots.hits),
    ("expert_uploads", "Experts copied into slots.", lambda s: s.slots.uploads),
    ("expert_uploaded_bytes", "Bytes copied into slots.", lambda s: s.slots.uploaded_bytes),
    ("expert_staged_bytes", "Bytes streamed for prompts.", lambda s: s.slots.staged_bytes),
    ("expert_wasted_bytes", "Bytes of predictions never used.", lambda s: s.slots.wasted_bytes),
    ("expert_predicted", "Experts predicted.", lambda s: s.slots.predicted),
    ("expert_true", "True experts of layers that predict.", lambda s: s.slots.true_experts),
    ("expert_true_predicted", "Of these, predicted.", lambda s: s.slots.true_predicted),
    (
        "expert_true_nonresident",
        "True experts that were not resident when predicted.",
        lambda s: s.slots.true_nonresident,
    ),
    (
        "expert_true_nonresident_predicted",
        "Of these, predicted.",
        lambda s: s.slots.true_nonresident_predicted,
    ),
    (
        "expert_predicted_nonresident",
        "Predictions of experts that were not resident.",
        lambda s: s.slots.predicted_nonresident,
    ),
    ("expert_stall_seconds", "Waiting for experts.", lambda s: s.slots.stall_ns * _NS),
    (
        "expert_window_seconds",
        "Computing between one layer's experts and the next one's request.",
        lambda s: s.slots.window_ns * _NS,
    ),
)
