"""`serve` as a program: what it prints, and how signals end it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "speculoe-local"


def start(env, *arguments):
    return subprocess.Popen(
        [PROGRAM, "serve", "--port", "0", "--threads", "1", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def url_of(server):
    found = re.fullmatch(r"listening on (http://\S+)\n", server.stderr.readline())
    assert found is not None
    return found[1]


def wait_until_ready(server):
    for line in server.stderr:
        if line.startswith("ready: "):
            return line
    raise AssertionError("it ended before it was ready")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_an_open_stream_and_the_program(number, code, env, tiny_model):
    options = ("--expert-budget", "33%", "--link", "400kB/s", "--ctx", "512", "--alias", "tiny")
    with start(env, tiny_model("qwen3moe"), *options) as server:
        url = url_of(server)
        assert "tiny, 512 tokens for each of 4 answers, exact" in wait_until_ready(server)
        body = {"prompt": "Hello", "n_predict": 400, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as stream:
            assert stream.readline().startswith(b"data: ")
            server.send_signal(number)
            rest = stream.read()
        assert b"shutting down" in rest
        assert code == server.wait(10)
        assert "" == server.stdout.read()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/no/such/model.gguf"], 1, "does not exist"),
        (["--cors-origin", "*"], 2, "let any page in"),
        (["--models", "a=", "--models", "b=x"], 2, "names no file"),
    ],
)
def test_what_cannot_be_served_is_said_and_nothing_starts(arguments, code, message, env):
    with start(env, *arguments) as server:
        out, error = server.communicate(timeout=60)

    assert code == server.returncode
    assert message in error
    assert "" == out
    assert "Traceback" not in error
