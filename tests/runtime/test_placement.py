"""Budgets as people write them, and placements that keep their promises for any model."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.errors import BudgetError, OptionError
from speculoe_local.runtime.modelmap import ExpertMatrix, MatrixKind, ModelMap, MoeLayer
from speculoe_local.runtime.placement import (
    Budget,
    Placement,
    Pool,
    describe,
    format_bytes,
    join,
    parse_budget,
    plan,
    two_layers,
)

MIB = 1 << 20
F32 = 0


def moe_layer(index: int, n_expert: int, n_used: int, rows: int = 1) -> MoeLayer:
    """A layer whose experts take `rows` KiB in each of up and down."""

    def matrix(kind: MatrixKind) -> ExpertMatrix:
        name, path = f"blk.{index}.ffn_{kind}_exps.weight", Path("demo.gguf")
        return ExpertMatrix(kind, name, F32, 256, rows, n_expert, 1024 * rows, path, 0)

    return MoeLayer(index, n_expert, n_used, (matrix("up"), matrix("down")))


def model_of(*layers: MoeLayer, other_bytes: int = 0) -> ModelMap:
    routed = sum(layer.n_expert * layer.expert_bytes for layer in layers)
    return ModelMap(
        architecture="demo",
        name="demo",
        n_layer=len(layers) + 1,
        n_embd=256,
        n_vocab=0,
        n_expert=max((layer.n_expert for layer in layers), default=0),
        n_expert_used=max((layer.n_expert_used for layer in layers), default=0),
        layers=layers,
        total_bytes=routed + other_bytes,
        fingerprint="",
    )


def nbytes(count: int) -> Budget:
    return Budget(str(count), nbytes=count)


@st.composite
def models(draw: st.DrawFn) -> ModelMap:
    """Up to 24 layers of up to three shapes and two numbers of experts, each with a k of its own."""
    counts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
    shapes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    return model_of(
        *(
            moe_layer(
                index,
                n_expert := draw(st.sampled_from(counts)),
                draw(st.integers(1, n_expert)),
                draw(st.sampled_from(shapes)),
            )
            for index in range(1, draw(st.integers(1, 24)) + 1)
        )
    )


shares = st.fractions(0, 1)
many = settings(max_examples=200, deadline=None)


def budget_between(model: ModelMap, share: Fraction) -> int:
    """A budget in bytes from the smallest that works to all experts."""
    smallest = plan(model, parse_budget("100%")).smallest_bytes
    return smallest + int(share * (model.routed_bytes - smallest))


@many
@given(models(), shares)
def test_no_placement_uses_more_than_its_budget(model: ModelMap, share: Fraction) -> None:
    budget = budget_between(model, share)
    placement = plan(model, nbytes(budget))
    slots = sum(pool.slots * pool.slot_bytes for pool in placement.pools)
    staging = placement.staging_buffers * placement.staging_bytes

    assert budget == placement.budget_bytes
    assert placement.used_bytes <= budget
    if placement.kind == "slotted":
        assert slots + staging == placement.used_bytes


@many
@given(models(), shares)
def test_pools_cover_each_layer_once_with_enough_slots(model: ModelMap, share: Fraction) -> None:
    placement = plan(model, nbytes(budget_between(model, share)))
    assume(placement.kind == "slotted")

    covered = sorted(index for pool in placement.pools for index in pool.layers)
    assert [layer.index for layer in model.layers] == covered
    for pool in placement.pools:
        layers = [model.layer(index) for index in pool.layers]
        assert 1 == len({(layer.n_expert, layer.shape_class) for layer in layers})
        assert layers[0].expert_bytes == pool.slot_bytes
        assert max(layer.n_expert_used for layer in layers) <= pool.slots
        assert pool.slots <= sum(layer.n_expert for layer in layers)
    matrices = [m for layer in model.layers for m in layer.matrices]
    largest = {m.ggml_type: 0 for m in matrices}
    for m in matrices:
        largest[m.ggml_type] = max(largest[m.ggml_type], m.nbytes)
    assert sum(largest.values()) == placement.staging_bytes
    total = sum(layer.n_expert for layer in model.layers)
    assert placement.slots / total == placement.residency


@many
@given(models(), shares)
def test_layers_that_can_share_slots_do(model: ModelMap, share: Fraction) -> None:
    placement = plan(model, nbytes(budget_between(model, share)))
    assume(placement.kind == "slotted")

    kinds = {(layer.n_expert, layer.shape_class) for layer in model.layers}
    assert len(kinds) == len(placement.pools)


@many
@given(models(), shares, shares)
def test_more_budget_never_means_fewer_slots(
    model: ModelMap, first: Fraction, second: Fraction
) -> None:
    low, high = sorted(budget_between(model, share) for share in (first, second))

    assert plan(model, nbytes(low)).residency <= plan(model, nbytes(high)).residency


def test_the_step_to_two_staging_buffers_costs_no_slot() -> None:
    model = model_of(*(moe_layer(index, 8, 2) for index in range(24)))
    staging = 8 * 1024

    placements = [plan(model, nbytes(n)) for n in range(14 * staging, 18 * staging, 512)]

    assert [1] * 32 + [2] * 32 == [placement.staging_buffers for placement in placements]
    slots = [placement.slots for placement in placements]
    assert sorted(slots) == slots


def test_no_step_of_the_budget_costs_a_slot_where_experts_differ_in_size() -> None:
    model = model_of(*(moe_layer(index, 6, 2, rows=1 + 4 * (index % 2)) for index in range(6)))
    smallest = budget_between(model, Fraction(0))

    residency = [plan(model, nbytes(n)).residency for n in range(smallest, 300 * 1024, 512)]

    assert sorted(residency) == residency
    assert residency[0] < 0.2 < 1 == residency[-1]


def test_the_slots_that_must_be_come_before_a_second_staging_buffer() -> None:
    model = model_of(*(moe_layer(index, 8, 7, rows=10 + index) for index in range(20)))

    placement = plan(model, nbytes(budget_between(model, Fraction(0))))

    assert (1, placement.budget_bytes) == (placement.staging_buffers, placement.used_bytes)
    assert placement.used_bytes > 16 * placement.staging_bytes


@many
@given(models(), shares)
def test_less_than_one_slot_of_a_roomy_budget_is_left(model: ModelMap, share: Fraction) -> None:
    placement = plan(model, nbytes(budget_between(model, share)))
    assume(placement.kind == "slotted")
    left = placement.budget_bytes - placement.used_bytes
    held_back = placement.staging_bytes if placement.staging_buffers == 1 else 0

    assert left < max(layer.expert_bytes for layer in model.layers) + held_back
    two = 2 * placement.staging_bytes
    assert placement.staging_buffers == 1 or two <= placement.budget_bytes / 8


@many
@given(models())
def test_the_smallest_budget_works_and_one_byte_less_is_refused(model: ModelMap) -> None:
    smallest = plan(model, parse_budget("100%")).smallest_bytes

    assert smallest == plan(model, nbytes(smallest)).smallest_bytes
    with pytest.raises(BudgetError):
        plan(model, nbytes(smallest - 1))


@many
@given(models())
def test_what_a_refusal_proposes_is_accepted(model: ModelMap) -> None:
    with pytest.raises(BudgetError) as refused:
        plan(model, parse_budget("0"))
    named = re.fullmatch(
        r"--expert-budget 0 is below the (\S+ \S+) \((\S+%)\) that one token of this model needs; "
        r"use at least (\S+%)",
        str(refused.value),
    )

    assert named is not None
    for proposal in named.groups():
        placement = plan(model, parse_budget(proposal))
        assert placement.smallest_bytes <= placement.budget_bytes


@many
@given(models())
def test_all_experts_stay_resident_when_they_fit(model: ModelMap) -> None:
    for budget in (parse_budget("100%"), nbytes(model.routed_bytes)):
        placement = plan(model, budget)

        assert ("resident", (), 0, 1.0) == (
            placement.kind,
            placement.pools,
            placement.staging_bytes,
            placement.residency,
        )
        assert model.routed_bytes == placement.used_bytes


def test_equal_layers_share_all_slots_of_any_budget() -> None:
    model = model_of(*(moe_layer(index, 8, 2) for index in range(4)))
    staging, slot = 8 * 1024, 2 * 1024

    for slots in (2, 7, 8, 14, 27):
        placement = plan(model, nbytes(staging + slots * slot + slot - 1))

        assert (Pool((0, 1, 2, 3), slots, slot),) == placement.pools
        assert (1, staging) == (placement.staging_buffers, placement.staging_bytes)


def test_layers_that_differ_in_shape_or_number_of_experts_do_not_share() -> None:
    model = model_of(
        moe_layer(0, 8, 2), moe_layer(1, 8, 2, rows=3), moe_layer(2, 8, 2), moe_layer(3, 4, 2)
    )
    staging, slot = 3 * 8 * 1024, 2 * 1024

    placement = plan(model, nbytes(staging + 3 * slot + 2 * 3 * slot + 2 * slot))

    assert (Pool((0, 2), 3, slot), Pool((1,), 2, 3 * slot), Pool((3,), 2, slot)) == placement.pools


def test_each_shape_gets_slots_in_proportion_to_its_layers() -> None:
    model = model_of(*(moe_layer(index, 32, 2, rows=1 + (index == 0)) for index in range(5)))
    staging, slot = 2 * 32 * 1024, 2 * 1024

    placement = plan(model, nbytes(staging + 10 * (4 * slot + 2 * slot)))

    assert (Pool((0,), 10, 2 * slot), Pool((1, 2, 3, 4), 40, slot)) == placement.pools


@many
@given(model=models(), share=shares, data=st.data())
def test_pinned_layers_have_a_slot_for_each_expert_and_the_rest_its_own(
    model: ModelMap, share: Fraction, data: st.DataObject
) -> None:
    pinned = data.draw(st.sets(st.sampled_from([layer.index for layer in model.layers])))
    smallest = plan(model, parse_budget("100%"), pinned=pinned).smallest_bytes
    budget = smallest + int(share * (model.routed_bytes - smallest))

    placed = plan(model, nbytes(budget), pinned=pinned)

    assert placed.used_bytes <= budget
    for pool in placed.pools:
        layers = [model.layer(index) for index in pool.layers]
        inside = {layer.index in pinned for layer in layers}
        assert 1 == len(inside)
        if inside == {True}:
            assert sum(layer.n_expert for layer in layers) == pool.slots
        else:
            assert max(layer.n_expert_used for layer in layers) <= pool.slots


def test_a_dense_model_needs_nothing() -> None:
    placement = plan(model_of(other_bytes=5), parse_budget("1KiB"))

    assert ("dense", (), 0, 0) == (
        placement.kind,
        placement.pools,
        placement.used_bytes,
        placement.smallest_bytes,
    )
    assert "dense: the model has no routed experts" == describe(placement)


@st.composite
def limits(draw: st.DrawFn, model: ModelMap) -> int:
    """Limits of one buffer that the model can live with, most of them too small for one pool."""
    least = max(
        matrix.bytes_per_expert * max(layer.n_expert, 2 * layer.n_expert_used + 1)
        for layer in model.layers
        for matrix in layer.matrices
    )
    return draw(st.integers(least, max(least + 1, model.routed_bytes // 4)))


@many
@given(st.data(), models(), shares)
def test_no_bank_is_larger_than_one_buffer_and_no_slot_is_lost_by_it(
    data: st.DataObject, model: ModelMap, share: Fraction
) -> None:
    budget, limit = nbytes(budget_between(model, share)), data.draw(limits(model))
    whole, split = plan(model, budget), plan(model, budget, most_buffer_bytes=limit)
    assume(whole.kind == "slotted")

    assert split.used_bytes <= split.budget_bytes
    assert sorted(i for pool in split.pools for i in pool.layers) == [
        layer.index for layer in model.layers
    ]
    most: dict[object, int] = {}  # slots of each kind that any pools within the limit could have
    for pool in split.pools:
        layers = [model.layer(index) for index in pool.layers]
        largest = max(matrix.bytes_per_expert for matrix in layers[0].matrices)
        kind = (layers[0].n_expert, layers[0].shape_class)
        assert {kind} == {(layer.n_expert, layer.shape_class) for layer in layers}
        assert (pool.slots + 1) * largest <= limit
        assert max(layer.n_expert_used for layer in layers) <= pool.slots
        assert pool.slots <= sum(layer.n_expert for layer in layers)
        most[kind] = most.get(kind, 0) + len(layers) * min(layers[0].n_expert, limit // largest - 1)
    for pool in whole.pools:
        layer = model.layer(pool.layers[0])
        kind = (layer.n_expert, layer.shape_class)
        found = sum(p.slots for p in split.pools if set(p.layers) <= set(pool.layers))
        assert found >= min(pool.slots, most[kind])


@many
@given(st.data(), models(), shares, shares)
def test_more_budget_never_means_fewer_slots_within_a_limit_either(
    data: st.DataObject, model: ModelMap, first: Fraction, second: Fraction
) -> None:
    low, high = sorted(budget_between(model, share) for share in (first, second))
    limit = data.draw(limits(model))

    fewer, more = (plan(model, nbytes(n), most_buffer_bytes=limit) for n in (low, high))

    assert fewer.residency <= more.residency


def test_layers_take_turns_in_as_few_pools_as_the_limit_allows() -> None:
    model = model_of(*(moe_layer(index, 8, 2) for index in range(7)))
    budget = nbytes(8 * 1024 + 20 * 2 * 1024)

    def pools(limit: int | None) -> tuple[Pool, ...]:
        return plan(model, budget, most_buffer_bytes=limit).pools

    whole = (Pool((0, 1, 2, 3, 4, 5, 6), 20, 2048),)
    assert whole == pools(None) == pools(21 * 1024)
    assert (Pool((0, 2, 4, 6), 11, 2048), Pool((1, 3, 5), 9, 2048)) == pools(21 * 1024 - 1)
    thirds = (Pool((0, 3, 6), 8, 2048), Pool((1, 4), 6, 2048), Pool((2, 5), 6, 2048))
    assert thirds == pools(9 * 1024)


def test_experts_too_large_for_one_buffer_are_refused_by_name() -> None:
    model = model_of(moe_layer(3, 8, 2, rows=4))

    with pytest.raises(
        BudgetError,
        match=r"blk\.3\.ffn_up_exps\.weight: 8 experts take 32\.0 KiB, one buffer of the device 31\.0 KiB "
        r"at most; use --device cpu",
    ):
        plan(model, parse_budget("90%"), most_buffer_bytes=31 * 1024)
    with pytest.raises(
        BudgetError, match=r"9 experts take 36\.0 KiB"
    ):  # one token's, and the spare
        plan(
            model_of(moe_layer(3, 8, 8, rows=4), moe_layer(4, 8, 8, rows=4)),
            parse_budget("90%"),
            most_buffer_bytes=35 * 1024,
        )
    with pytest.raises(BudgetError, match=r"17 experts take 68\.0 KiB"):
        two_layers(model, most_buffer_bytes=67 * 1024)
    assert "resident" == plan(model, parse_budget("100%"), most_buffer_bytes=1).kind


AUTO = parse_budget("auto")
LARGE = model_of(*(moe_layer(index, 64, 4, rows=16) for index in range(8)), other_bytes=10 * MIB)


def auto(available: int) -> Placement:
    return plan(LARGE, AUTO, available_bytes=available, reserve_bytes=3 * MIB)


def test_auto_keeps_all_experts_when_everything_fits() -> None:
    enough = LARGE.total_bytes + 3 * MIB

    assert "resident" == auto(enough).kind
    assert "slotted" == auto(enough - 1).kind


def test_auto_leaves_room_for_the_other_weights_the_reserve_and_the_spare_slots() -> None:
    placement = auto(20 * MIB)

    assert "slotted" == placement.kind
    assert LARGE.layers[0].expert_bytes == placement.spare_bytes
    assert 20 * MIB - 10 * MIB - 3 * MIB - placement.spare_bytes == placement.budget_bytes


def test_auto_leaves_room_for_the_spare_slot_of_each_pool() -> None:
    one = auto(20 * MIB)
    several = plan(
        LARGE,
        AUTO,
        available_bytes=20 * MIB,
        reserve_bytes=3 * MIB,
        most_buffer_bytes=64 * 16 * 1024,
    )

    assert 1 == len(one.pools) < len(several.pools)
    assert several.used_bytes + several.spare_bytes <= 7 * MIB
    assert one.slots - len(several.pools) <= several.slots < one.slots


@many
@given(models(), models(), shares)
def test_joined_placements_add_up(first: ModelMap, second: ModelMap, share: Fraction) -> None:
    parts = [
        (name, model, plan(model, nbytes(budget_between(model, share))))
        for name, model in (("A", first), ("B", second))
    ]
    joined = join(parts)
    placements = [placed for _, _, placed in parts]

    assert sum(p.budget_bytes for p in placements) == joined.budget_bytes
    assert sum(p.smallest_bytes for p in placements) == joined.smallest_bytes
    assert joined.used_bytes <= joined.budget_bytes
    n_experts = [sum(layer.n_expert for layer in model.layers) for _, model, _ in parts]
    held = sum(p.residency * n for p, n in zip(placements, n_experts, strict=True))
    assert pytest.approx(held / sum(n_experts)) == joined.residency
    if "slotted" in {p.kind for p in placements}:
        assert "slotted" == joined.kind
        assert placements[0].slots + placements[1].slots == joined.slots
        assert {n for n, _, p in parts if p.pools} == {pool.device for pool in joined.pools}
        assert sum(p.staging_bytes for p in placements) == joined.staging_bytes
        resident = sum(p.used_bytes for p in placements if p.kind == "resident")
        slots = sum(pool.slots * pool.slot_bytes for pool in joined.pools)
        staging = joined.staging_bytes * joined.staging_buffers
        assert resident + slots + staging == joined.used_bytes
    else:
        assert ("resident", ()) == (joined.kind, joined.pools)


def test_a_joined_placement_says_which_device_holds_what() -> None:
    model = model_of(*(moe_layer(index, 8, 2) for index in range(4)))
    placed = plan(model, parse_budget("42KiB"))
    full = plan(model, parse_budget("100%"))

    said = describe(join([("A", model, placed), ("B", model, full)]))

    assert "layers of equal shape share them on each device, all fit on B" in said
    assert "  layers 0-3: together 17 slots of 2.0 KiB on A" in said


def test_auto_is_refused_when_too_little_is_left_or_known() -> None:
    with pytest.raises(BudgetError, match=r"auto leaves 0 B, which is below the .* free memory"):
        auto(12 * MIB)
    with pytest.raises(OptionError, match="free memory is unknown; give a size"):
        plan(LARGE, AUTO)


def test_a_placement_is_described_in_a_few_lines() -> None:
    model = model_of(*(moe_layer(index, 8, 2) for index in (0, 1, 3)), moe_layer(4, 8, 2, rows=2))

    assert (
        "slotted: 34.4% of experts have a slot, layers of equal shape share them\n"
        "  layers 0-1, 3: together 9 slots of 2.0 KiB\n"
        "  layer 4: 2 slots of 4.0 KiB\n"
        "  prompts: 1 x 16.0 KiB of staging\n"
        "  budget: 42.0 KiB of 42.0 KiB used; the smallest that works is 28.0 KiB"
    ) == describe(plan(model, parse_budget("42KiB")))
    assert "  layers 0-1, 3: together 3 slots of 2.0 KiB" in describe(
        plan(model, parse_budget("30KiB"))
    )
    assert "resident: all 80.0 KiB of experts fit" == describe(plan(model, parse_budget("100%")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GiB", 2 << 30),
        ("512 mib", 512 << 20),
        ("1.5Ki", 1536),
        ("3TiB", 3 << 40),
        ("2GB", 2 * 10**9),
        (" 2m ", 2 * 10**6),
        ("10kB", 10_000),
        ("123456", 123456),
        ("7B", 7),
        ("0.3", 0),
    ],
)
def test_sizes_are_read_in_both_kinds_of_unit(text: str, expected: int) -> None:
    assert expected == parse_budget(text).nbytes


def test_shares_are_read_exactly() -> None:
    assert Fraction(1, 4) == parse_budget("25%").share
    assert Fraction(21, 1000) == parse_budget(" 2.1 % ").share
    assert Fraction(1) == parse_budget("100%").share
    assert parse_budget("AUTO").is_auto


@pytest.mark.parametrize(
    "text",
    [
        *("", "lots", "-1", "-5%", "101%", "100.1%", "1e9", "nan", "inf%", "2 G iB", "1ib", "1i"),
        *("GiB", "25%%", "5%b", "0x10", "1_000", "٣GiB", "1,5GiB", "9" * 40, "9999999TiB"),
        "1" * 10**6,
    ],
)
def test_what_is_no_size_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_budget(text)

    assert 1 == len(str(refused.value).splitlines())
    assert len(str(refused.value)) < 140
    assert "; use " in str(refused.value)


@many
@given(st.text(max_size=12))
def test_any_text_is_a_budget_or_an_option_error(text: str) -> None:
    try:
        budget = parse_budget(text)
    except OptionError as error:
        assert 1 == len(str(error).splitlines())  # noqa: PT017
    else:
        assert budget.is_auto or (budget.nbytes or budget.share or 0) >= 0


@many
@given(st.integers(0, 1 << 50))
def test_a_size_shown_rounded_up_is_enough(count: int) -> None:
    shown = parse_budget(format_bytes(count, up=True)).nbytes

    assert shown is not None
    assert count <= shown <= count + max(count // 10, 1)
