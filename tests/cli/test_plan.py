"""`plan` as a user runs it: this machine, described machines, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.models.published import write

PROGRAM = Path(sys.executable).parent / "speculoe-local"
CARD = ("--vram", "12GiB", "--vram-rate", "504GB/s", "--link", "24GB/s,10us")
MACHINE = (*CARD, "--ram", "32GiB", "--ram-rate", "65GB/s", "--disk", "5GB/s")


@pytest.fixture
def program(env, tmp_path):
    def start(*arguments):
        return subprocess.run(
            [PROGRAM, "plan", *arguments],
            env={**env, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return start


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write("Qwen3-30B-A3B-Q4_K_M", tmp_path_factory.mktemp("published"))


def test_a_described_machine_is_planned_for_without_being_there(program, qwen):
    shown, found = program(qwen, *MACHINE), program(qwen, *MACHINE, "--json")
    facts = json.loads(found.stdout)

    assert (0, "") == (shown.returncode, shown.stderr)
    assert re.search(
        r"^fastest without loss: (\S+)(?: \(rounded\))?, about [\d.]+ tokens/s",
        shown.stdout,
        re.MULTILINE,
    )
    assert all(f"  - {line}\n" in shown.stdout for line in facts["assumptions"])
    assert {
        "resident",
        "cpu-experts",
        "misses-cpu",
        "cache",
        "prefetch",
        "speculate",
        "ondemand",
        "mapped",
    } == {mode["name"] for mode in facts["modes"]}
    assert 12 << 30 == facts["machine"]["card"]["total_bytes"]
    assert 30 << 30 == facts["machine"]["ram_bytes"]
    assert 24e9 == facts["machine"]["card"]["link"]["bytes_per_s"]


def test_this_machine_is_measured_once(program, tiny_model, tmp_path):
    first, second = (program(tiny_model("qwen3moe"), "--device", "cpu", "--json") for _ in range(2))
    facts, again = json.loads(first.stdout), json.loads(second.stdout)

    assert ("", "resident") == (first.stderr, facts["picked"])
    assert facts["machine"]["products"] == again["machine"]["products"]
    assert "measured here on" in facts["machine"]["products"]["origin"]
    assert (tmp_path / "cache" / "speculoe-local" / "rates.json").exists()


def test_hit_rates_come_from_a_trace_that_is_named(program, qwen, tmp_path):
    ids = np.zeros((64, 2, 1), np.int16)  # always the same expert: the first slot has it
    np.savez(tmp_path / "same.npz", ids=ids, meta=np.array(json.dumps({"n_expert": 64})))
    done = program(qwen, *MACHINE, "--trace", tmp_path / "same.npz", "--json")
    facts = json.loads(done.stdout)

    assert {1.0} == {mode["hit_rate"] for mode in facts["modes"] if mode["name"] == "cache"}
    assert any("the 64 tokens of same.npz, 1 of 64" in line for line in facts["assumptions"])


def test_nonsense_is_refused_in_one_line(program, qwen):
    done = program(qwen, *MACHINE, "--ram", "-5GB")

    assert (2, "") == (done.returncode, done.stdout)
    assert "error: --ram '-5GB' is not a size above 0; use for example 12GiB\n" == done.stderr


def test_a_file_of_holes_is_no_disk_to_measure(program, qwen):
    done = program(qwen, *CARD, "--ram", "32GiB", "--ram-rate", "65GB/s")

    assert (1, "") == (done.returncode, done.stdout)
    assert "give --disk" in done.stderr
