"""`pull`, `list`, `path`, `show`, `verify`, `rm` and MODEL by name, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub.fake_hub import Failure, FakeHub
from tests.models.tiny import build, split

PROGRAM = Path(sys.executable).parent / "speculoe-local"
REPO = "owner/Tiny-GGUF"
NAME = f"{REPO}:Q8_0"


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    path = build("bailingmoe", tmp_path_factory.mktemp("tiny") / "tiny-Q8_0.gguf")
    parts = {f"tiny-Q4_K_M{part.name[9:]}": part.read_bytes() for part in split(path, 2)}
    return {"tiny-Q8_0.gguf": path.read_bytes(), **parts}


@pytest.fixture
def hub(contents):
    with FakeHub() as started:
        started.add(REPO, contents)
        yield started


@pytest.fixture
def hub_env(env, hub, tmp_path):
    kept = {name: value for name, value in env.items() if not name.startswith(("HF_", "LLAMA_"))}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub é 中")}


# Several commands in one process: starting it is what takes the time.
SESSION = """
import contextlib, io, json, sys
from speculoe_local.cli.app import app
done = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            app(words)
        except SystemExit as left:
            done.append([left.code, out.getvalue(), err.getvalue()])
json.dump(done, sys.stdout)
"""


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def program(hub_env):
    def start(*arguments):
        done = subprocess.run(
            [PROGRAM, *arguments],
            env=hub_env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return start


@pytest.fixture
def session(hub_env):
    def start(*commands):
        done = subprocess.run(
            [sys.executable, "-c", SESSION, json.dumps(commands)],
            env=hub_env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [Done(*one) for one in json.loads(done.stdout)]

    return start


def test_a_model_goes_from_its_name_to_an_answer_and_away_again(program, session, contents):
    fetched = program("pull", f"hf.co/{REPO}:q8_0", "--json")
    steps = [json.loads(line) for line in fetched.err.splitlines()]
    answer = program(
        "chat", NAME, "-p", "hi", "--max-tokens", "2", "--threads", "1", "--ctx", "256", "--json"
    )
    listed, place, checked, removed, empty = session(
        ["list", "--json"], ["path", NAME], ["verify", "--json"], ["rm", NAME, "--json"], ["list"]
    )

    size = len(contents["tiny-Q8_0.gguf"])
    assert {"progress"} == {step["event"] for step in steps}
    assert ["listing", "downloading", "verifying"] == list(
        dict.fromkeys(step["phase"] for step in steps)
    )
    assert size == max(s["done_bytes"] for s in steps if s["phase"] == "downloading")
    assert ("done", True, size, NAME) == tuple(
        fetched.json[key] for key in ("event", "complete", "fetched_bytes", "name")
    )
    assert (True, "resident") == tuple(fetched.json["placement"][key] for key in ("runs", "kind"))
    assert (0, 2) == (answer.code, answer.json["usage"]["completion_tokens"])
    assert [(NAME, True, size)] == [
        (model["name"], model["complete"], model["bytes"]) for model in listed.json["models"]
    ]
    assert f"{fetched.json['path']}\n" == place.out
    assert (True, [True]) == (checked.json["ok"], [one["ok"] for one in checked.json["models"]])
    assert [{"name": NAME, "files": 1, "freed_bytes": size}] == removed.json["removed"]
    assert empty.out.startswith("no models in ")


def test_show_says_what_the_model_is_and_what_lies_beside_it(session, contents):
    _, found, text = session(["pull", REPO], ["show", REPO, "--json"], ["show", f"{REPO}:q4_k_m"])
    shown = found.json

    assert (f"{REPO}", "bailingmoe", 2) == (shown["model"], shown["architecture"], shown["shards"])
    assert (8, 2, True) == (shown["experts"], shown["experts_used"], shown["shared_experts"])
    assert shown["bytes"]["total"] == sum(
        shown["bytes"][kind] for kind in ("routed_experts", "shared_experts", "other")
    )
    assert shown["bytes"]["total"] == sum(shown["types"].values())
    assert "none" == shown["sidecar"]["state"]
    assert "8 a layer, 2 used, and a shared expert" in text.out
    assert "none; `speculoe-local calibrate` makes one" in text.out


def test_text_for_people_is_short_and_has_no_escape_codes_in_a_pipe(session):
    fetched, again, listed, checked, place = session(
        ["pull", REPO], ["pull", REPO], ["list"], ["verify", REPO], ["path", REPO]
    )
    Path(place.out.strip()).resolve().write_bytes(b"GGUF broken")
    broken, removed = session(["verify"], ["rm", REPO])

    lines = fetched.out.splitlines()
    assert lines[0].startswith(f"{REPO}:Q4_K_M: ")
    assert " in 2 files; " in lines[0]
    assert lines[1].endswith("tiny-Q4_K_M-00001-of-00002.gguf")
    assert lines[2].startswith("resident: all ")
    assert f"run it with: speculoe-local chat {REPO}:Q4_K_M" == lines[-1]
    assert again.out.splitlines()[0].endswith("in 2 files; all there already")
    row = listed.out.splitlines()[1].split()
    assert (f"{REPO}:Q4_K_M", "complete") == (row[0], row[-1])
    assert ["ok", "ok"] == [line.rpartition(" ")[2] for line in checked.out.splitlines()]
    assert (1, 1) == (broken.code, broken.out.count("is damaged"))
    assert removed.out.startswith(f"{REPO}:Q4_K_M removed, ")
    outputs = [fetched, again, listed, checked, place, broken, removed]
    assert "" == "".join(done.err for done in outputs)
    assert "\x1b" not in "".join(done.out for done in outputs)


def test_each_failure_is_one_line_and_code_1_and_a_wrong_name_code_2(session, hub):
    hub.fail("HEAD", "tiny", Failure(403, {"X-Error-Code": "GatedRepo"}))
    hub.fail("GET", "00002-of", Failure(404, {"X-Error-Code": "EntryNotFound"}))
    gated, half, listed, shown, offline, wrong = session(
        ["pull", REPO],
        ["pull", REPO],
        ["list"],
        ["show", REPO],
        ["pull", "--offline", REPO],
        ["pull", "https://example.com/a"],
    )
    half_there = f"is INCOMPLETE: 1 of 2 files are there; run `speculoe-local pull {REPO}:Q4_K_M`"

    for done, code, said in (
        (gated, 1, "accept its terms"),
        (half, 1, "the hub lists the file but does not have it"),
        (shown, 1, half_there),
        (offline, 1, "offline nothing can be fetched"),
        (wrong, 2, "is not on"),
    ):
        assert (code, "", 1) == (done.code, done.out, len(done.err.splitlines()))
        assert said in done.err
    assert "INCOMPLETE, 1 of 2 files of " in listed.out
    assert listed.out.rstrip().endswith(f"speculoe-local pull {REPO}:Q4_K_M")


def test_a_terminal_sees_a_bar_that_is_gone_afterwards(terminal, hub, hub_env, contents):
    gate = threading.Event()
    hub.fail("GET", "/resolve/", Failure(gate=gate, chunk=300_000))
    shown = terminal(command=[PROGRAM, "pull", NAME], **hub_env)
    try:
        shown.see("file 1 of 1: 293.0 KiB of")
    finally:
        gate.set()

    assert 0 == shown.leaves()
    lines = [line for line in shown.lines() if line]
    assert not any("file 1 of 1" in line for line in lines)
    assert lines[0].startswith(f"{NAME}: ")
    assert f"run it with: speculoe-local chat {NAME}" == lines[-1]
