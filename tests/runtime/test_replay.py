"""Replays of small traces against brute force, and the default policy on a piece of a real one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.modelmap import ExpertMatrix, ModelMap, MoeLayer
from speculoe_local.runtime.options import EngineOptions
from speculoe_local.runtime.placement import Budget, plan
from speculoe_local.runtime.replay import (
    HALF_LIFE,
    POLICIES,
    Row,
    Trace,
    deal,
    default_pool,
    load_trace,
    replay,
)
from speculoe_local.runtime.slots import ExpertSlots

Experts = frozenset[tuple[int, int]]

ONLINE = ("lru", "lfu-decay", "learned")


@pytest.fixture(scope="module")
def excerpt() -> Trace:
    return load_trace(Path(__file__).parent.parent / "data" / "gpt-oss-20b-excerpt.npz")


def trace_of(ids: Any, n_expert: int) -> Trace:
    return Trace("made up", np.ascontiguousarray(ids, np.int32), n_expert)


@st.composite
def traces(draw: st.DrawFn, most_tokens: int, most_experts: int, most_used: int = 2) -> Trace:
    n_expert = draw(st.integers(1, most_experts))
    n_used = draw(st.integers(1, min(most_used, n_expert)))
    shape = (draw(st.integers(1, most_tokens)), draw(st.integers(1, 2)), n_used)
    ids = draw(arrays.arrays(np.int32, shape, elements=st.integers(0, n_expert - 1)))
    if n_used == 2:
        ids[:, :, 1][ids[:, :, 0] == ids[:, :, 1]] = -1
    return trace_of(ids, n_expert)


def most_hits(steps: list[Experts], slots: int, n_warm: int) -> int:
    """The best that any choice of what stays after each step can do, by trying all of them."""
    best: dict[Experts, int] = {frozenset(): 0}
    for number, asked in enumerate(steps):
        after: dict[Experts, int] = {}
        for held, hits in best.items():
            here = held | asked
            counted = len(held & asked) if number >= n_warm else 0
            for kept in map(frozenset, combinations(here, min(slots, len(here)))):
                after[kept] = max(after.get(kept, 0), hits + counted)
        best = after
    return max(best.values())


def steps_of(trace: Trace, layers: range) -> list[Experts]:
    """(layer, expert) of each token's layers in turn."""
    return [
        frozenset((layer, expert) for expert in step[layer].tolist() if expert >= 0)
        for step, layer in product(trace.ids, layers)
    ]


def asked_of(trace: Trace, n_warm: int = 0) -> int:
    return int((trace.ids[n_warm:] >= 0).sum())


def rows_of(trace: Trace, residency: float, **more: Any) -> dict[tuple[str, str], Row]:
    found = replay(trace, residencies=[residency], **more)
    return {(row.policy, row.pool): row for row in found.rows}


@settings(max_examples=60, deadline=None)
@given(trace=traces(6, 4), slots=st.integers(1, 8), warm=st.sampled_from([0.0, 0.5]))
def test_the_clairvoyant_does_what_the_best_of_all_choices_does(
    trace: Trace, slots: int, warm: float
) -> None:
    tokens, n_layers, _ = trace.ids.shape
    slots = min(slots, n_layers * trace.n_expert)
    n_warm = int(tokens * warm)
    asked = asked_of(trace, n_warm)
    rows = rows_of(trace, slots / (n_layers * trace.n_expert), policies=["clairvoyant"], warm=warm)

    shared = most_hits(steps_of(trace, range(n_layers)), slots, n_warm * n_layers)
    assert shared == round(rows["clairvoyant", "shared"].hit_rate * asked)
    sizes = deal(slots, n_layers, "layer")
    if min(sizes) == 0:
        assert ("clairvoyant", "layer") not in rows
    else:
        own = sum(
            most_hits(steps_of(trace, range(layer, layer + 1)), size, n_warm)
            for layer, size in enumerate(sizes)
        )
        assert own == round(rows["clairvoyant", "layer"].hit_rate * asked)


@settings(max_examples=60, deadline=None)
@given(
    trace=traces(40, 8), residency=st.floats(0.2, 1.0), warm=st.sampled_from([0.0, 0.3, 0.5, 0.9])
)
def test_no_policy_beats_the_bound_and_uploads_are_the_misses(
    trace: Trace, residency: float, warm: float
) -> None:
    tokens, n_layers, _ = trace.ids.shape
    n_warm = int(tokens * warm)
    asked = asked_of(trace, n_warm)
    if residency * n_layers * trace.n_expert < 1:
        residency = 1.0
    rows = rows_of(trace, residency, policies=[*ONLINE, "clairvoyant"], warm=warm)

    for (_, pool), row in rows.items():
        assert row.hit_rate <= rows["clairvoyant", pool].hit_rate + 1e-12
        assert asked - round(row.hit_rate * asked) == round(
            row.uploads_per_token * (tokens - n_warm)
        )


