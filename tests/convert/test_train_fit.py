"""What torch minimises is the divergence it says, and on pairs with a known answer it finds the answer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from speculoe_local.convert.passes import Link
from speculoe_local.convert.train.adapter import fit_adapter, loss_of
from speculoe_local.convert.train.descent import Base, Target, descend, divergence
from speculoe_local.convert.train.network import fit_mlp
from speculoe_local.convert.train.settings import Settings
from speculoe_local.convert.train.spool import Pairs, spool
from speculoe_local.runtime.capture import LayerRecord
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.mlp import Mlp
from speculoe_local.runtime.routers import Gating

Floats = npt.NDArray[np.float32]
D, E, N = 32, 8, 3000
QUICK = Settings(epochs=12, rank=4, narrow=1, expand=2, batch=128, rate=1e-2, dropped=0.0)


def gate_of(rng: np.random.Generator, **more: object) -> Gate:
    router = rng.normal(size=(E, D), scale=D**-0.5).astype(np.float32)
    return Gate(router=router, norm=np.ones(D, np.float32), n_used=2, **more)  # type: ignore[arg-type]


def target_of(gate: Gate, x: Floats, logits: Floats) -> Target:
    pairs = Pairs(x.astype(np.float16), logits.astype(np.float32))
    return Target.of(pairs, len(x) * 7 // 8, gate.gating, gate.bias)


def recall(guess: Floats, truth: Floats, k: int = 2) -> float:
    a, b = (np.argsort(-logits, axis=1)[:, :k] for logits in (guess, truth))
    return float((a[:, :, None] == b[:, None, :]).any(2).mean())


# --- the loss


def test_the_divergence_of_softmax_is_that_of_the_distributions() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 5, E))
    p, q = (np.exp(2 * z) / np.exp(2 * z).sum(1, keepdims=True) for z in (a, b))
    expected = (p * np.log(p / q)).sum(1).mean()

    found = divergence(torch.from_numpy(a), torch.from_numpy(b), Gating.SOFTMAX, 2.0)

    assert expected == pytest.approx(float(found), rel=1e-6)


def test_the_divergence_of_sigmoid_is_that_of_each_experts_yes_or_no() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 5, E))
    p, q = (1 / (1 + np.exp(-3 * z)) for z in (a, b))
    expected = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(1).mean()

    found = divergence(torch.from_numpy(a), torch.from_numpy(b), Gating.SIGMOID, 3.0)

    assert expected == pytest.approx(float(found), rel=1e-6)


@pytest.mark.parametrize("gating", list(Gating))
def test_nothing_diverges_from_itself_and_all_else_does(gating: Gating) -> None:
    a, b = torch.randn(2, 5, E, generator=torch.Generator().manual_seed(0))

    assert 0 == pytest.approx(float(divergence(a, a, gating, 1.0)), abs=1e-6)
    assert float(divergence(a, b, gating, 1.0)) > 0.1


def test_the_loss_is_sharpened_where_experts_hardly_differ_and_never_dulled() -> None:
    rng = np.random.default_rng(0)
    gate, x = gate_of(rng), rng.normal(size=(N, D)).astype(np.float32)
    logits = x @ gate.router.T

    assert 1.0 == target_of(gate, x, 10 * logits).sharpness
    flat = target_of(gate, x, logits / 100)
    assert 1.0 == pytest.approx(flat.sharpness * flat.spread)


# --- descent


def test_descent_ends_where_the_check_was_least_and_stops_early() -> None:
    part = torch.zeros(1, requires_grad=True)
    seen: list[float] = []

    def epoch() -> Iterator[Tensor]:
        yield (part - 10).square().sum()

    def check() -> float:  # better up to 0.25, then worse
        seen.append(float(part.detach()))
        return abs(float(part.detach()) - 0.25)

    least = descend([part], epoch, check, Settings(epochs=100, rate=0.1), steps=1)

    best = min(seen, key=lambda value: abs(value - 0.25))
    assert best == float(part.detach())
    assert least == abs(best - 0.25)
    assert seen.index(best) + 4 == len(seen)  # three that were no better, and none after


def test_descent_that_only_harms_leaves_everything_as_it_was() -> None:
    part = torch.zeros(1, requires_grad=True)

    least = descend(
        [part],
        lambda: iter([(part - 10).square().sum()]),
        lambda: abs(float(part.detach())),
        Settings(epochs=9, rate=0.1),
        steps=1,
    )

    assert (0.0, 0.0) == (least, float(part.detach()))


# --- the adapter


@pytest.mark.parametrize("gating", [Gating.SOFTMAX, Gating.SIGMOID])
def test_an_adapter_finds_the_low_rank_change_that_is_there(gating: Gating) -> None:
    rng = np.random.default_rng(0)
    gate = gate_of(rng, gating=gating, bias=rng.normal(size=E).astype(np.float32))
    assert gate.bias is not None
    x = rng.normal(size=(N, D)).astype(np.float32)
    change = (rng.normal(size=(E, 2)) @ rng.normal(size=(2, D)) / 4).astype(np.float32)
    truth = x @ (gate.router + change).T
    target, base = target_of(gate, x, truth), Base.of("quasi-hidden", gate)

    made = fit_adapter(target, base, QUICK, block=3).added_to(gate)

    rows = slice(target.n_train, None)
    assert recall(x[rows] @ gate.router.T + gate.bias, truth[rows] + gate.bias) < 0.7
    assert made.bias is not None
    assert recall(x[rows] @ made.router.T + made.bias, truth[rows] + gate.bias) > 0.95
    assert loss_of(target, Base.of("quasi-hidden", made)) < loss_of(target, base) / 20


def test_an_adapter_has_the_rank_that_was_asked_for_and_no_more_than_there_are_experts() -> None:
    rng = np.random.default_rng(0)
    gate, x = gate_of(rng), rng.normal(size=(400, D)).astype(np.float32)
    target, base = target_of(gate, x, x @ gate.router.T), Base.of("ridge", gate)
    for asked, expected in ((1, 1), (64, E)):
        adapter = fit_adapter(target, base, replace(QUICK, rank=asked, epochs=1), 0)
        assert ((E, expected), (expected, D)) == (adapter.up.shape, adapter.down.shape)
        assert "ridge" == adapter.base


def test_where_nothing_is_to_be_learned_an_adapter_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    gate, x = gate_of(rng), rng.normal(size=(400, D)).astype(np.float16).astype(np.float32)
    target = target_of(gate, x, x @ gate.router.T)

    adapter = fit_adapter(target, Base.of("quasi-hidden", gate), QUICK, 0)

    assert not adapter.up.any() and not adapter.bias.any()


# --- the network


def curved(rng: np.random.Generator, gate: Gate) -> tuple[Floats, Floats]:
    """Inputs, and logits that no matrix makes of them."""
    x = rng.normal(size=(N, D)).astype(np.float32)
    return x, (x @ gate.router.T + 6 * np.abs(x[:, :1]) * gate.router[:, 0]).astype(np.float32)


def rates(alone: bool) -> list[tuple[float, float]]:
    """Recall of the base and of the network, of two layers with different routers and spreads."""
    rng = np.random.default_rng(0)
    gates = {4: gate_of(rng), 9: gate_of(rng, bias=rng.normal(size=E).astype(np.float32))}
    data = {block: curved(rng, gate) for block, gate in gates.items()}
    data[9] = (data[9][0], data[9][1][:, ::-1] * np.float32(3))
    targets = {block: target_of(gates[block], *data[block]) for block in gates}
    bases = {block: Base.of("none" if alone else "ridge", gate) for block, gate in gates.items()}
    shares: list[float] = []

    net = fit_mlp(targets, bases, E, replace(QUICK, batch=256), shares.append)

    assert shares == sorted(shares) and shares[-1] <= 1.0
    found = []
    for block, gate in gates.items():
        x, truth = (array[targets[block].n_train :] for array in data[block])
        bias = np.zeros(E, np.float32) if gate.bias is None else gate.bias
        mlp = Mlp(net.shared, net.embeddings[block], net.scales[block], adds=not alone)
        made = replace(gate, mlp=mlp)
        found.append(
            (
                recall(x @ gate.router.T + bias, truth + bias),
                recall(made.logits(x) + bias, truth + bias),
            )
        )
    return found


def test_one_network_learns_what_bends_in_several_layers() -> None:
    for base, network in rates(alone=False):
        assert network > base + 0.1


def test_a_network_alone_learns_the_routers_too() -> None:
    for _, network in rates(alone=True):
        assert network > 0.6  # chance is 0.25


# --- pairs on disk


def record(block: int, n: int, rng: np.random.Generator) -> LayerRecord:
    return LayerRecord(
        block=block,
        residual=rng.normal(size=(n, D)).astype(np.float32),
        logits=rng.normal(size=(n, E)).astype(np.float32),
        ids=rng.integers(0, E, (n, 2)).astype(np.int32),
        weights=np.full((n, 2), 0.5, np.float32),
        outputs=None,
        shared=None,
    )


def test_pairs_are_what_predicts_and_what_the_router_said(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gate = gate_of(rng)
    chain = [Link(None, 0, gate, "first"), Link(0, 1, gate), Link(1, 2, gate)]
    vectors = {block: rng.normal(size=(E, D)).astype(np.float16) for block in range(3)}
    with spool(chain, vectors, [1, 2], 8, tmp_path) as kept:
        windows = [[record(block, 4, rng) for block in range(3)] for _ in range(2)]
        for number, window in enumerate(windows):
            kept.begin(4 * number)
            for one in window:
                kept.take(one)
        pairs = dict(kept.pairs)
        assert [] == list(tmp_path.iterdir())  # it has no name that could be left behind

    assert [1, 2] == sorted(pairs)
    for number, window in enumerate(windows):
        rows = slice(4 * number, 4 * number + 4)
        for block in (1, 2):
            before = window[block - 1]
            assert before.residual is not None
            mean = vectors[block - 1][before.ids].astype(np.float32).mean(axis=1)
            expected = gate.normed(before.residual + mean)
            np.testing.assert_allclose(pairs[block].x[rows], expected, rtol=2e-3, atol=2e-3)
            np.testing.assert_array_equal(window[block].logits, pairs[block].logits[rows])


def test_a_disk_that_is_too_small_is_refused_with_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gate_of(np.random.default_rng(0))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    row = 2 * D + 4 * E

    with (
        pytest.raises(
            OptionError,
            match=f"99 tokens take {99 * row} bytes of disk .* 1000 are free; "
            f"use --tokens {1000 // row}",
        ),
        spool([Link(0, 1, gate)], {}, [1], 99, tmp_path),
    ):
        pass  # fmt: skip


@pytest.mark.parametrize("name", ["epochs", "rank", "narrow", "expand", "batch"])
def test_settings_below_their_least_are_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"{name} is 0; 1 is the least"):
        Settings(**{name: 0})
    with pytest.raises(OptionError, match="seed is -1"):
        Settings(seed=-1)
