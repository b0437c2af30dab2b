"""A split is a partition of the neurons, packs into the same bytes each time, and damage is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from speculoe_local.convert.embedded import shipped_split
from speculoe_local.convert.split import Split, flat_router, pack_split, unpack_split
from speculoe_local.runtime.errors import ModelError


def random_split(*, layers: int = 4, shared: int = 64, width: int = 16, used: int = 2) -> Split:
    rng = np.random.default_rng(5)
    neurons = shared + 4 * width
    order = np.stack([rng.permutation(neurons) for _ in range(layers)]).astype(np.int16)
    return Split(
        shared=order[:, :shared],
        experts=order[:, shared:].reshape(layers, 4, width),
        router=flat_router(rng.standard_normal((layers, 4, 64))),
        down_gain=np.ones((layers, neurons), dtype=np.float32),
        used=used,
        provenance={"dense": "random"},
    )


def test_packing_keeps_the_split_and_is_deterministic() -> None:
    split = random_split()
    again = unpack_split(pack_split(split))

    assert pack_split(split) == pack_split(replace(split))
    assert (split.shared == again.shared).all()
    assert (split.experts == again.experts).all()
    assert np.allclose(split.router, again.router, rtol=1e-3, atol=1e-5)
    assert (split.used, split.provenance) == (again.used, again.provenance)


def test_a_neuron_that_appears_twice_is_refused() -> None:
    split = random_split()
    experts = split.experts.copy()
    experts[2, 0, 0] = split.shared[2, 0]

    with pytest.raises(ModelError, match="layer 2 does not hold each of 128 neurons once"):
        replace(split, experts=experts)


def test_routers_that_are_not_finite_are_refused() -> None:
    split = random_split()
    router = split.router.copy()
    router[0, 0, 0] = np.nan

    with pytest.raises(ModelError, match="not finite"):
        replace(split, router=router)


def test_more_experts_per_token_than_there_are_is_refused() -> None:
    with pytest.raises(ModelError, match="5 experts per token, 1 to 4 possible"):
        random_split(used=5)


@pytest.mark.parametrize("packed", [b"", b"not a zip", pack_split(random_split())[:500]])
def test_bytes_that_are_no_split_are_refused(packed: bytes) -> None:
    with pytest.raises(ModelError, match="not a split"):
        unpack_split(packed)


def test_the_shipped_split_fits_the_shipped_model() -> None:
    packed = shipped_split()
    split = unpack_split(packed)

    assert 700_000 >= len(packed)
    assert (30, 16, 4) == (split.n_layers, split.n_experts, split.used)
    assert (576, 1536) == (split.n_embd, split.n_neurons)
    assert {"dense", "dense_sha256", "recipe", "texts"} <= set(split.provenance)


def test_a_flat_router_gives_the_same_order_of_experts() -> None:
    router = np.random.default_rng(1).standard_normal((1, 8, 32)) * 7
    token = np.random.default_rng(2).standard_normal(32)

    expected = (router[0] @ token).argsort()
    assert (expected == (flat_router(router)[0] @ token).argsort()).all()
