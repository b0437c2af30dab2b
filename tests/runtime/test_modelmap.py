"""What a model's files say about its experts, whole or split, fused or biased, routed or dense."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.header import read_header
from speculoe_local.runtime.modelmap import ModelMap

N_EMBD, N_FF, N_EXPERT, N_LAYER = 64, 32, 4, 3
F32, Q8_0 = 0, 8
Tensors = dict[str, np.ndarray]


def floats(*shape: int) -> np.ndarray:
    """A float32 tensor (shape in numpy's order) in which no two rows are alike."""
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def packed(*shape: int) -> np.ndarray:
    """The bytes of a Q8_0 tensor of `shape`."""
    rows = (*shape[:-1], shape[-1] // 32 * 34)
    return np.random.default_rng(sum(shape)).integers(0, 256, rows, dtype=np.uint8)


def experts(layer: int) -> Tensors:
    return {
        f"blk.{layer}.ffn_gate_inp.weight": floats(N_EXPERT, N_EMBD),
        f"blk.{layer}.ffn_gate_exps.weight": packed(N_EXPERT, N_FF, N_EMBD),
        f"blk.{layer}.ffn_up_exps.weight": packed(N_EXPERT, N_FF, N_EMBD),
        f"blk.{layer}.ffn_down_exps.weight": floats(N_EXPERT, N_EMBD, N_FF),
    }


def dense(layer: int) -> Tensors:
    return {f"blk.{layer}.ffn_up.weight": floats(N_FF, N_EMBD)}


def base() -> Tensors:
    """A model of a dense layer and two with experts."""
    embedding = {"token_embd.weight": floats(9, N_EMBD)}
    return embedding | dense(0) | experts(1) | experts(2)


METADATA = {
    "demo.block_count": N_LAYER,
    "demo.embedding_length": N_EMBD,
    "demo.expert_count": N_EXPERT,
    "demo.expert_used_count": 2,
}


def write(path: Path, tensors: Tensors, metadata: Mapping[str, Any] = METADATA) -> Path:
    writer = gguf.GGUFWriter(path, "demo")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif key.startswith("split.") and key != "split.tensors.count":
            writer.add_uint16(key, value)
        else:
            writer.add_uint32(key, value)
    for name, content in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if content.dtype == np.uint8 else None
        writer.add_tensor(name, content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(tmp_path: Path, tensors: Tensors, **metadata: Any) -> ModelMap:
    merged = METADATA | {f"demo.{key}": value for key, value in metadata.items()}
    kept = {key: value for key, value in merged.items() if value is not None}
    return ModelMap.read(write(tmp_path / "demo.gguf", tensors, kept))


def test_a_model_is_described_layer_by_layer(tmp_path: Path) -> None:
    model = read(tmp_path, base())

    assert ("demo", "demo", N_LAYER, N_EMBD, 9, N_EXPERT, 2, True) == (
        model.architecture,
        model.name,
        model.n_layer,
        model.n_embd,
        model.n_vocab,
        model.n_expert,
        model.n_expert_used,
        model.is_moe,
    )
    assert [1, 2] == [layer.index for layer in model.layers]
    assert [("gate", Q8_0, 64, 32), ("up", Q8_0, 64, 32), ("down", F32, 32, 64)] == list(
        model.layers[0].shape_class
    )


def test_bytes_add_up_to_the_weights_in_the_file(tmp_path: Path) -> None:
    tensors = base()
    model = read(tmp_path, tensors)
    one = 2 * N_FF * 2 * 34 + N_EMBD * N_FF * 4

    assert one == model.expert_bytes(1) == model.layer(2).expert_bytes
    assert 2 * N_EXPERT * one == model.routed_bytes
    assert sum(content.nbytes for content in tensors.values()) == model.total_bytes
    assert model.total_bytes == model.routed_bytes + model.other_bytes
    with pytest.raises(KeyError, match="layer 0 has no experts"):
        model.expert_bytes(0)


def test_each_expert_lies_where_its_offset_says(tmp_path: Path) -> None:
    tensors = base()
    model = read(tmp_path, tensors)

    for layer in model.layers:
        for matrix in layer.matrices:
            content = matrix.path.read_bytes()
            for expert in range(N_EXPERT):
                start = matrix.expert_offset(expert)
                found = content[start : start + matrix.bytes_per_expert]
                assert tensors[matrix.name][expert].tobytes() == found
            with pytest.raises(IndexError, match=f"expert {N_EXPERT} of {matrix.name}"):
                matrix.expert_offset(N_EXPERT)


def test_fused_and_ungated_experts_are_known(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_gate_up_exps.weight": packed(N_EXPERT, 2 * N_FF, N_EMBD),
        "blk.0.ffn_down_exps.weight": packed(N_EXPERT, N_EMBD, N_FF),
        "blk.1.ffn_up_exps.weight": packed(N_EXPERT, N_FF, N_EMBD),
        "blk.1.ffn_down_exps.weight": packed(N_EXPERT, N_EMBD, N_FF),
    }

    kinds = [[m.kind for m in layer.matrices] for layer in read(tmp_path, tensors).layers]

    assert [["gate_up", "down"], ["up", "down"]] == kinds


def test_biases_scales_shared_and_chunk_experts_are_not_slotted(tmp_path: Path) -> None:
    extra = {
        "blk.1.ffn_up_exps.bias": floats(N_EXPERT, N_FF),
        "blk.1.exp_probs_b.bias": floats(N_EXPERT),
        "blk.2.ffn_down_exps.scale": floats(N_EXPERT),
        "blk.2.ffn_up_shexp.weight": packed(N_FF, N_EMBD),
        "blk.2.ffn_gate_inp_shexp.weight": floats(N_EMBD),
        "blk.2.ffn_up_chexps.weight": packed(2, N_FF, N_EMBD),
    }
    plain = ModelMap.read(write(tmp_path / "plain.gguf", base()))
    first, second = read(tmp_path, base() | extra).layers

    assert (True, False, True, True) == (
        first.has_bias,
        first.has_scale,
        first.has_router,
        first.has_selection_bias,
    )
    assert (False, True, False) == (second.has_bias, second.has_scale, second.has_selection_bias)
    assert (False, True) == (first.has_shared, second.has_shared)
    assert N_FF * 2 * 34 + N_EMBD * 4 == second.shared_bytes
    assert plain.routed_bytes == sum(
        layer.n_expert * layer.expert_bytes for layer in (first, second)
    )


def test_k_may_differ_from_layer_to_layer(tmp_path: Path) -> None:
    model = read(tmp_path, base(), expert_used_count=[0, 3, 1])

    assert [3, 1] == [layer.n_expert_used for layer in model.layers]
    assert model.n_expert_used == 3


def test_layers_for_further_tokens_count_among_the_other_weights(tmp_path: Path) -> None:
    model = read(tmp_path, base(), nextn_predict_layers=1)

    assert (2, [1]) == (model.n_layer, [layer.index for layer in model.layers])
    assert N_EXPERT * model.expert_bytes(1) == model.routed_bytes


def test_a_dense_model_has_no_expert_layers(tmp_path: Path) -> None:
    model = read(tmp_path, dense(0) | dense(1), expert_count=None, expert_used_count=None)

    assert ((), False, 0, 0) == (model.layers, model.is_moe, model.routed_bytes, model.n_expert)
    assert model.other_bytes == model.total_bytes


@pytest.mark.parametrize(
    ("metadata", "change", "words"),
    [
        ({"block_count": None}, {}, "has no 'demo.block_count'"),
        ({"block_count": "three"}, {}, "'three' as 'demo.block_count'"),
        ({"embedding_length": None}, {}, "has no 'demo.embedding_length'"),
        ({"nextn_predict_layers": 3}, {}, "3 blocks, 3 of them"),
        ({"expert_used_count": None}, {}, "has no 'demo.expert_used_count'"),
        ({"expert_used_count": [2, 2]}, {}, "2 values in 'demo.expert_used_count' for 3 blocks"),
        ({"expert_used_count": [2.0, 2.0, float("nan")]}, {}, "whole number for each"),
        ({"expert_used_count": ["2", "2", "2"]}, {}, "strings where numbers are needed"),
        ({"expert_used_count": 5}, {}, r"\[4\] experts in layer 1 and uses 5"),
        ({"expert_used_count": 0}, {}, "uses 0 per token"),
        ({}, {"blk.1.ffn_down_exps.weight": None}, "layer 1 with gate, up alone"),
        ({}, {"blk.1.ffn_up_exps.weight": packed(3, N_FF, N_EMBD)}, r"of \[3, 4\] experts"),
        ({}, {"blk.1.ffn_up_exps.weight": packed(2, 2, N_FF, N_EMBD)}, "three dimensions"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, metadata: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    tensors = {name: content for name, content in (base() | change).items() if content is not None}

    with pytest.raises(ModelError, match=words):
        read(tmp_path, tensors, **metadata)


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_gives_a_model_or_one_line(
    header_bytes: bytes, scratch: Path, edits: list[tuple[float, int]]
) -> None:
    content = bytearray(header_bytes)
    for where, value in edits:
        content[int(where * (len(content) - 1))] = value
    scratch.write_bytes(content)
    with scratch.open("ab") as file:
        file.truncate(1 << 20)  # the weights, as a hole

    reason = "none"
    try:
        model = ModelMap.read(scratch)
        assert 0 <= model.routed_bytes <= model.total_bytes <= 1 << 20
    except ModelError as error:
        reason = str(error)
    assert len(reason.splitlines()) == 1


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "demo.gguf"


@pytest.fixture(scope="module")
def header_bytes(scratch: Path) -> bytes:
    """The header of the base model, with a k for each layer."""
    write(scratch, base(), METADATA | {"demo.expert_used_count": [2, 2, 2]})
    return scratch.read_bytes()[: read_header(scratch).data_offset]


def split(tmp_path: Path, changes: Mapping[str, Any] | None = None) -> list[Path]:
    """The base model in three shards; `changes` go into the metadata of the second."""
    names = list(base())
    paths = []
    for number, part in enumerate((names[:2], names[2:5], names[5:])):
        metadata = {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        metadata |= METADATA if number == 0 else {}
        metadata |= changes or {} if number == 1 else {}
        path = tmp_path / f"demo-{number + 1:05d}-of-00003.gguf"
        paths.append(write(path, {name: base()[name] for name in part}, metadata))
    return paths


def test_any_shard_opens_the_whole_of_a_split_model(tmp_path: Path) -> None:
    paths = split(tmp_path)
    whole = ModelMap.read(write(tmp_path / "demo.gguf", base()))

    for path in paths:
        model = ModelMap.read(path)

        assert tuple(paths) == model.files
        assert (whole.total_bytes, whole.routed_bytes) == (model.total_bytes, model.routed_bytes)
        assert whole.fingerprint == model.fingerprint
    matrix = model.layer(2).matrices[-1]
    start = matrix.expert_offset(3)
    found = matrix.path.read_bytes()[start : start + matrix.bytes_per_expert]
    assert base()[matrix.name][3].tobytes() == found


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].unlink()

    with pytest.raises(ModelError, match=r"demo-00002-of-00003\.gguf is missing: shard 2 of 3"):
        ModelMap.read(paths[2])


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    renamed = paths[0].rename(tmp_path / "first.gguf")

    with pytest.raises(ModelError, match=r"name must end in -00001-of-00003\.gguf"):
        ModelMap.read(renamed)


def test_shards_in_the_wrong_place_are_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    shutil.copy(paths[2], paths[1])

    with pytest.raises(ModelError, match="says it is shard 3 of 3, its name says 2 of 3"):
        ModelMap.read(paths[0])


def test_a_shard_of_another_split_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path, {"split.count": 4})

    with pytest.raises(ModelError, match="says it is shard 2 of 4, its name says 2 of 3"):
        ModelMap.read(paths[0])


def test_a_shard_that_lost_tensors_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    write(paths[2], {}, {"split.no": 2, "split.count": 3})

    with pytest.raises(ModelError, match=r"hold 5 tensors, split\.tensors\.count says 10"):
        ModelMap.read(paths[0])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    paths = split(tmp_path)
    names = [*list(base())[5:-1], "token_embd.weight"]
    tensors = {name: base()[name] for name in names}
    write(paths[2], tensors, {"split.no": 2, "split.count": 3})

    with pytest.raises(ModelError, match=r"repeats tensor 'token_embd\.weight'"):
        ModelMap.read(paths[0])


def test_the_fingerprint_follows_the_model_and_not_its_place(tmp_path: Path) -> None:
    first = write(tmp_path / "a.gguf", base(), METADATA | {"tokenizer.ggml.tokens": ["a", "b"]})
    moved = Path(shutil.copy(first, tmp_path / "b.gguf"))
    same = ModelMap.read(first).fingerprint
    others = [
        ModelMap.read(write(tmp_path / "c.gguf", base(), METADATA | change)).fingerprint
        for change in (
            {"demo.expert_used_count": 3},
            {"demo.expert_used_count": [2, 2, 2]},
            {"demo.expert_used_count": [2, 2, 1]},
            {"general.name": "another"},
        )
    ]
    retyped = base() | {"blk.1.ffn_up_exps.weight": floats(N_EXPERT, N_FF, N_EMBD)}
    others.append(ModelMap.read(write(tmp_path / "d.gguf", retyped)).fingerprint)

    assert 64 == len(same)
    assert same == ModelMap.read(moved).fingerprint
    assert same == ModelMap.read(write(tmp_path / "e.gguf", base())).fingerprint
    assert 6 == len({same, *others})


def test_the_vocabulary_is_counted_from_the_tokens_when_there_are_any(tmp_path: Path) -> None:
    tokens = METADATA | {"tokenizer.ggml.tokens": ["a", "b", "c"]}

    assert 3 == ModelMap.read(write(tmp_path / "tokens.gguf", base(), tokens)).n_vocab
    assert 7 == read(tmp_path, base(), vocab_size=7).n_vocab
