"""The sampler chain: what each setting does to the choice of the next token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from speculoe_local.runtime import EngineOptions, Sampling
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.lib import llama
from speculoe_local.runtime.opened import Opened, open_model
from speculoe_local.runtime.sampler import KNOWN_SAMPLERS, Sampler, make_chain
from tests.models.fixtures import TinyModel

GREEDY = Sampling(temp=0)


@pytest.fixture(scope="module")
def opened(tiny_model: TinyModel) -> Iterator[Opened]:
    with closing(
        open_model(tiny_model("llama"), options=EngineOptions(threads=1, ctx=256))
    ) as found:
        assert 0 == found.context.decode([5, 6, 7], 0)
        yield found


def draw(opened: Opened, sampling: Sampling, n: int = 40) -> list[int]:
    with closing(Sampler(sampling, opened.model.vocab)) as sampler:
        return [sampler.sample(opened.context.handle) for _ in range(n)]


def test_greedy_takes_the_likeliest(opened: Opened) -> None:
    assert {int(opened.context.logits().argmax())} == set(draw(opened, GREEDY))


def test_a_seed_repeats_the_draws_and_another_one_does_not(opened: Opened) -> None:
    hot = Sampling(temp=2.0, seed=1, min_p=0)

    assert draw(opened, hot) == draw(opened, hot)
    assert draw(opened, hot) != draw(opened, replace(hot, seed=2))


@pytest.mark.parametrize(
    "penalty",
    [{"repeat_penalty": 100.0}, {"frequency_penalty": 100.0}, {"presence_penalty": 100.0}],
)
def test_a_penalty_keeps_what_was_drawn_from_coming_again(
    penalty: dict[str, float], opened: Opened
) -> None:
    found = draw(opened, replace(GREEDY, **penalty), 20)  # type: ignore[arg-type]

    assert len(found) == len(set(found))


def test_a_penalty_looks_as_far_back_as_it_was_told(opened: Opened) -> None:
    found = draw(opened, replace(GREEDY, presence_penalty=100.0, repeat_last_n=2), 9)

    assert found[:3] * 3 == found
    assert 3 == len(set(found))


@pytest.mark.parametrize(
    "narrow",
    [{"top_k": 1}, {"top_p": 0.001}, {"min_p": 1.0}, {"typical_p": 0.001}, {"top_n_sigma": 0.001}],
)
def test_what_is_narrowed_to_one_leaves_no_choice(narrow: dict[str, float], opened: Opened) -> None:
    open_ = Sampling(temp=2.0, seed=3, top_k=0, top_p=1.0, min_p=0.0)

    assert 5 < len(set(draw(opened, open_)))
    assert 1 == len(set(draw(opened, replace(open_, **narrow))))  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_draws_repeatably(version: int, opened: Opened) -> None:
    sampling = Sampling(seed=4, mirostat=version, mirostat_tau=3.0)

    assert draw(opened, sampling) == draw(opened, sampling)


def test_only_the_samplers_that_were_named_take_part(opened: Opened) -> None:
    open_ = Sampling(temp=2.0, seed=3, top_k=1)

    assert 1 == len(set(draw(opened, replace(open_, samplers=("top_k", "temperature")))))
    assert 1 < len(set(draw(opened, replace(open_, samplers=("temperature",)))))
    for name in KNOWN_SAMPLERS:
        draw(opened, replace(open_, samplers=(name,), dry_multiplier=0.8, xtc_probability=0.5), 2)


def test_an_unknown_sampler_is_refused(opened: Opened) -> None:
    with pytest.raises(OptionError, match="sampler 'guess' is not known; use some of penalties"):
        draw(opened, Sampling(samplers=("guess",)))


def test_a_bias_forbids_and_forces(opened: Opened) -> None:
    likeliest = int(opened.context.logits().argmax())

    def first(bias: dict[int, float]) -> int:
        chain = make_chain(GREEDY, opened.model.vocab, bias=bias)
        token: int = llama.llama_sampler_sample(chain, opened.context.handle, -1)
        llama.llama_sampler_free(chain)
        return token

    assert likeliest != first({likeliest: float("-inf")})
    assert 17 == first({17: 1000.0})
