"""Quantizing gives each tensor the type asked for, llama.cpp's own bits, and whole files only."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from speculoe_local.convert import child, gguf_raw
from speculoe_local.convert.imatrix import Entry, Imatrix, collect, read_imatrix, write_imatrix
from speculoe_local.convert.quantize import quantize
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError
from speculoe_local.runtime.header import read_header, type_name
from tests.models import probe
from tests.models.fixtures import TinyModel
from tests.models.tiny import build, split

TEXT = "the cat and the hat is in the house, and the dog is on the mat. " * 40


def types(path: Path) -> dict[str, str]:
    return {tensor.name: type_name(tensor.ggml_type) for tensor in read_header(path).tensors}


def values(path: Path, name: str) -> np.ndarray:
    tensor = gguf_raw.read_gguf(path).tensor(name)
    return quants.dequantize(np.array(tensor.rows), tensor.kind)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of F16, rows long enough for k-quants."""
    path = tmp_path_factory.mktemp("quantize") / "half.gguf"
    return build("qwen3moe", path, quant="F16", n_layer=2, n_expert=4, n_embd=256, n_ff_exp=256)


@pytest.fixture(scope="module")
def importance(half: Path) -> Imatrix:
    return collect(half, [TEXT], tokens=512, threads=1, names=["made up"])


