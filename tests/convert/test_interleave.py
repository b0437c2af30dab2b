"""The expert file holds every expert in one piece, aligned, and is refused beside any other model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from speculoe_local.convert import gguf_raw
from speculoe_local.convert.inspect import inspect
from speculoe_local.convert.interleave import interleave, reads_from_model
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.expertfile import ALIGNMENT, ExpertFile, expert_file_path
from speculoe_local.runtime.header import read_header
from speculoe_local.runtime.modelmap import ModelMap
from tests.models.fixtures import TinyModel
from tests.models.tiny import MOE_FAMILIES, build, split


def bytes_at(path: Path, offset: int, nbytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_matrix_of_every_expert_is_where_the_file_says(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = ModelMap.read(tiny_model(family))
    done = interleave(model.files[0], tmp_path / "experts.gguf")
    file = ExpertFile.read(done.path, model)

    for layer in model.layers:
        for matrix in layer.matrices:
            first, stride = file.place(layer.index, matrix.kind)
            for expert in range(layer.n_expert):
                expected = bytes_at(
                    matrix.path, matrix.expert_offset(expert), matrix.bytes_per_expert
                )
                assert expected == bytes_at(
                    done.path, first + expert * stride, matrix.bytes_per_expert
                )
    assert sum(layer.n_expert for layer in model.layers) == done.experts


def test_an_expert_is_one_aligned_read_instead_of_three(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    shares: list[float] = []
    done = interleave(tiny_model("qwen3moe"), tmp_path / "e.gguf", progress=shares.append)
    rows = ExpertFile.read(done.path, ModelMap.read(tiny_model("qwen3moe"))).layers[0]

    assert (3.0, 1.0) == (done.before.per_expert, done.after.per_expert)
    assert done.after.touched_bytes < done.before.touched_bytes
    assert (0, 0) == (rows.offset % ALIGNMENT, rows.stride % ALIGNMENT)
    assert rows.stride - ALIGNMENT < rows.nbytes <= rows.stride
    assert sorted(shares) == shares
    assert 1.0 == pytest.approx(shares[-1])


def test_a_fused_layout_takes_two_reads_before(tiny_model: TinyModel, tmp_path: Path) -> None:
    done = interleave(tiny_model("gemma4"), tmp_path / "experts.gguf")

    assert (2.0, 1.0) == (done.before.per_expert, done.after.per_expert)


def test_the_model_stays_as_it_is_and_names_its_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_model("gpt-oss"), model)
    before = model.read_bytes()
    done = interleave(model)

    assert before == model.read_bytes()
    assert tmp_path / "model.experts.gguf" == done.path == expert_file_path(model)
    found = inspect(model).expert_file
    assert found is not None
    assert ("matches", done.bytes) == (found.state, found.bytes)


def test_shards_share_one_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen3moe"), copy)
    whole = interleave(copy, tmp_path / "whole.gguf")
    shards = split(copy, 3)
    parts = interleave(shards[1])

    assert tmp_path / "model.experts.gguf" == parts.path
    tails = [bytes_at(path, read_header(path).data_offset, 1 << 30) for path in (whole.path, parts.path)]  # fmt: skip
    assert tails[0] == tails[1]


def test_the_file_of_a_finetune_is_refused(tmp_path: Path) -> None:
    one, other = (
        build("qwen3moe", tmp_path / f"{seed}.gguf", n_layer=2, seed=seed) for seed in (0, 1)
    )
    models = [ModelMap.read(path) for path in (one, other)]
    done = interleave(one)

    assert models[0].fingerprint == models[1].fingerprint
    ExpertFile.read(done.path, models[0])
    with pytest.raises(ModelError, match="experts of other weights"):
        ExpertFile.read(done.path, models[1])


def test_files_that_are_none_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))
    done = interleave(model.files[0], tmp_path / "experts.gguf")
    whole = done.path.read_bytes()

    with pytest.raises(ModelError, match="is no expert file"):
        ExpertFile.read(tiny_model("gpt-oss"), model)
    with pytest.raises(ModelError, match="belongs to another model"):
        ExpertFile.read(done.path, ModelMap.read(tiny_model("gpt-oss")))
    done.path.write_bytes(whole[:-ALIGNMENT])
    with pytest.raises(ModelError, match="is truncated"):
        ExpertFile.read(done.path, model)
    done.path.write_bytes(whole.replace(b"up,gate,down", b"up,gate,gate"))
    with pytest.raises(ModelError, match="holds layer 0 as"):
        ExpertFile.read(done.path, model)


def test_a_dense_model_and_the_model_itself_are_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="has no experts to lay out"):
        interleave(tiny_model("llama"))
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen3moe"), model)
    with pytest.raises(OptionError, match="is the model itself"):
        interleave(model, model)
    assert [model] == list(tmp_path.iterdir())


def test_an_interruption_leaves_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interleave(tiny_model("qwen3moe"), tmp_path / "experts.gguf", progress=stop)
    assert [] == list(tmp_path.iterdir())


def test_the_bytes_between_experts_are_zero(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = ModelMap.read(tiny_model("gpt-oss"))
    done = interleave(model.files[0], tmp_path / "experts.gguf")
    tensor = gguf_raw.read_gguf(done.path).tensor("blk.1.experts")

    assert not tensor.rows[:, model.layer(1).expert_bytes :].any()
    assert reads_from_model(model) == done.before
