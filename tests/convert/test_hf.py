"""Converted checkpoints hold the same tensors and give the same logits; others are refused in a line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from gguf import quants

from speculoe_local.convert import gguf_raw, hf
from speculoe_local.convert.hf import convert
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError
from speculoe_local.runtime.header import Array, read_header
from tests.convert import checkpoints, pipeline
from tests.models import vocab

# Of the largest logit; 16-bit keys and values in attention alone make 5e-4.
LOGITS_TOLERANCE = 2e-3


@pytest.fixture(scope="module", params=["qwen3moe", "gpt_oss"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint's folder, its model, and the GGUF made of it."""
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    known = request.param == "qwen3moe"
    model = checkpoints.write(getattr(checkpoints, request.param)(), folder, shards=known)
    out = folder.with_suffix(".gguf")
    shares: list[float] = []
    pre = None if known else "gpt-2"
    done = convert(folder, out, outtype="f16", tokenizer_pre=pre, progress=shares.append)
    assert sorted(shares) == shares
    assert 1.0 == shares[-1]
    return folder, model, done


def weights(folder: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file).items():
            found[name] = tensor.float().numpy()
    return found


def written(path: Path, name: str) -> np.ndarray:
    tensor = gguf_raw.read_gguf(path).tensor(name)
    return quants.dequantize(np.array(tensor.rows), tensor.kind).reshape(tensor.shape[::-1])


def test_every_tensor_arrives(pair: Any) -> None:
    folder, _, done = pair
    before = weights(folder)
    fused = "model.layers.0.mlp.experts.gate_up_proj" in before
    for layer in range(2):
        there, here = f"model.layers.{layer}.mlp", f"blk.{layer}.ffn"
        if fused:
            gate_up = before[f"{there}.experts.gate_up_proj"].transpose(0, 2, 1)
            expected = {
                "gate": gate_up[:, ::2],
                "up": gate_up[:, 1::2],
                "down": before[f"{there}.experts.down_proj"].transpose(0, 2, 1),
            }
            router = before[f"{there}.router.weight"]
        else:
            expected = {
                kind: np.stack(
                    [before[f"{there}.experts.{e}.{kind}_proj.weight"] for e in range(16)]
                )
                for kind in ("gate", "up", "down")
            }
            router = before[f"{there}.gate.weight"]
        for kind, values in expected.items():
            assert np.array_equal(values, written(done.path, f"{here}_{kind}_exps.weight"))
        assert np.array_equal(router, written(done.path, f"{here}_gate_inp.weight"))
    for there, here in (
        ("model.embed_tokens", "token_embd"),
        ("lm_head", "output"),
        ("model.norm", "output_norm"),
        ("model.layers.1.self_attn.o_proj", "blk.1.attn_output"),
        ("model.layers.1.input_layernorm", "blk.1.attn_norm"),
    ):
        assert np.array_equal(before[f"{there}.weight"], written(done.path, f"{here}.weight"))
    assert len(gguf_raw.read_gguf(done.path).tensors) == done.tensors


def test_logits_are_those_of_transformers(pair: Any) -> None:
    _, model, done = pair
    largest, scale = pipeline.difference(model, done.path)

    assert largest < LOGITS_TOLERANCE * scale


def test_the_tokenizer_and_template_arrive(pair: Any) -> None:
    _, model, done = pair
    metadata = read_header(done.path).metadata
    pre = {"qwen3moe": "smollm", "gpt-oss": "gpt-2"}[done.architecture]
    tokens = metadata["tokenizer.ggml.tokens"]

    assert pre == metadata["tokenizer.ggml.pre"] == done.tokenizer_pre
    assert vocab.CHAT_TEMPLATE == metadata["tokenizer.chat_template"]
    assert isinstance(tokens, Array)
    assert model.config.vocab_size == len(tokens)
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert isinstance(eos, int)
    assert vocab.EOS == tokens.strings()[eos]


def test_quantized_and_calibrated_it_answers_alike_from_slots(pair: Any, tmp_path: Path) -> None:
    _, _, done = pair
    answers = pipeline.answer(done.path, tmp_path)

    assert answers.hashes["100%"] == answers.hashes["25%"]
    assert answers.experts_before * 4.5 == answers.experts_after * 16


def test_an_unknown_tokenizer_is_refused_with_its_hash(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    checkpoints.write(checkpoints.gpt_oss(), folder)

    with pytest.raises(OptionError, match=r"tokenizer\.json") as refused:
        convert(folder, tmp_path / "out.gguf")
    assert re.search(r"the hash [0-9a-f]{64},", str(refused.value))
    assert [folder] == list(tmp_path.iterdir())


def test_what_is_no_model_is_refused_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    folder = tmp_path / "model"
    with pytest.raises(ModelError, match="is no folder"):
        convert(folder, out)
    folder.mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        convert(folder, out)
    config = folder / "config.json"
    config.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        convert(folder, out)
    config.write_text("{}")
    with pytest.raises(ModelError, match="names no architecture"):
        convert(folder, out)
    config.write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        convert(folder, out)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="NobodyForCausalLM is not known"):
        convert(folder, out)
    with pytest.raises(OptionError, match="--outtype q3 is unknown"):
        convert(folder, out, outtype="q3")
    assert not out.exists()


def test_missing_weight_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    (tmp_path / parts["a"]).write_bytes(b"")

    with pytest.raises(ModelError, match="lacks 1 of 2 weight files, the first is model-00002"):
        convert(tmp_path, tmp_path / "out.gguf")


def test_the_families_of_the_paper_are_supported() -> None:
    assert {
        "Qwen3MoeForCausalLM",
        "GptOssForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
    } <= hf.supported()


def test_a_missing_converter_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "library_folder", lambda: tmp_path)
    with pytest.raises(BackendError, match="run `make setup`"):
        hf.converter()
