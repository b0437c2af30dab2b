"""A repacked model computes what the dense one does when every expert runs, and less when fewer do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from speculoe_local.convert.perplexity import opened
from speculoe_local.convert.repack import quantize_q8_0, repack
from speculoe_local.convert.split import Split
from speculoe_local.runtime.errors import ModelError
from tests.convert.test_split import random_split
from tests.models.tiny import build

IDS = np.arange(3, 67, dtype=np.int32)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("repack") / "dense.gguf")


def logits(path: Path) -> NDArray[np.float32]:
    with opened(path, len(IDS), 1) as model:
        return np.array(model.logits(IDS, first=0))


def distance(dense: Path, split: Split, out: Path) -> float:
    """Root mean square difference of the logits, in standard deviations of the dense ones.

    Two layouts of the same weights are about 0.02 apart: activations are quantised in blocks.
    """
    repack(dense, split, out)
    expected, got = logits(dense), logits(out)
    return float(np.sqrt(((expected - got) ** 2).mean()) / expected.std())


@pytest.mark.parametrize(("shared", "width"), [(64, 16), (96, 8)])
def test_all_experts_together_are_the_dense_model(
    dense: Path, tmp_path: Path, shared: int, width: int
) -> None:
    every = random_split(shared=shared, width=width, used=4)

    assert distance(dense, every, tmp_path / "moe.gguf") < 0.04


def test_fewer_experts_are_farther_from_the_dense_model(dense: Path, tmp_path: Path) -> None:
    one, three = (
        distance(dense, random_split(used=used), tmp_path / "moe.gguf") for used in (1, 3)
    )

    assert 0.04 < three < one


def test_a_gain_scales_its_neuron(dense: Path, tmp_path: Path) -> None:
    every = random_split(used=4)
    silent = replace(every, down_gain=np.zeros_like(every.down_gain))

    assert distance(dense, silent, tmp_path / "moe.gguf") > 0.2


def test_metadata_describes_the_experts_and_keeps_the_tokenizer(
    dense: Path, tmp_path: Path
) -> None:
    size = repack(dense, random_split(), tmp_path / "moe.gguf")
    before, after = gguf.GGUFReader(dense), gguf.GGUFReader(tmp_path / "moe.gguf")

    def value(key: str) -> object:
        return after.fields[key].contents()

    assert size == (tmp_path / "moe.gguf").stat().st_size
    assert "bailingmoe" == value("general.architecture")
    assert (4, 2, 16, 4) == tuple(
        value(f"bailingmoe.expert_{name}")
        for name in ("count", "used_count", "feed_forward_length", "shared_count")
    )
    assert value("bailingmoe.expert_weights_norm") is True
    assert "random" == value("speculoe.upcycle.dense")
    for key, field in before.fields.items():
        if key.startswith("tokenizer."):
            assert field.contents() == value(key), key
        elif key.startswith("llama."):
            assert field.contents() == value("bailingmoe." + key[6:]), key


def test_gate_and_up_rows_move_without_being_requantised(dense: Path, tmp_path: Path) -> None:
    split = random_split()
    repack(dense, split, tmp_path / "moe.gguf")
    before = {t.name: t for t in gguf.GGUFReader(dense).tensors}
    after = {t.name: t for t in gguf.GGUFReader(tmp_path / "moe.gguf").tensors}

    for part in ("ffn_gate", "ffn_up"):
        rows = before[f"blk.1.{part}.weight"].data
        assert (rows[split.shared[1]] == after[f"blk.1.{part}_shexp.weight"].data).all()
        assert (rows[split.experts[1]] == after[f"blk.1.{part}_exps.weight"].data).all()


def test_a_split_for_another_shape_is_refused(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"\(4, 64, 128\), the split is for \(3, 64, 128\)"):
        repack(dense, random_split(layers=3), tmp_path / "moe.gguf")


def test_a_split_without_a_whole_shared_expert_is_refused(dense: Path, tmp_path: Path) -> None:
    for shared, width in ((0, 32), (8, 30)):
        with pytest.raises(ModelError, match=f"{shared} shared neurons"):
            repack(dense, random_split(shared=shared, width=width), tmp_path / "moe.gguf")


def test_a_model_that_has_experts_already_is_refused(tmp_path: Path) -> None:
    moe = build("qwen3moe", tmp_path / "qwen.gguf")

    with pytest.raises(ModelError, match="architecture qwen3moe cannot be upcycled"):
        repack(moe, random_split(), tmp_path / "moe.gguf")


def test_q8_0_bytes_equal_the_reference(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((9, 96)).astype(np.float32)
    values[3] = 0

    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert (expected == quantize_q8_0(values)).all()
