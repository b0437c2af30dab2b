"""Perplexity is what its definition says, and the embedded model's is near the dense model's."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert.embedded import dense_model, embedded_model
from speculoe_local.convert.perplexity import opened, perplexity, token_nll
from speculoe_local.runtime.errors import ModelError, OptionError
from tests.models.tiny import build

HELD_OUT = Path(__file__).with_name("heldout.txt")
RATIO_LIMIT = 1.20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("perplexity") / "tiny.gguf")


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    expected = np.full(70, math.log(50))

    assert np.allclose(expected, token_nll(np.full((70, 50), 3.0), np.arange(70) % 50))


def test_a_certain_token_costs_nothing_and_an_excluded_one_its_margin() -> None:
    logits = np.array([[100.0, 0.0, 0.0]], dtype=np.float32)

    assert 0.0 == pytest.approx(token_nll(logits, np.array([0]))[0])
    assert 100.0 == pytest.approx(token_nll(logits, np.array([1]))[0])


def test_perplexity_is_the_mean_over_the_second_half_of_each_window(tiny: Path) -> None:
    text = "the cat and the hat sat on it. " * 6
    got = perplexity(tiny, text, window=32, threads=1)
    with opened(tiny, 32, 1) as model:
        ids = model.tokenize(text)
        count = len(ids) // 32
        losses = []
        for window in ids[: count * 32].reshape(count, 32):
            scores = model.logits(window, first=0).astype(np.float64)
            shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            losses += [-math.log(shares[at - 1, window[at]]) for at in range(16, 32)]

    assert (count, 16 * count) == (got.windows, got.scored)
    assert got.value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_a_text_that_fills_no_window_is_refused(tiny: Path) -> None:
    with pytest.raises(OptionError, match="2 tokens, 512 fill one window"):
        perplexity(tiny, "ab", threads=1)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        perplexity(tmp_path / "none.gguf", "text")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF" + bytes(60))

    with pytest.raises(ModelError, match="cannot load it"):
        perplexity(other, "text")


def test_the_embedded_model_is_near_the_dense_one_on_text_it_was_not_made_from() -> None:
    text = HELD_OUT.read_text(encoding="utf-8")
    # One thread: ggml's threads spin at barriers, so two on a busy machine take many times longer.
    dense = perplexity(dense_model(), text, max_windows=3, threads=1)
    moe = perplexity(embedded_model(), text, max_windows=3, threads=1)

    assert 768 == dense.scored == moe.scored
    assert 1.0 < moe.value / dense.value < RATIO_LIMIT