@settings(max_examples=60, deadline=None)
@given(trace=traces(40, 6, most_used=1), slots=st.integers(1, 6))
def test_lru_per_layer_is_what_a_list_of_the_latest_gives(trace: Trace, slots: int) -> None:
    tokens, n_layers, _ = trace.ids.shape
    slots = min(slots, trace.n_expert)
    hits = 0
    for layer in range(n_layers):
        latest: list[int] = []
        for expert in trace.ids[:, layer, 0].tolist():
            hits += expert in latest
            latest = [*(e for e in latest if e != expert), expert][-slots:]

    row = rows_of(trace, slots / trace.n_expert, policies=["lru"], warm=0.0)["lru", "layer"]

    assert hits == round(row.hit_rate * tokens * n_layers)


def test_the_static_choice_is_the_most_frequent_of_the_warm_half() -> None:
    trace = trace_of([[[0]], [[0]], [[1]], [[2]], [[0]], [[1]], [[2]], [[2]]], 4)

    row = rows_of(trace, 0.25, policies=["static"])["static", "layer"]

    assert (0.25, 0.75) == (row.hit_rate, row.uploads_per_token)


def test_a_second_mention_of_an_expert_is_no_second_request(tmp_path: Path) -> None:
    path = saved(tmp_path, ids=np.array([[[1, 1]], [[1, 2]], [[2, 1]], [[-1, 2]]], np.int16))

    loaded = load_trace(path)

    assert [[[1, -1]], [[1, 2]], [[2, 1]], [[-1, 2]]] == loaded.ids.tolist()


@pytest.mark.parametrize("residency", [0.10, 0.25, 0.50, 0.75])
def test_the_default_is_not_a_point_below_lru_or_decayed_counts(
    excerpt: Trace, residency: float
) -> None:
    rows = rows_of(excerpt, residency)
    [chosen] = [row for row in rows.values() if row.default]

    for other in ("lru", "lfu-decay"):
        for pool in ("shared", "layer"):
            assert chosen.hit_rate >= rows[other, pool].hit_rate - 0.01


def test_the_default_is_well_above_lru_at_a_quarter(excerpt: Trace) -> None:
    rows = rows_of(excerpt, 0.25)
    [chosen] = [row for row in rows.values() if row.default]

    assert chosen.hit_rate >= rows["lru", "shared"].hit_rate + 0.07
    assert chosen.hit_rate >= rows["lru", "layer"].hit_rate + 0.07
    assert chosen.hit_rate <= rows["clairvoyant", chosen.pool].hit_rate


def test_learned_slots_below_one_token_hit_where_lru_cannot(
    excerpt: Trace,
) -> None:
    rows = rows_of(excerpt, 0.10)

    assert [("learned", "shared")] == [key for key, row in rows.items() if row.default]
    assert rows["lru", "shared"].hit_rate < 0.01
    assert rows["learned", "shared"].hit_rate > 0.40


def test_the_default_pool_is_what_the_plan_gives() -> None:
    n_layers, n_expert, n_used = 5, 8, 2
    layers = tuple(
        MoeLayer(
            index,
            n_expert,
            n_used,
            (ExpertMatrix("up", "up", 0, 256, 1, n_expert, 1024, Path("demo.gguf"), 0),),
        )
        for index in range(n_layers)
    )
    nbytes = n_layers * n_expert * 1024
    model = ModelMap(
        architecture="demo",
        name="demo",
        n_layer=n_layers,
        n_embd=256,
        n_vocab=0,
        n_expert=n_expert,
        n_expert_used=n_used,
        layers=layers,
        total_bytes=nbytes,
        fingerprint="",
    )
    trace = trace_of(np.zeros((1, n_layers, n_used)), n_expert)
    for budget in range(
        plan(model, Budget("", share=None, nbytes=nbytes)).smallest_bytes, nbytes, 1024
    ):
        placement = plan(model, Budget(str(budget), nbytes=budget))
        pool = default_pool(trace, placement.residency)

        assert pool is not None
        assert tuple(p.slots for p in placement.pools) == deal(placement.slots, n_layers, pool)
    assert placement.residency > 0.5
    assert default_pool(trace, (n_used - 1) / (n_layers * n_expert)) is None


