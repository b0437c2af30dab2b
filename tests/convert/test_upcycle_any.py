"""Dense models of each architecture, upcycled: the same function when all experts run, sizes that fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from speculoe_local.convert import dense_torch
from speculoe_local.convert.gguf_raw import read_gguf
from speculoe_local.convert.repack import repack
from speculoe_local.convert.split import Split
from speculoe_local.convert.upcycle_any import fitting_shape, hold_out, upcycle
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.modelmap import ModelMap
from tests.models import families, probe
from tests.models.draft import Dims, Draft
from tests.models.fixtures import TinyModel

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TEXT = "the cat and the hat is in the house, and the dog is on the mat. "


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny dense model of each architecture: qwen2 has biases, qwen3 norms of its heads' values."""
    folder = tmp_path_factory.mktemp("dense")
    made = {}
    for arch in ARCHITECTURES:
        # llama.cpp takes qwen2's heads together to be as wide as the model.
        draft = Draft(arch, Dims(n_layer=2, n_ff=256, n_head=4, head_dim=16), "F16", seed=3)
        families._common(draft, {})
        families._head(draft)
        for i in range(2):
            blk = f"blk.{i}"
            families._attention(draft, blk, qk_norm=arch == "qwen3")
            if arch == "qwen2":
                for part, rows in (("q", 64), ("k", 32), ("v", 32)):
                    draft.vector(f"{blk}.attn_{part}.bias", rows)
            draft.norm(f"{blk}.ffn_norm.weight", 64)
            families._mlp(draft, blk, 256)
        made[arch] = draft.write(folder / f"{arch}.gguf")
    return made


def logits(path: Path) -> np.ndarray:
    with probe.loaded(path) as model:
        return probe.run(model, probe.tokenize(model, TEXT)).logits


def all_used(n_layers: int = 2) -> Split:
    """A split in which every expert is picked, by routers that cannot tell them apart."""
    rng = np.random.default_rng(7)
    order = np.stack([rng.permutation(256) for _ in range(n_layers)]).astype(np.int16)
    return Split(
        shared=order[:, :128],
        experts=order[:, 128:].reshape(n_layers, 4, 32),
        router=np.zeros((n_layers, 4, 64), np.float32),
        down_gain=np.ones((n_layers, 256), np.float32),
        used=4,
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_with_all_experts_running_the_function_is_the_dense_one(
    arch: str, dense: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "moe.gguf"
    repack(dense[arch], all_used(), out)
    expected, found = logits(dense[arch]), logits(out)

    assert ModelMap.read(out).is_moe
    # Down projections are written as Q8_0 once more, in other blocks.
    assert float(np.abs(expected - found).max()) < 0.03 * float(np.abs(expected).max())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_torch_model_computes_what_llama_cpp_does(arch: str, dense: dict[str, Path]) -> None:
    model = dense_torch.load_dense(dense[arch])
    with probe.loaded(dense[arch]) as loaded:
        tokens = probe.tokenize(loaded, TEXT)
        expected = probe.run(loaded, tokens).logits
    hidden = dense_torch.forward(model, torch.tensor([tokens]), dense_torch.dense_ffn(model))
    found = dense_torch.logits(model, hidden)[0].numpy()

    # llama.cpp rounds each input of a Q8_0 product to 8 bits.
    assert float(np.abs(expected - found).max()) < 0.02 * float(np.abs(expected).max())


def test_upcycling_measures_before_and_after(dense: dict[str, Path], tmp_path: Path) -> None:
    stages: list[str] = []
    done = upcycle(
        dense["qwen3"],
        tmp_path / "moe.gguf",
        experts=4,
        used=2,
        documents=[TEXT * 400],
        steps=2,
        split=tmp_path / "split.npz",
        threads=1,
        progress=lambda stage, share: stages.append(stage),
    )
    model = ModelMap.read(done.path)

    assert ("glm4moe", 4, 2, 2) == (
        model.architecture,
        model.n_expert,
        model.n_expert_used,
        len(model.layers),
    )
    assert done.before.scored == done.after.scored > 0
    assert done.before.value != done.after.value
    # Random weights: half of the experts may not change the answers beyond recognition.
    assert done.after.value < 3 * done.before.value
    order = ["perplexity before", "observe", "split", "distil", "write", "perplexity after"]
    assert order == list(dict.fromkeys(stages))
    assert {"moe.gguf", "split.npz"} == set(os.listdir(tmp_path))


def test_sizes_are_chosen_or_checked(dense: dict[str, Path]) -> None:
    model = read_gguf(dense["llama"])

    assert (128, 32) == (fitting_shape(model, 4, 2).shared, fitting_shape(model, 4, 2).width)
    assert 64 == fitting_shape(model, 6, 2, 64).shared
    with pytest.raises(
        OptionError, match="--shared 100 does not fit 256 neurons and 4 experts; 128 do"
    ):
        fitting_shape(model, 4, 2, 100)
    with pytest.raises(OptionError, match="fewer used than there are"):
        fitting_shape(model, 4, 4)
    with pytest.raises(OptionError, match="hold no more than 255"):
        fitting_shape(model, 256, 4)


def test_a_model_that_cannot_be_upcycled_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="architecture qwen3moe cannot be upcycled"):
        upcycle(tiny_model("qwen3moe"), tmp_path / "moe.gguf", experts=4, used=2)


def test_held_out_text_is_the_last_part_and_no_other() -> None:
    learn, held = hold_out(["a" * 50, "b" * 40, "c" * 10], share=0.2)

    assert ["a" * 50, "b" * 30] == learn
    assert "b" * 10 + "\n\n" + "c" * 10 == held


def test_too_little_text_costs_no_analysis(dense: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="512 fill one window"):
        upcycle(dense["llama"], tmp_path / "m.gguf", experts=4, used=2, documents=[TEXT])
    assert [] == list(tmp_path.iterdir())


def test_the_command_prints_both_perplexities(dense: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 400)
    out = tmp_path / "moe.gguf"
    program = Path(sys.executable).parent / "speculoe-local"
    done = subprocess.run(
        [program, "upcycle", dense["llama"], "-o", out, "--experts", "4", "--used", "2",
         "--text", text, "--steps", "0", "--threads", "1", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    facts = json.loads(done.stdout)

    assert facts["before"]["scored"] == facts["after"]["scored"] > 0
    assert {"shared": 128, "experts": 4, "width": 32, "used": 2} == facts["shape"]
    assert out.stat().st_size == facts["bytes"]
