"""`speculoe-local eval` as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speculoe_local.convert.calibrate import calibrate
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import Sidecar, sidecar_path
from tests.models.tiny import build

PROGRAM = Path(sys.executable).parent / "speculoe-local"
TEXT = " ".join(f"word {n * 7919 % 1009} and then" for n in range(200))
QUICK = ("--expert-budget", "50%", "--threads", "1", "--ctx", "128", "--window", "24",
         "--prompt-tokens", "4", "--tokens", "30", "--generate", "4")  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small MoE model and its sidecar; a text and questions beside them."""
    folder = tmp_path_factory.mktemp("eval")
    path = build("bailingmoe", folder / "moe.gguf")
    calibrate(path, sidecar_path(path), texts=[TEXT], tokens=256, held_out=64, threads=1)
    (folder / "text.txt").write_text(TEXT)
    (folder / "task.jsonl").write_text(
        '{"prompt": "and then ", "choices": ["word 1", "word 2"], "answer": 1}\n'
        '{"prompt": "and then ", "answer": "word"}\n'
    )
    return folder


@pytest.fixture
def moe(made, tmp_path):
    return shutil.copytree(made, tmp_path / "eval") / "moe.gguf"


@pytest.fixture
def program(env, moe):
    def start(*arguments):
        return subprocess.run(
            [PROGRAM, "eval", moe, *QUICK, *arguments],
            env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return start


def quality(moe):
    return Sidecar.read(sidecar_path(moe), ModelMap.read(moe)).quality


def test_json_has_a_row_for_each_mode_and_weights_and_the_sidecar_learns_them(program, moe):
    done = program("--json", "--task", moe.with_name("task.jsonl"), "--max-tokens", "4")
    found = json.loads(done.stdout)

    assert 0 == done.returncode
    names = [f"{row['mode']}/{row['weights']}" for row in found["rows"]]
    assert names == [
        f"{m}/{w}" for m in ("speculate", "estimate", "hybrid") for w in ("predicted", "true")
    ]
    for row in found["rows"]:
        assert row["kl_mean"] <= row["kl_p999"] <= row["kl_max"]
        assert 0 <= row["top1"] <= 1
        assert row["ppl"] / row["ppl_exact"] == pytest.approx(row["ppl_ratio"], rel=1e-4)
        assert 30 == row["tokens"]
        assert {"kl_mean", "top1", "ppl", "ppl_exact", "ppl_ratio"} == row["se"].keys()
        assert {"accuracy", "accuracy_exact", "mcnemar_p"} < row["task"].keys()
    assert found["text"]["held_out"]
    assert (str(sidecar_path(moe)), names) == (found["sidecar"], found["written"])
    assert names == list(quality(moe))
    assert found["rows"][0]["kl_mean"] == pytest.approx(quality(moe)[names[0]].kl, rel=1e-4)


def test_a_lossy_chat_says_what_eval_measured(program, moe, env):
    program("--modes", "speculate", "--weights", "true")
    done = subprocess.run(
        [PROGRAM, "chat", moe, "--mode", "speculate", "--weights", "true", "--expert-budget", "50%",
         "-p", "and then", "--max-tokens", "4", "--threads", "1", "--json"],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert 0 == done.returncode, done.stderr
    experts = json.loads(done.stdout)["experts"]
    assert ("speculate", "lossy") == (experts["mode"], experts["exactness"])
    assert quality(moe)["speculate/true"].kl == pytest.approx(experts["kl"], abs=1e-5)


def test_a_table_is_printed_and_text_of_ones_own_leaves_the_sidecar_alone(program, moe):
    done = program(
        "--modes", "exact,speculate", "--weights", "true", "--text", moe.with_name("text.txt")
    )
    lines = [line.split() for line in done.stdout.splitlines()]

    assert (0, "") == (done.returncode, done.stderr)
    exact, lossy = (line for line in lines if line[1:2] == ["true"] and len(line) == 12)
    assert ["exact", "true", "0.00000"] == exact[:3]
    assert "speculate" == lossy[0]
    assert float(lossy[2]) > 0
    assert ["exact", "true", "median", "4", "of", *"44444444"] in lines
    assert {} == quality(moe)


def test_no_write_leaves_the_sidecar_alone_and_write_takes_any_text(program, moe):
    text = moe.with_name("text.txt")
    program("--modes", "hybrid", "--weights", "true", "--no-write")
    assert {} == quality(moe)

    program("--modes", "hybrid", "--weights", "true", "--text", text, "--write")
    assert ["hybrid/true"] == list(quality(moe))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--modes", "guess"], 2, "--modes 'guess' is not known"),
        (["--modes", ","], 2, "--modes ',' names nothing"),
        (["--text", "{moe}"], 2, "is not UTF-8"),
        (["--task", "/nowhere/task"], 2, "No such file"),
        (["--expert-budget", "100%"], 2, "keeps all experts resident"),
        (["--modes", "exact", "--sidecar", "/nowhere/side.gguf", "--write"], 2, "--write: "),
    ],
)
def test_what_cannot_be_done_is_said(program, moe, arguments, code, message):
    done = program(*(argument.format(moe=moe) for argument in arguments))

    assert (code, "") == (done.returncode, done.stdout)
    assert message in done.stderr
    assert 1 == len(done.stderr.splitlines())
