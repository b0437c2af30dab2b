"""Each synthetic model is one upstream llama.cpp loads, runs and routes through every expert."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from tests.models import big, draft, probe, tiny

TEXT = (
    "<|im_start|>user\nThe quick brown fox jumps over the lazy dog, and then "
    "it sleeps in the sun.<|im_end|>\n"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def logits_of(path: Path, text: str = TEXT) -> np.ndarray:
    with probe.loaded(path) as model:
        return probe.run(model, probe.tokenize(model, text)).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_gives_finite_logits_that_follow_the_input(
    family: str, directory: Path
) -> None:
    with probe.loaded(tiny.cached(family, None, directory)) as model:
        ids = probe.tokenize(model, TEXT)
        run = probe.run(model, ids)
        other = probe.run(model, [ids[1], *ids[1:]])

    assert np.isfinite(run.logits).all()
    assert len(set(run.logits.argmax(axis=1))) > len(ids) // 3
    # The last position is reached from the first only through attention or state.
    assert not np.array_equal(run.logits[-1], other.logits[-1])


@pytest.mark.parametrize("family", tiny.MOE_FAMILIES)
def test_every_expert_of_every_routed_layer_is_chosen(family: str, directory: Path) -> None:
    path = tiny.cached(family, None, directory)
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    routed = {int(name.split(".")[1]) for name in names if "ffn_down_exps.weight" in name}
    with probe.loaded(path) as model:
        run = probe.run(model, probe.tokenize(model, TEXT), n_expert=8, n_used=2)

    assert routed == run.chosen.keys()
    assert [set(range(8))] * len(routed) == [set(ids.flat) for ids in run.chosen.values()]


@pytest.mark.parametrize("quant", tiny.QUANTS)
def test_every_expert_type_runs(quant: str, directory: Path) -> None:
    path = tiny.cached("qwen3moe", quant, directory)
    types = {t.tensor_type.name for t in gguf.GGUFReader(path).tensors if "_exps" in t.name}

    assert {quant} == types
    assert np.isfinite(logits_of(path)).all()


@pytest.mark.parametrize("quant", tiny.QUANTS)
def test_encoding_keeps_values_within_a_step(quant: str) -> None:
    values = np.random.default_rng(0).standard_normal((4, 256), dtype=np.float32)
    raw = draft.encode(values, Type[quant])
    back = quants.dequantize(raw, Type[quant]).reshape(values.shape)

    assert draft.nbytes(values.shape, Type[quant]) == raw.nbytes
    assert {"F16": 0.002, "Q8_0": 0.02, "Q4_K": 0.25, "Q4_0": 0.3, "MXFP4": 0.6}[quant] > float(
        np.abs(back - values).max()
    )


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_sizes_may_differ_from_the_default(family: str, tmp_path: Path) -> None:
    path = tiny.build(
        family, tmp_path / "m.gguf", quant="Q4_0", n_layer=5, n_expert=16, n_used=4, n_embd=96
    )

    assert np.isfinite(logits_of(path)).all()


def test_fused_and_separate_gate_up_are_the_same_model(directory: Path) -> None:
    apart = logits_of(tiny.cached("deepseek2", None, directory))
    fused = logits_of(tiny.cached("deepseek2-fused", None, directory))

    np.testing.assert_allclose(apart, fused, rtol=1e-4, atol=1e-4)


def test_experts_matter_to_the_answer(tmp_path: Path, directory: Path) -> None:
    path = tmp_path / "edited.gguf"
    path.write_bytes(tiny.cached("qwen3moe", None, directory).read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    down = next(t for t in reader.tensors if t.name == "blk.1.ffn_down_exps.weight")
    down.data[...] = 0
    reader.data.flush()

    before = logits_of(tiny.cached("qwen3moe", None, directory))
    assert np.abs(before - logits_of(path)).max() > 0.5


def test_the_same_arguments_give_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    first, again, other = (
        tiny.build("gpt-oss", tmp_path / f"{i}.gguf", seed=seed).read_bytes()
        for i, seed in enumerate((0, 0, 1))
    )

    assert first == again
    assert first != other


def test_text_survives_the_tokenizer_and_merges_shorten_it(directory: Path) -> None:
    with probe.loaded(tiny.cached("llama", None, directory)) as model:
        ids = probe.tokenize(model, TEXT + "é\x07")

        assert (TEXT + "é\x07").encode() == probe.detokenize(model, ids)
    assert len(ids) < len(TEXT.encode()) * 2 // 3


@pytest.mark.parametrize("n", [2, 3])
def test_shards_answer_as_the_whole_file(n: int, directory: Path, tmp_path: Path) -> None:
    whole = tiny.build("bailingmoe", tmp_path / "m.gguf")
    shards = tiny.split(whole, n)

    assert [f"m-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)] == [s.name for s in shards]
    expected = logits_of(whole)
    whole.unlink()
    np.testing.assert_array_equal(expected, logits_of(shards[0]))


def test_more_shards_than_tensors_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="1000 shards"):
        tiny.split(tiny.cached("llama", None, directory), 1000)


def test_rows_that_do_not_fill_a_block_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="Q4_K block 256"):
        tiny.build("qwen3moe", tmp_path / "m.gguf", quant="Q4_K", n_ff_exp=64)

    assert not any(tmp_path.iterdir())


def test_too_few_layers_for_llama4_are_refused_rather_than_abort(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama4 with 2 layers; use 4 or more"):
        tiny.build("llama4", tmp_path / "m.gguf", n_layer=2)


def test_a_family_nobody_wrote_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt-9'.*qwen3moe"):
        tiny.build("gpt-9", tmp_path / "m.gguf")


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K"])
def test_a_big_model_is_mostly_distinct_experts_and_runs(quant: str, tmp_path: Path) -> None:
    path = big.build_big(
        tmp_path / "big.gguf", gib=0.02, n_layer=2, n_expert=16, n_embd=256, quant=quant
    )
    tensors = gguf.GGUFReader(path).tensors
    experts = [t for t in tensors if "_exps" in t.name]
    size = sum(int(t.n_bytes) for t in experts)
    blobs = {expert.tobytes() for t in experts for expert in t.data}

    assert size >= 0.02 * 2**30
    assert size > 0.9 * path.stat().st_size
    assert 16 * len(experts) == len(blobs)
    assert np.isfinite(logits_of(path)).all()
