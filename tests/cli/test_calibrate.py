"""`speculoe-local calibrate` and `show --sidecar` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny import build

PROGRAM = Path(sys.executable).parent / "speculoe-local"


@pytest.fixture
def moe(tmp_path):
    """A small MoE model, and a text that is enough to calibrate it."""
    path = build("bailingmoe", tmp_path / "moe.gguf")
    (tmp_path / "text.txt").write_text(" ".join(f"word {n * 7919 % 1009}" for n in range(200)))
    return path


@pytest.fixture
def program(env, moe):
    def start(*arguments):
        return subprocess.run(
            [PROGRAM, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
        )

    return start


def calibrated(program, moe, *more):
    text = moe.with_name("text.txt")
    return program(
        "calibrate",
        moe,
        "--text",
        text,
        "--tokens",
        "256",
        "--held-out",
        "64",
        "--threads",
        "1",
        *more,
    )


def test_a_table_is_printed_and_the_sidecar_lies_beside_the_model(program, moe):
    done = calibrated(program, moe)
    lines = done.stdout.splitlines()

    assert 0 == done.returncode
    assert moe.with_name("moe.speculoe.gguf").stat().st_size > 0
    assert "calibrated for moe.gguf on 256 tokens, measured on 64 others" in lines[0]
    columns = ["layer", "residual", "quasi", "ridge", "previous", "chance"]
    assert columns == lines[3].split()[: len(columns)]
    assert ["0", "1", "2", "3", "mean"] == [line.split()[0] for line in lines[4:]]
    assert "no MoE layer comes before it" in lines[4]
    assert "moe.speculoe.gguf written" in done.stderr


def test_show_prints_what_calibrate_printed(program, moe):
    table = calibrated(program, moe).stdout
    printed = json.loads(calibrated(program, moe, "--json").stdout)
    shown = program("show", "--sidecar", moe)
    as_json = json.loads(program("show", "--sidecar", moe, "--json").stdout)

    assert (0, table) == (shown.returncode, shown.stdout)
    assert {"seconds": printed["seconds"], **as_json} == printed
    assert {"sha256", "bytes", "tokens", "held_out"} == as_json["text"].keys()
    assert [0, 1, 2, 3] == [layer["block"] for layer in as_json["layers"]]
    assert {"residual", "quasi-hidden", "ridge", "previous-token", "chance"} == as_json["means"][
        "recall"
    ].keys()
    assert 0.25 == as_json["means"]["recall"]["chance"]


def test_another_place_can_be_named(program, moe, tmp_path):
    elsewhere = tmp_path / "elsewhere.gguf"

    assert 0 == calibrated(program, moe, "-o", elsewhere).returncode
    assert 0 == program("show", "--sidecar", moe, "--file", elsewhere).returncode
    assert 1 == program("show", "--sidecar", moe).returncode


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "--sidecar", "{moe}"], 1, "does not exist; run `speculoe-local calibrate`"),
        (["calibrate", "{moe}", "--text", "{moe}"], 2, "is not UTF-8"),
        (["calibrate", "{moe}", "--text", "/nowhere/text"], 2, "No such file"),
        (["calibrate", "{moe}", "--tokens", "3"], 2, "--tokens"),
    ],
)
def test_what_cannot_be_done_is_said(program, moe, arguments, code, message):
    done = program(*(argument.format(moe=moe) for argument in arguments))

    assert (code, "") == (done.returncode, done.stdout)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
