"""`speculoe-local train-estimator` as a user runs it, and what `show --sidecar` then says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from speculoe_local.convert.calibrate import calibrate
from tests.models.tiny import build

PROGRAM = Path(sys.executable).parent / "speculoe-local"
TEXT = " ".join(f"word {n * 7919 % 1009}" for n in range(200))


@pytest.fixture
def moe(tmp_path):
    """A small calibrated model, and the text that it was calibrated with."""
    path = build("bailingmoe", tmp_path / "moe.gguf")
    (tmp_path / "text.txt").write_text(TEXT)
    calibrate(
        path, tmp_path / "moe.speculoe.gguf", texts=[TEXT], tokens=256, held_out=64, threads=1
    )
    return path


@pytest.fixture
def program(env):
    def start(*arguments, **more):
        return subprocess.run(
            [PROGRAM, *arguments],
            env={**env, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return start


def trained(program, moe, *more, **environment):
    text = moe.with_name("text.txt")
    return program(
        "train-estimator", moe, "--text", text, "--tokens", "256", "--epochs", "2",
        "--threads", "1", *more, **environment,
    )  # fmt: skip


def test_a_table_is_printed_and_show_prints_it_again(program, moe):
    done = trained(program, moe)
    shown = program("show", "--sidecar", moe)
    as_json = json.loads(program("show", "--sidecar", moe, "--json").stdout)
    lines = done.stdout.splitlines()

    assert 0 == done.returncode, done.stderr
    assert "moe.speculoe.gguf written" in done.stderr
    assert (0, done.stdout) == (shown.returncode, shown.stdout)
    assert "estimators trained on 224 tokens, stopped by 32" in lines[1]
    columns = ["layer", "residual", "quasi", "ridge", "adapter", "mlp", "previous", "chance"]
    assert columns == lines[4].split()[: len(columns)]
    assert ["0", "1", "2", "3", "mean"] == [line.split()[0] for line in lines[5:10]]
    assert "with each layer's strategy: recall " in lines[10]
    assert {"text_sha256", "tokens", "validation", "held_out", "seed"} == as_json["training"].keys()
    recall = as_json["means"]["recall"]
    assert recall["strategy"] >= max(recall["quasi-hidden"], recall["ridge"])
    for layer in as_json["layers"][1:]:
        assert {"quasi-hidden", "ridge", "adapter", "mlp"} <= layer["precision_top1"].keys()


def test_one_kind_goes_to_another_place_and_is_printed_as_json(program, moe, tmp_path):
    before = (tmp_path / "moe.speculoe.gguf").read_bytes()
    other = tmp_path / "other.gguf"

    done = trained(program, moe, "--kinds", "adapter", "--rank", "2", "--json", "-o", other)
    printed = json.loads(done.stdout)

    assert 0 == done.returncode, done.stderr
    assert before == (tmp_path / "moe.speculoe.gguf").read_bytes()
    assert other.stat().st_size == printed["bytes"]
    assert printed["seconds"] > 0
    assert "adapter" in printed["means"]["recall"]
    assert "mlp" not in printed["means"]["recall"]


def test_without_torch_one_line_names_the_extra(program, moe, tmp_path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    done = trained(program, moe, PYTHONPATH=str(tmp_path / "without"))

    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error: training needs the package torch")
    assert "'speculoe-local[train]'" in done.stderr
    assert 1 == len(done.stderr.splitlines())


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--kinds", "forest"], 2, "kinds forest; give one or more of adapter, mlp"),
        (["--sidecar", "/nowhere.gguf"], 1, "does not exist; run `speculoe-local calibrate`"),
        (["--epochs", "0"], 2, "--epochs"),
    ],
)
def test_what_cannot_be_done_is_said(program, moe, more, code, message):
    done = trained(program, moe, *more)

    assert (code, "") == (done.returncode, done.stdout)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