def test_experts_and_the_rest_get_types_of_their_own(half: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    out = tmp_path / "out.gguf"
    done = quantize(half, out, experts="q4_k", rest="Q5_0", threads=1, progress=shares.append)
    found = types(out)

    assert {"Q4_K"} == {kind for name, kind in found.items() if "_exps.weight" in name}
    assert {"Q5_0"} == {found["token_embd.weight"], found["blk.0.attn_q.weight"]}
    assert {"F32"} == {found["blk.0.ffn_gate_inp.weight"], found["output_norm.weight"]}
    assert () == done.fallbacks
    assert done.experts_before * 4.5 == done.experts_after * 16
    assert sorted(shares) == shares
    assert 1.0 == shares[-1]
    assert [out] == list(tmp_path.iterdir())


def test_the_bits_are_those_of_the_reference(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize(half, out, experts="Q8_0", threads=1)
    name = "blk.1.ffn_down_exps.weight"
    expected = quants.quantize(values(half, name), GGMLQuantizationType.Q8_0)

    assert np.array_equal(expected, gguf_raw.read_gguf(out).tensor(name).rows)


def test_what_is_not_named_keeps_its_type_and_bytes(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = quantize(half, out, experts="Q4_0", threads=1)
    before, after = gguf_raw.read_gguf(half), gguf_raw.read_gguf(out)

    assert {f"blk.{layer}.ffn_{kind}_exps.weight" for layer in range(2) for kind in ("gate", "up", "down")} == {
        change.name for change in done.changed
    }  # fmt: skip
    for name in before.tensors.keys() - {change.name for change in done.changed}:
        assert np.array_equal(before.tensor(name).rows, after.tensor(name).rows)


def test_the_rest_may_stay_plain_while_experts_shrink(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = quantize(half, out, experts="Q4_K", rest="F16", threads=1)

    assert "F16" == types(out)["blk.0.attn_q.weight"]
    assert 0 < len(done.requantized) < len(done.changed)


def test_a_mixture_of_llama_cpp_chooses_for_the_rest(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize(half, out, mixture="q4_k_m", experts="Q3_K", threads=1)
    found = types(out)

    assert {"Q3_K"} == {kind for name, kind in found.items() if "_exps.weight" in name}
    assert "Q4_K" == found["blk.0.attn_q.weight"]
    assert "Q6_K" == found["output.weight"]


def test_rows_too_short_for_a_type_fall_back_and_are_reported(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    done = quantize(tiny_model("qwen3moe", "F16"), tmp_path / "out.gguf", experts="Q4_K", threads=1)

    assert {("Q4_K", "Q5_0")} == {(change.wanted, change.after) for change in done.fallbacks}
    assert 12 == len(done.fallbacks)


def test_the_result_answers_nearly_as_the_model_did(half: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    quantize(half, out, experts="Q6_K", rest="Q8_0", threads=1)
    logits = []
    for path in (half, out):
        with probe.loaded(path) as model:
            logits.append(probe.run(model, probe.tokenize(model, TEXT[:64])).logits)

    assert not np.array_equal(*logits)
    assert float(np.corrcoef(logits[0].ravel(), logits[1].ravel())[0, 1]) > 0.995


def test_a_split_model_becomes_one_file(half: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    shutil.copy(half, copy)
    shards = split(copy, 2)
    out = tmp_path / "out.gguf"
    quantize(shards[0], out, experts="Q8_0", threads=1)

    assert types(half).keys() == types(out).keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing to do"),
        ({"experts": "Q4_X"}, "--experts Q4_X is unknown, known are F32"),
        ({"experts": "Q4_K_M"}, "mixtures go with --type Q4_K_M"),
        ({"mixture": "Q4_9"}, "--type Q4_9 is unknown"),
        ({"experts": "IQ2_XXS"}, "useless without an importance matrix"),
    ],
)
def test_types_that_cannot_be_are_refused(
    half: Path, tmp_path: Path, options: dict[str, str], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        quantize(half, tmp_path / "out.gguf", threads=1, **options)  # type: ignore[arg-type]
    assert [] == list(tmp_path.iterdir())


def test_a_dense_model_has_no_experts_to_name(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no routed experts"):
        quantize(tiny_model("llama"), tmp_path / "out.gguf", experts="Q4_0", threads=1)


def test_the_model_itself_is_never_written_to(half: Path) -> None:
    before = half.read_bytes()
    with pytest.raises(OptionError, match="is the model itself"):
        quantize(half, half, experts="Q4_0", threads=1)
    assert before == half.read_bytes()


def test_an_interruption_leaves_nothing(half: Path, tmp_path: Path) -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(half, tmp_path / "out.gguf", experts="Q4_0", threads=1, progress=stop)
    assert [] == list(tmp_path.iterdir())


def test_what_llama_cpp_refuses_is_one_line_and_leaves_nothing(half: Path, tmp_path: Path) -> None:
    broken = gguf_raw.read_gguf(half)
    tensors = [
        gguf_raw.NewTensor(t.name, t.shape, t.kind, lambda t=t: t.rows)  # type: ignore[misc]
        for t in broken.tensors.values()
    ]
    metadata = dict(broken.metadata)
    del metadata["qwen3moe.attention.layer_norm_rms_epsilon"]
    model = tmp_path / "model.gguf"
    with model.open("wb") as file:
        gguf_raw.write_gguf(file, metadata, tensors)

    with pytest.raises(BackendError, match="layer_norm_rms_epsilon") as refused:
        quantize(model, tmp_path / "out.gguf", experts="Q4_0", threads=1)
    assert "\n" not in str(refused.value)
    assert [model] == list(tmp_path.iterdir())


def test_a_worker_that_dies_says_how() -> None:
    with pytest.raises(BackendError, match=r"os ended with exit code 1: .*has no attribute 'main'"):
        child.run_worker("os", {})


def test_an_importance_matrix_counts_each_row_once(half: Path, importance: Imatrix) -> None:
    entries = importance.entries
    down = entries["blk.1.ffn_down_exps.weight"]

    assert (1, 512) == (importance.chunks, importance.chunk_size)
    assert 512 * 2 == down.counts.sum()
    assert (4, 256) == down.sums.shape
    assert 512 == entries["blk.0.attn_q.weight"].counts
    # Query, key and value read the same input, gate and up do, and the router sees what experts get.
    assert np.array_equal(entries["blk.0.attn_q.weight"].sums, entries["blk.0.attn_v.weight"].sums)
    gate, router = entries["blk.1.ffn_gate_exps.weight"], entries["blk.1.ffn_gate_inp.weight"]
    assert np.array_equal(gate.sums, entries["blk.1.ffn_up_exps.weight"].sums)
    assert np.allclose(2 * router.sums[0], gate.sums.sum(axis=0), rtol=1e-4)


def test_an_importance_matrix_survives_its_file(importance: Imatrix, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    size = write_imatrix(path, importance)
    found = read_imatrix(path)

    assert size == path.stat().st_size
    assert importance.entries.keys() == found.entries.keys()
    for name, entry in importance.entries.items():
        assert np.array_equal(entry.sums, found.entries[name].sums)
        assert np.array_equal(entry.counts, found.entries[name].counts)
    assert "imatrix" == read_header(path).metadata["general.type"]


def test_an_importance_matrix_changes_bits_and_permits_the_smallest_types(
    half: Path, importance: Imatrix, tmp_path: Path
) -> None:
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, importance)
    plain, weighed, smallest = (tmp_path / f"{name}.gguf" for name in ("plain", "weighed", "small"))
    quantize(half, plain, experts="Q4_0", threads=1)
    quantize(half, weighed, experts="Q4_0", imatrix=path, threads=1)
    quantize(half, smallest, experts="IQ2_XXS", imatrix=path, threads=1)
    name = "blk.1.ffn_down_exps.weight"
    weights = importance.entries[name].weights()[:, None, :]
    truth = values(half, name)
    errors = [
        float((weights * (values(file, name) - truth) ** 2).sum()) for file in (plain, weighed)
    ]

    assert errors[1] < errors[0]
    assert "IQ2_XXS" == types(smallest)[name]


def test_the_older_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    name = b"blk.0.attn_q.weight"
    path.write_bytes(
        struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii4f", 2, 4, 2, 4, 6, 8)
    )
    entry = read_imatrix(path).entries[name.decode()]

    assert [[1, 2, 3, 4]] == entry.weights().tolist()


def test_an_expert_that_was_never_used_weighs_all_columns_alike() -> None:
    entry = Entry(np.array([[0, 0], [4, 8]], np.float32), np.array([0, 4], np.float32))

    assert [[1, 1], [1, 2]] == entry.weights().tolist()


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, struct.pack("<ii", 1, 3) + b"ab"])
def test_what_is_no_importance_matrix_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is no importance matrix"):
        read_imatrix(path)
