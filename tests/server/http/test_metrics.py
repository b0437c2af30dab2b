"""Figures as Prometheus reads them."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from speculoe_local.runtime.slots import SlotStats
from speculoe_local.server.http.metrics import Metrics
from speculoe_local.server.jobs import Job, LaneView, Snapshot, Timings
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import FakeBackend, FakeBackends, client_of, say

SLOTS = SlotStats(requests=100, hits=75, uploads=25, uploaded_bytes=1000, stall_ns=2_000_000_000)


class Busy(FakeBackend):
    """A model in the middle of something."""

    def snapshot(self, *, layers: bool = False) -> Snapshot:
        lanes = (LaneView(0, "t", Job((1,))), LaneView(1))
        return replace(
            super().snapshot(), lanes=lanes, queued=3, kv_tokens=25, kv_size=100, slots=SLOTS
        )


def samples(metrics: Metrics, *backends: FakeBackend) -> dict[str, float]:
    """What is scraped, `name{labels}` to value."""
    client = client_of(metrics.router(FakeBackends(*backends), Settings()))
    answer = client.get("/metrics")
    assert 200 == answer.status_code
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_answers_are_counted_with_their_tokens_and_times() -> None:
    metrics = Metrics()
    timings = Timings(
        prompt_n=10, cached_n=5, prompt_ms=90.0, predicted_n=11, predicted_ms=500.0, queue_ms=10.0
    )
    metrics.observe("m", "stop", timings)
    metrics.observe("m", "error", Timings())
    found = samples(metrics, FakeBackend(say("x")))
    label = "[('model', 'm')]"
    assert 1 == found["speculoe_requests_total[('finish', 'stop'), ('model', 'm')]"]
    assert 1 == found["speculoe_requests_total[('finish', 'error'), ('model', 'm')]"]
    assert 10 == found[f"speculoe_prompt_tokens_total{label}"]
    assert 5 == found[f"speculoe_cached_tokens_total{label}"]
    assert 11 == found[f"speculoe_predicted_tokens_total{label}"]
    assert 0.1 == found[f"speculoe_ttft_seconds_sum{label}"]
    assert 1 == found[f"speculoe_ttft_seconds_count{label}"]
    assert 0.05 == found[f"speculoe_tpot_seconds_sum{label}"]
    assert 0.01 == found[f"speculoe_queue_seconds_sum{label}"]


def test_states_are_those_of_the_moment_of_asking() -> None:
    found = samples(Metrics(), Busy(say("x"), name="m"))
    label = "[('model', 'm')]"
    for name, value in {
        "requests_running": 1,
        "requests_waiting": 3,
        "lanes": 2,
        "kv_usage_ratio": 0.25,
        "expert_residency_ratio": 1.0,
        "expert_requests_total": 100,
        "expert_hits_total": 75,
        "expert_uploaded_bytes_total": 1000,
        "expert_stall_seconds_total": 2.0,
    }.items():
        assert value == found[f"speculoe_{name}{label}"], name
    info = next(name for name in found if name.startswith("speculoe_model_info"))
    assert "('exactness', 'exact')" in info
    assert "('mode', 'exact')" in info


def test_two_servers_in_a_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.observe("m", "stop", Timings(predicted_n=1))
    backend = FakeBackend(say("x"))
    assert not any("speculoe_requests_total" in name for name in samples(other, backend))
    assert any("speculoe_requests_total" in name for name in samples(one, backend))
