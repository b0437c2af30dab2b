"""What layers are doing, from spans of an engine that is scripted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from speculoe_local.server.batching import layers
from speculoe_local.server.batching.layers import LayerWatch


class Engine:
    """Spans and requests that a test sets."""

    def __init__(self) -> None:
        self.requests = 0
        self.spans: list[Any] = []
        self.starts = 0

    def stats(self) -> Any:
        return SimpleNamespace(requests=self.requests)

    def start_trace(self, _capacity: int) -> None:
        self.starts += 1
        self.spans = []

    def take_trace(self, _capacity: int) -> list[Any]:
        spans, self.spans = self.spans, []
        return spans

    def upload(self, block: int, kind: int) -> None:
        """One expert: three matrices."""
        self.spans += [SimpleNamespace(block=block, kind=kind, begin_ns=0, end_ns=10)] * 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(layers, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def watch(engine: Engine) -> LayerWatch:
    model = SimpleNamespace(
        layers=[
            SimpleNamespace(index=i, n_expert=8, n_expert_used=2, matrices=("a", "b", "c"))
            for i in (1, 2)
        ]
    )
    placed = SimpleNamespace(pools=(SimpleNamespace(layers=(1, 2), slots=6),))
    return LayerWatch(cast(Any, engine), cast(Any, model), cast(Any, placed))


def test_nothing_is_recorded_before_somebody_looks(clock: SimpleNamespace) -> None:
    engine = Engine()
    looking = watch(engine)
    assert 0 == engine.starts
    first = looking.read()
    assert 1 == engine.starts
    assert [(1, 3.0, None), (2, 3.0, None)] == [(v.block, v.slots, v.hit_rate) for v in first]


def test_a_layers_hit_rate_follows_from_what_had_to_be_uploaded(clock: SimpleNamespace) -> None:
    engine = Engine()
    looking = watch(engine)
    looking.read()
    engine.requests = 20
    engine.upload(1, 2)
    engine.upload(1, 2)
    engine.upload(2, 3)
    one, two = looking.read()
    assert (2.0, 0.0, 0.8) == pytest.approx((one.demand, one.predicted, one.hit_rate))
    assert (0.0, 1.0, 1.0) == pytest.approx((two.demand, two.predicted, two.hit_rate))


def test_what_happened_long_ago_fades(clock: SimpleNamespace) -> None:
    engine = Engine()
    looking = watch(engine)
    looking.read()
    engine.requests = 20
    engine.upload(1, 2)
    before = looking.read()[0].demand
    clock.now += 5
    after = looking.read()[0]
    assert 0.7 < after.demand / before < 0.8
    assert 0.9 == pytest.approx(after.hit_rate)


def test_stalls_are_summed(clock: SimpleNamespace) -> None:
    engine = Engine()
    looking = watch(engine)
    looking.read()
    engine.spans = [SimpleNamespace(block=2, kind=1, begin_ns=0, end_ns=3_000_000)]
    assert [0.0, 3.0] == [view.stall_ms for view in looking.read()]


def test_after_a_pause_the_count_begins_anew(clock: SimpleNamespace) -> None:
    engine = Engine()
    looking = watch(engine)
    looking.read()
    engine.requests = 20
    engine.upload(1, 2)
    clock.now += 60
    assert [None, None] == [view.hit_rate for view in looking.read()]
    assert 2 == engine.starts