def test_the_engine_has_the_same_policy_and_half_life_as_the_replay() -> None:
    defaults = inspect.signature(ExpertSlots.__init__).parameters

    assert HALF_LIFE == defaults["half_life"].default
    assert EngineOptions().policy == defaults["policy"].default == "learned"


def test_json_has_the_promised_keys(excerpt: Trace) -> None:
    short = Trace(excerpt.name, np.ascontiguousarray(excerpt.ids[:40]), excerpt.n_expert)
    found = replay(short, residencies=[0.25, 0.5]).to_json()

    assert ("gpt-oss-20b-excerpt.npz", 40, 0.5) == (found["trace"], found["tokens"], found["warm"])
    assert 2 * 2 * len(POLICIES) == len(found["rows"])
    for row in found["rows"]:
        assert {
            "policy",
            "pool",
            "residency",
            "hit_rate",
            "uploads_per_token",
            "default",
        } == row.keys()
    assert [0.25, 0.5] == [row["residency"] for row in found["rows"] if row["default"]]
    json.dumps(found)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policies": ["mru"]}, "mru"),
        ({"residencies": [0.0]}, "0"),
        ({"residencies": [1.5]}, "1.5"),
        ({"residencies": [float("nan")]}, "nan"),
        ({"residencies": [0.01]}, "0.01"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named) as caught:
        replay(trace_of([[[0]], [[1]]], 2), **options)

    assert "\n" not in str(caught.value)


def saved(folder: Path, **changed: Any) -> Path:
    path = folder / "trace.npz"
    kept: dict[str, Any] = {
        "ids": np.zeros((4, 2, 1), np.int16),
        "meta": json.dumps({"n_expert": 4}),
    } | changed
    np.savez(path, **{name: value for name, value in kept.items() if value is not None})
    return path


def truncated(folder: Path) -> Path:
    path = saved(folder)
    path.write_bytes(path.read_bytes()[:-40])
    return path


def text(folder: Path) -> Path:
    path = folder / "trace.npz"
    path.write_text("no archive")
    return path


def single(folder: Path) -> Path:
    path = folder / "trace.npy"
    np.save(path, np.zeros(3))
    return path


def bomb(folder: Path) -> Path:
    """Four GiB of zeros, as the archive has it; only its directory says so."""
    path = saved(folder)
    found = bytearray(path.read_bytes())
    entry = found.index(b"PK\x01\x02")
    found[entry + 24 : entry + 28] = (0xFFFFFFFE).to_bytes(4, "little")
    path.write_bytes(found)
    return path


def garbled(folder: Path) -> Path:
    path = saved(folder)
    found = bytearray(path.read_bytes())
    found[150:170] = bytes(20)
    path.write_bytes(found)
    return path


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: folder / "absent.npz", "does not exist"),
        (lambda folder: folder, "readable|exist"),
        (text, "readable"),
        (truncated, "readable"),
        (garbled, "readable"),
        (single, "readable"),
        (bomb, "above"),
        (lambda folder: saved(folder, ids=None), "no array 'ids'"),
        (lambda folder: saved(folder, meta=None), "no array 'meta'"),
        (lambda folder: saved(folder, meta="{"), "n_expert"),
        (lambda folder: saved(folder, meta="[]"), "n_expert"),
        (lambda folder: saved(folder, meta='{"n_expert": "many"}'), "many"),
        (lambda folder: saved(folder, meta='{"n_expert": true}'), "True"),
        (lambda folder: saved(folder, meta=np.zeros(3)), "n_expert"),
        (lambda folder: saved(folder, ids=np.zeros((4, 2), np.int16)), "shape"),
        (lambda folder: saved(folder, ids=np.zeros((0, 2, 1), np.int16)), "shape"),
        (lambda folder: saved(folder, ids=np.zeros((4, 2, 1))), "float64"),
        (lambda folder: saved(folder, ids=np.full((4, 2, 1), 4, np.int16)), "expert 4"),
        (lambda folder: saved(folder, ids=np.full((4, 2, 1), -2, np.int16)), "expert -2"),
        (lambda folder: saved(folder, ids=np.full((4, 2, 1), 2**63, np.uint64)), "expert 9223"),
        (lambda folder: saved(folder, ids=np.zeros((4, 2, 5), np.int16)), "k = 5"),
        (lambda folder: saved(folder, ids=np.array([None] * 4)), "readable"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(
    make: Callable[[Path], Path], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load_trace(make(tmp_path))

    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
