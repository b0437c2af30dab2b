"""Raw GGUF parts survive a round trip, and damaged files are refused with one clear line."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from speculoe_local.convert import gguf_raw as raw
from speculoe_local.runtime.errors import ModelError
from tests.models.tiny import build


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("raw") / "dense.gguf")


def rewritten(file: raw.RawGguf) -> bytes:
    out = io.BytesIO()
    tensors = [
        raw.NewTensor(t.name, t.shape, t.kind, partial(getattr, t, "rows"))
        for t in file.tensors.values()
    ]
    size = raw.write_gguf(out, file.metadata, tensors)
    assert size == len(out.getvalue()) == raw.gguf_size(file.metadata, tensors)
    return out.getvalue()


def test_a_rewritten_file_reads_the_same_with_the_reference_reader(
    dense: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(rewritten(raw.read_gguf(dense)))

    expected, got = gguf.GGUFReader(dense), gguf.GGUFReader(copy)
    assert list(expected.fields) == list(got.fields)
    for key, field in expected.fields.items():
        assert field.contents() == got.fields[key].contents(), key
    assert [t.name for t in expected.tensors] == [t.name for t in got.tensors]
    for one, other in zip(expected.tensors, got.tensors, strict=True):
        assert one.tensor_type == other.tensor_type
        assert one.shape.tolist() == other.shape.tolist()
        assert one.data.tobytes() == other.data.tobytes(), one.name


def test_values_of_each_kind_are_read_back() -> None:
    assert "grün" == raw.text("grün").scalar()
    assert 7 == raw.u32(7).scalar()
    assert 0.5 == raw.f32(0.5).scalar()
    assert raw.boolean(True).scalar() is True


def test_every_shorter_file_is_refused(dense: Path, tmp_path: Path) -> None:
    whole = dense.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (3, 20, 200, 4000, len(whole) // 2, len(whole) - 33):
        cut.write_bytes(whole[:size])

        with pytest.raises(ModelError, match="cut"):
            raw.read_gguf(cut)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))

    with pytest.raises(ModelError, match="does not start with GGUF"):
        raw.read_gguf(other)


def test_a_missing_tensor_is_named(dense: Path) -> None:
    with pytest.raises(ModelError, match=r"blk\.99\.ffn_up\.weight is missing"):
        raw.read_gguf(dense).tensor("blk.99.ffn_up.weight")


def test_a_tensor_that_makes_too_few_bytes_is_refused() -> None:
    short = raw.NewTensor(
        "t", (32, 4), gguf.GGMLQuantizationType.F32, lambda: np.zeros(7, dtype=np.float32)
    )

    with pytest.raises(ModelError, match="made 28 bytes, 512 promised"):
        raw.write_gguf(io.BytesIO(), {}, [short])
