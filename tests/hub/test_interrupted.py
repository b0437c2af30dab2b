"""The program killed, started twice, and without a network."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from speculoe_local.cli.options import resolve_model
from speculoe_local.hub.cache import PARTIAL, models
from tests.hub.conftest import REPO
from tests.hub.fake_hub import Failure

Q8 = "tiny-Q8_0.gguf"
FIRST = 100_000


def arrived(cache):
    return sum(path.stat().st_size for path in cache.rglob("*" + PARTIAL))


def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def gate(hub):
    """The first download stops after FIRST bytes until this is set."""
    event = threading.Event()
    hub.fail("GET", Q8, Failure(gate=event, chunk=FIRST))
    yield event
    event.set()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_pull_is_gone_on_with_and_no_byte_is_fetched_twice(
    program, hub, cache, gate, whole, number
):
    first = program("pull", f"{REPO}:Q8_0")
    until(lambda: arrived(cache) == FIRST)
    first.send_signal(number)
    _, said = first.communicate(timeout=30)
    gate.set()
    between = models(cache)
    second = program("pull", f"{REPO}:Q8_0", "--json")
    result = json.loads(second.communicate(timeout=30)[0])

    assert (-9 if number == signal.SIGKILL else 130) == first.returncode
    assert "Traceback" not in said
    assert [(False, FIRST, len(whole))] == [(m.complete, m.nbytes, m.total_bytes) for m in between]
    assert (0, len(whole) - FIRST) == (second.returncode, result["fetched_bytes"])
    assert ["", f"bytes={FIRST}-"] == [request.range for request in hub.downloads()]
    assert whole == models(cache)[0].path.read_bytes()


def test_two_pulls_at_once_fetch_each_byte_once(program, hub, cache, gate, whole):
    both = [program("pull", f"{REPO}:Q8_0", "--json") for _ in range(2)]
    until(lambda: len(hub.asked("HEAD")) == 2 and arrived(cache) == FIRST)
    waiting = []
    lines = [threading.Thread(target=_follow, args=(process, waiting)) for process in both]
    for thread in lines:
        thread.start()
    until(lambda: "waiting" in waiting)
    gate.set()
    for thread in lines:
        thread.join(30)
    results = [json.loads(process.stdout.read()) for process in both]

    assert [0, 0] == [process.wait(30) for process in both]
    assert sorted([0, len(whole)]) == sorted(result["fetched_bytes"] for result in results)
    assert (1, len(whole)) == (len(hub.downloads()), hub.sent[Q8])
    assert whole == models(cache)[0].path.read_bytes()


def _follow(process, phases):
    for line in process.stderr:
        phases.append(json.loads(line).get("phase"))


def test_without_a_network_names_resolve_and_no_socket_is_made(pulled, hub, monkeypatch):
    model = pulled(f"{REPO}:Q8_0").model
    before = hub.connections

    def forbidden(*_, **__):
        raise AssertionError("a socket was made")

    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(socket, "create_connection", forbidden)

    assert model.path == resolve_model(f"hf.co/{REPO}:q8_0")
    assert 0 == pulled(f"{REPO}:Q8_0", offline=True).fetched_bytes
    assert before == hub.connections


def test_no_command_but_pull_makes_a_connection(pulled, hub, cache):
    pulled(f"{REPO}:Q8_0")
    before = hub.connections
    name = f"{REPO}:Q8_0"
    code = (
        "import socket, sys\n"
        "def forbidden(*_, **__): raise AssertionError('a socket was made')\n"
        "socket.socket.connect = socket.socket.connect_ex = forbidden\n"
        "socket.getaddrinfo = forbidden\n"
        "from speculoe_local.cli.app import app\n"
        f"for words in (['list'], ['path', '{name}'], ['verify'], ['rm', '{name}'],\n"
        f"              ['pull', '--offline', '{name}']):\n"
        "    try:\n"
        "        app(words)\n"
        "    except SystemExit as done:\n"
        "        print('exit', words[0], done.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_ENDPOINT": hub.url},
        capture_output=True,
        text=True,
        check=False,
    )
    exits = [line for line in done.stdout.splitlines() if line.startswith("exit ")]

    assert [
        "exit list 0", "exit path 0", "exit verify 0", "exit rm 0", "exit pull 1",
    ] == exits  # fmt: skip
    assert "offline nothing can be fetched" in done.stderr
    assert before == hub.connections
