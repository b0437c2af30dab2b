"""With an expert file beside it, a model gives the same bits, from a third of the reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from speculoe_local.convert.interleave import interleave
from speculoe_local.runtime import Engine, EngineOptions, Sampling
from speculoe_local.runtime.slots import SlotStats
from tests.models.fixtures import TinyModel
from tests.models.tiny import build


def answer(model: Path, source: str) -> tuple[str | None, SlotStats]:
    options = EngineOptions(expert_budget="60%", source=source, predict="none")
    with Engine.open(model, options=options) as engine:
        *_, last = engine.generate(
            "the cat and the hat", sampling=Sampling(temp=0), max_tokens=12, logits_hash=True
        )
        assert engine._slots is not None
        return last.stats.logits_sha256, engine._slots.stats()


@pytest.mark.parametrize("source", ["buffered", "direct", "mapped"])
@pytest.mark.parametrize(
    ("family", "quant", "pieces"),
    [("qwen3moe", "Q8_0", 3), ("qwen3moe", "Q4_K", 3), ("gpt-oss", "MXFP4", 3), ("gemma4", "Q8_0", 2)],
)  # fmt: skip
def test_one_read_fetches_an_expert_and_no_bit_changes(
    family: str, quant: str, pieces: int, source: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_model(family, quant), model)
    expected, before = answer(model, source)
    interleave(model)
    found, after = answer(model, source)

    assert expected == found
    assert before.uploads > 0
    assert pieces * before.uploads == before.reads
    assert after.uploads == after.reads


def test_the_expert_file_of_other_weights_is_not_used(tmp_path: Path) -> None:
    one, other = (
        build("qwen3moe", tmp_path / f"{seed}.gguf", n_layer=2, seed=seed) for seed in (0, 1)
    )
    expected, _ = answer(one, "buffered")
    interleave(other, tmp_path / "0.experts.gguf")
    found, stats = answer(one, "buffered")

    assert expected == found
    assert 3 * stats.uploads == stats.reads
