"""Logits do not depend on the budget: every family, weight type, batch shape, source and policy."""

from __future__ import annotations

import threading
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.runtime import placement
from speculoe_local.runtime.llama import Shape
from speculoe_local.runtime.modelmap import ModelMap
from tests.models.fixtures import TinyModel
from tests.models.tiny import MOE_FAMILIES, split
from tests.runtime.reference import PROMPT, Logits, answer, opened, run

QUANTS = ("F16", "Q8_0", "Q4_K", "MXFP4", "Q4_0")


def shape(n_ubatch: int = 64, n_threads: int = 1, n_seq: int = 1) -> Shape:
    return Shape(
        n_ctx=256, n_batch=max(64, n_ubatch), n_ubatch=n_ubatch, n_threads=n_threads, n_seq=n_seq
    )


def budgets(path: Path) -> list[str]:
    """In bytes: the smallest that works, an odd one, own slots for each layer, nearly all."""
    model = ModelMap.read(path)
    smallest = placement.plan(model, placement.parse_budget("100%")).smallest_bytes
    shares = (Fraction(0), Fraction(37, 100), Fraction(7, 10), Fraction(97, 100))
    return [str(smallest + int(share * (model.routed_bytes - smallest))) for share in shares]


@cache
def resident(path: Path, of: Shape) -> Logits:
    return run(path, "100%", of)[0]


def assert_equal(expected: Logits, got: Logits) -> None:
    assert expected.tobytes() == got.tobytes(), f"differ by {np.abs(expected - got).max()}"


@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("n_ubatch", [1, 8, 64])
def test_every_family_gives_the_resident_logits_at_any_budget(
    family: str, n_ubatch: int, tiny_model: TinyModel
) -> None:
    path = tiny_model(family)
    of = shape(n_ubatch)
    expected = resident(path, of)

    for budget in budgets(path):
        got, stats = run(path, budget, of)

        assert_equal(expected, got)
        assert 0 < stats.requests
        assert stats.hits < stats.requests


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", ["qwen3moe", "deepseek2-fused"])
def test_every_weight_type_gives_the_resident_logits(
    family: str, quant: str, tiny_model: TinyModel
) -> None:
    path = tiny_model(family, quant)
    expected = resident(path, shape())

    for budget in budgets(path):
        got, stats = run(path, budget, shape())

        assert_equal(expected, got)
        # What llama.cpp would repack on this machine is repacked in the slots too, or bits differ.
        assert (stats.repacked > 0) == (quant in ("Q4_K", "MXFP4", "Q4_0"))


@pytest.mark.parametrize("source", ["buffered", "direct", "mapped"])
@pytest.mark.parametrize("policy", ["learned", "decayed", "lru"])
def test_sources_and_policies_change_no_logits(
    source: str, policy: str, tiny_model: TinyModel
) -> None:
    path = tiny_model("qwen3moe")

    for budget in budgets(path):
        got, stats = run(path, budget, shape(), source=source, policy=policy)

        assert_equal(resident(path, shape()), got)
        assert stats.source == source


def test_compute_and_upload_threads_change_no_logits(tiny_model: TinyModel) -> None:
    path = tiny_model("bailingmoe")
    expected = resident(path, shape(n_threads=2))

    for upload_threads in (1, 3):
        got, _ = run(path, budgets(path)[1], shape(n_threads=2), upload_threads=upload_threads)

        assert_equal(expected, got)


def test_a_split_model_gives_the_logits_of_the_whole(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = tiny_model("qwen3moe")
    copy = tmp_path / "model.gguf"
    copy.write_bytes(whole.read_bytes())
    shards = split(copy, 3)

    for budget in budgets(whole):
        got, _ = run(shards[0], budget, shape())

        assert_equal(resident(whole, shape()), got)


def test_two_sequences_decoded_together_equal_the_resident_run(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    of = shape(n_seq=2)

    def two(budget: str, n_parallel: int) -> Logits:
        options = {} if budget == "100%" else {"n_parallel": n_parallel}
        with opened(path, budget, of, **options) as (context, _, model):
            prompts = [model.vocab.tokenize(text) for text in ("one two three", "why is it so?")]
            tokens = []
            for sequence, prompt in enumerate(prompts):
                assert 0 == context.decode(prompt, 0, sequence=sequence)
                tokens.append(int(context.logits().argmax()))
            rows = []
            for step in range(8):
                batch = [
                    (token, len(prompt) + step, sequence)
                    for sequence, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
                ]
                assert 0 == context.decode_many(batch)
                both = [context.logits(row).copy() for row in (0, 1)]
                rows += both
                tokens = [int(row.argmax()) for row in both]
            return np.stack(rows)

    expected = two("100%", 1)
    for budget in budgets(path):
        for n_parallel in (1, 2):  # streamed, and from slots
            assert_equal(expected, two(budget, n_parallel))


def test_two_engines_of_different_budgets_run_side_by_side(tiny_model: TinyModel) -> None:
    paths = (tiny_model("qwen3moe"), tiny_model("gpt-oss"))
    got: dict[int, Logits] = {}

    def work(index: int, path: Path, budget: str) -> None:
        got[index] = run(path, budget, shape(), n_tokens=40)[0]

    threads = [
        threading.Thread(target=work, args=(i, paths[i % 2], budgets(paths[i % 2])[i // 2]))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for index in range(4):
        assert_equal(run(paths[index % 2], "100%", shape(), n_tokens=40)[0], got[index])


def test_two_contexts_take_turns_on_one_set_of_slots(tiny_model: TinyModel) -> None:
    from contextlib import closing

    from speculoe_local.runtime.llama import Context

    path = tiny_model("qwen3moe")
    expected = resident(path, shape())

    with opened(path, budgets(path)[1], shape()) as (first, slots, model):
        assert slots is not None
        prompt = model.vocab.tokenize("something else entirely")
        with closing(Context(model, shape())) as second:
            slots.attach(second.handle)
            for context in (first, second):
                assert_equal(expected, answer(context, model.vocab.tokenize(PROMPT), 12))
                context.clear()
                answer(context, prompt, 3)
            slots.detach(second.handle)


def test_a_context_that_is_watched_runs_upstreams_graph_on_mapped_experts(
    tiny_model: TinyModel,
) -> None:
    """imatrix and calibration count experts by their ids: they must see the true ones."""
    from contextlib import closing

    from speculoe_local.runtime.llama import Context

    path = tiny_model("qwen3moe")
    seen: list[int] = []

    def watch(tensor: int, ask: bool) -> bool:
        seen.append(tensor)
        return not ask

    with opened(path, budgets(path)[1], shape()) as (_, slots, model):
        assert slots is not None
        with closing(Context(model, shape(), watch=watch)) as watched:
            slots.attach(watched.handle)
            got = answer(watched, model.vocab.tokenize(PROMPT), 12)
            slots.detach(watched.handle)

        assert_equal(resident(path, shape()), got)
        assert len(seen) > 100
        assert 0 == slots.stats().uploaded_bytes


def test_a_prompt_leaves_the_decode_working_set_alone(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")

    with opened(path, budgets(path)[2], shape()) as (context, slots, model):
        assert slots is not None
        answer(context, model.vocab.tokenize("a b c"), 30)
        context.clear()
        before = slots.stats()
        long = model.vocab.tokenize("Now for something completely different, at length. " * 2)
        assert 0 == context.decode(long[:60], 0, logits=False)

        during = slots.stats().since(before)

        # No logits were asked for, so not even the last layer's single row went through slots.
        assert (0, 0) == (during.requests, during.uploads)
        assert during.staged_bytes == during.uploaded_bytes > 0
