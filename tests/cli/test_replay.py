"""`speculoe-local replay` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(sys.executable).parent / "speculoe-local"


@pytest.fixture
def trace(tmp_path):
    """Two layers of eight experts, of which the first two are asked for most."""
    random = np.random.default_rng(1)
    ids = np.minimum(random.integers(0, 8, (200, 2, 1)), random.integers(0, 8, (200, 2, 1)))
    path = tmp_path / "made-up.npz"
    np.savez(path, ids=ids.astype(np.int16), meta=json.dumps({"n_expert": 8}))
    return path


@pytest.fixture
def replayed(env):
    def start(*arguments, **more):
        return subprocess.run(
            [PROGRAM, "replay", *arguments],
            env={**env, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return start


def test_json_is_one_object_with_a_default_at_each_residency(replayed, trace):
    done = replayed(trace, "--json")
    found = json.loads(done.stdout)

    assert (0, "") == (done.returncode, done.stderr)
    assert ("made-up.npz", 200, 0.5) == (found["trace"], found["tokens"], found["warm"])
    assert [0.1, 0.25, 0.5, 0.75] == [row["residency"] for row in found["rows"] if row["default"]]
    assert {"lru", "lfu-decay", "learned", "static", "clairvoyant"} == {
        row["policy"] for row in found["rows"]
    }


def test_options_choose_rows(replayed, trace):
    done = replayed(trace, "--residency", "0.25, 50%", "--policy", "lru", "--json")
    rows = json.loads(done.stdout)["rows"]

    assert {("lru", 0.25), ("lru", 0.5)} == {(row["policy"], row["residency"]) for row in rows}


def test_the_table_has_every_policy_and_marks_the_default(replayed, trace):
    done = replayed(trace)
    lines = done.stdout.splitlines()

    assert 0 == done.returncode
    assert "\x1b" not in done.stdout
    for policy in ("lru", "lfu-decay", "learned", "static", "clairvoyant"):
        assert 2 == sum(line.split()[:1] == [policy] for line in lines)
    assert 4 == sum(line.count(")*") for line in lines)
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["absent.npz"], 1, "absent.npz"),
        (["TRACE", "--policy", "best"], 2, "best"),
        (["TRACE", "--policy", ","], 2, "--policy"),
        (["TRACE", "--residency", "lots"], 2, "lots"),
        (["TRACE", "--residency", "2"], 2, "2"),
    ],
)
def test_what_is_wrong_is_one_line_and_a_code(replayed, trace, arguments, code, named):
    done = replayed(*(trace if word == "TRACE" else word for word in arguments))

    assert (code, "", 1) == (done.returncode, done.stdout, done.stderr.count("\n"))
    assert named in done.stderr


def test_the_help_names_the_policies_that_there_are(replayed):
    from speculoe_local.cli.replay import replay as command
    from speculoe_local.runtime.replay import POLICIES, RESIDENCIES

    defaults = dict(zip(("residency", "policy"), command.__defaults__[:2], strict=True))

    assert ",".join(POLICIES) == defaults["policy"]
    assert list(RESIDENCIES) == [float(share) for share in defaults["residency"].split(",")]
    assert all(policy in replayed("--help").stdout for policy in POLICIES)
