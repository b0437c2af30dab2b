"""Layers on other machines, which are processes on loopback here: same logits, and what is lost is said."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from speculoe_local.runtime import Engine, EngineOptions, Sampling, rpc
from speculoe_local.runtime.errors import BackendError, OptionError
from speculoe_local.runtime.options import parse_peers
from tests.models.fixtures import TinyModel
from tests.runtime.peers import PROGRAM, Peer, peer

GREEDY = Sampling(temp=0)
PROMPT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def other() -> Iterator[Peer]:
    with peer() as running:
        yield running


def options(remote: str | None = None, budget: str = "100%") -> EngineOptions:
    # A peer computes with plain layouts: repacked ones have kernels, and so bits, of their own.
    return EngineOptions(
        expert_budget=budget, device="cpu", threads=1, ctx=256, repack=False, rpc=remote
    )


def hash_of(engine: Engine) -> str:
    *_, last = engine.generate(PROMPT, sampling=GREEDY, max_tokens=16, logits_hash=True)
    assert last.stats.logits_sha256
    return last.stats.logits_sha256


def local_hash(path: Path) -> str:
    with Engine.open(path, options=options()) as engine:
        return hash_of(engine)


@pytest.mark.parametrize("family", ["qwen3moe", "qwen35moe", "bailingmoe", "gpt-oss"])
def test_layers_elsewhere_do_not_change_logits(
    family: str, tiny_model: TinyModel, other: Peer
) -> None:
    path = tiny_model(family)
    expected = local_hash(path)
    for layers, budget in ((4, "100%"), (2, "100%"), (2, "75%")):
        with Engine.open(path, options=options(f"{other.endpoint}={layers}", budget)) as engine:
            assert expected == hash_of(engine)
            engine.check()


def test_layers_that_stay_have_their_experts_in_slots(tiny_model: TinyModel, other: Peer) -> None:
    with Engine.open(
        tiny_model("qwen3moe"), options=options(f"{other.endpoint}=1", "50%")
    ) as engine:
        hash_of(engine)
        placed = engine.info.placement

        assert "slotted" == placed.kind
        assert (0, 1, 2) == tuple(sorted(i for pool in placed.pools for i in pool.layers))
        assert f"layers 0 to 2 here, layer 3 on {other.endpoint}" in placed.reason
        assert engine.slot_stats().requests > 0


def test_a_model_spreads_over_two_machines(tiny_model: TinyModel, other: Peer) -> None:
    path = tiny_model("qwen3moe")
    with (
        peer() as third,
        Engine.open(path, options=options(f"{other.endpoint}=1,{third.endpoint}=2")) as engine,
    ):
        assert local_hash(path) == hash_of(engine)


def test_free_memory_decides_where_no_number_is_given(tiny_model: TinyModel, other: Peer) -> None:
    (found,) = rpc.connect(parse_peers(other.endpoint))

    assert ["rpc"] == [device.kind for device in found.devices]
    assert found.devices[0].total_bytes > 0
    with Engine.open(tiny_model("qwen3moe"), options=options(other.endpoint)) as engine:
        assert f" on {other.endpoint}" in engine.info.placement.reason


def test_a_machine_serves_several_at_a_time(tiny_model: TinyModel, other: Peer) -> None:
    path = tiny_model("qwen3moe")
    both = [Engine.open(path, options=options(f"{other.endpoint}={n}")) for n in (1, 3)]
    hashes: list[str] = []
    threads = [threading.Thread(target=lambda e=e: hashes.append(hash_of(e))) for e in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in both:
        engine.close()

    assert [local_hash(path)] * 2 == hashes


@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_a_machine_that_goes_away_ends_the_answer_and_nothing_else(
    budget: str, tiny_model: TinyModel
) -> None:
    path = tiny_model("qwen3moe")
    with peer() as other:
        port = other.port
        with Engine.open(path, options=options(f"{other.endpoint}=2", budget)) as engine:
            steps = engine.generate(PROMPT, sampling=GREEDY, max_tokens=200)
            next(steps)
            other.kill()
            with pytest.raises(BackendError, match=f"127.0.0.1:{port} is gone") as caught:
                list(steps)
            assert 1 == len(str(caught.value).splitlines())
            with pytest.raises(BackendError, match=f"127.0.0.1:{port} is gone"):
                hash_of(engine)
    with peer(port), Engine.open(path, options=options(f"127.0.0.1:{port}=2", budget)) as engine:
        assert local_hash(path) == hash_of(engine)  # it is back


def test_a_line_that_breaks_anywhere_raises_one_clear_error(
    tiny_model: TinyModel, other: Peer
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.runtime.cut_lines",
            tiny_model("qwen3moe"),
            str(other.port),
            "30",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout.splitlines()

    assert (0, 30) == (done.returncode, len(said)), done.stderr[-2000:]
    assert {"BackendError"} == {line.split()[0] for line in said}
    assert all("127.0.0.1:" in line for line in said)


def test_a_machine_that_vanishes_without_a_word_is_noticed_by_the_system(
    tiny_model: TinyModel, other: Peer
) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options(f"{other.endpoint}=1")):
        lines = _sockets_to(other.port)
        kept = [s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for s in lines]
        for line in lines:
            line.close()

    assert kept
    assert all(kept)


def test_nobody_at_the_other_end_is_said_before_anything_is_loaded(tiny_model: TinyModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(BackendError, match=f"--rpc 127.0.0.1:{port}: Connection refused"):
        Engine.open(tiny_model("qwen3moe"), options=options(f"127.0.0.1:{port}"))


def test_somebody_else_at_the_other_end_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.recv(64)
                line.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="another protocol"):
            rpc.say_hello("127.0.0.1", server.getsockname()[1])
        thread.join()


def test_somebody_who_never_answers_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        rpc.say_hello("127.0.0.1", server.getsockname()[1], timeout_s=0.05)


def test_a_port_that_is_taken_or_an_address_of_no_machine_is_refused(other: Peer) -> None:
    with pytest.raises(OptionError, match=f"--port {other.port}: Address already in use"):
        rpc.expose("127.0.0.1", other.port, None, 1)
    with pytest.raises(OptionError, match="'box' is not an IPv4 address"):
        rpc.expose("box", 0, None, 1)


def test_rpc_serve_warns_beyond_loopback_only_and_ends_with_ctrl_c() -> None:
    with peer(0, "--host", "0.0.0.0") as open_to_all, peer() as own:
        for one in (open_to_all, own):
            one.process.send_signal(signal.SIGINT)

        assert (130, "") == open_to_all.ended()
        assert (130, "") == own.ended()
        assert ["no authentication" in line for line in open_to_all.said].count(True) == 1
        assert not any("authentication" in line for line in own.said)


def test_the_program_ends_with_one_line_when_a_machine_goes_away(tiny_model: TinyModel) -> None:
    with peer() as other:
        chat = subprocess.Popen(
            [
                *(*PROGRAM, "chat", str(tiny_model("qwen3moe")), "-p", PROMPT, "--temp", "0"),
                *("--device", "cpu", "--threads", "1", "--ctx", "1024"),
                *("--rpc", f"{other.endpoint}=2"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert chat.stdout is not None
        assert chat.stdout.read(1)  # it is answering
        other.kill()
        _, said = chat.communicate(timeout=60)

    assert 1 == chat.returncode
    assert [line for line in said.splitlines() if line.startswith("error: ")] == [
        f"error: {other.endpoint} is gone, and its layers with it; run `speculoe-local rpc-serve` there "
        "again, then open the model again"
    ]


def _sockets_to(port: int) -> list[socket.socket]:
    """Sockets of this process that are connected to a port of this machine."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                line = socket.socket(fileno=os.dup(int(name)))
                if line.family == socket.AF_INET and line.getpeername()[1] == port:
                    found.append(line)
                else:
                    line.close()
    return found
