"""The server as a whole: paths, readiness, clients that leave, and how it ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from speculoe_local.runtime import EngineOptions
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.server.app import create_app
from speculoe_local.server.http.metrics import Metrics
from speculoe_local.server.models import Models
from speculoe_local.server.serving import listen
from speculoe_local.server.settings import Settings
from tests.models.fixtures import TinyModel
from tests.server.conftest import Live, serve, tiny_settings

# A modelled link so slow that an answer takes as long as a test wants to look at it.
SLOW = EngineOptions(expert_budget="33%", threads=1, ctx=512, link="400kB/s")
ENDLESS = {"prompt": "Hello", "n_predict": 400, "ignore_eos": True, "stream": True}


def until(what: Any) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def test_what_has_no_route_is_an_error_of_its_dialect(live: Live) -> None:
    found = live.get("/v1/nothing")
    assert 404 == found.status_code
    assert "not_found_error" == found.json()["error"]["type"]
    assert "/v1/nothing" in found.json()["error"]["message"]

    assert isinstance(live.get("/api/nothing").json()["error"], str)
    assert "error" == live.get("/v1/messages/nothing").json()["type"]
    assert 405 == live.get("/v1/chat/completions").status_code


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/api/version", "/api/tags", "/"])
def test_a_slash_more_and_head_are_forgiven(path: str, live: Live) -> None:
    with live.client() as client:
        plain = client.get(path)
        assert 200 == plain.status_code
        assert 200 == client.get(path.rstrip("/") + "/").status_code
        head = client.request("HEAD", path)
        assert (200, b"") == (head.status_code, head.content)
        assert plain.headers["content-type"] == head.headers["content-type"]


def test_until_the_model_is_there_requests_get_503_and_health_says_so(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    begin = Models.__init__

    def slow(self: Models, *arguments: Any, **more: Any) -> None:
        from speculoe_local.runtime.opened import open_model

        def open_(path: Path, **options: Any) -> Any:
            assert go.wait(20)
            return open_model(path, **options)

        begin(self, *arguments, **more, open_=open_)

    monkeypatch.setattr(Models, "__init__", slow)
    with serve(tiny_settings(tiny_model("qwen3moe")), wait=False) as live:
        for path in ("/v1/models", "/api/tags", "/props"):
            found = live.get(path)
            assert 503 == found.status_code
            assert "Loading model" in found.text
            assert int(found.headers["retry-after"]) > 0
        health = live.get("/health")
        assert 503 == health.status_code
        assert "error" in health.json()
        go.set()
        until(lambda: live.get("/health").status_code == 200)
        assert "ok" == live.get("/health").json()["status"]
        assert 200 == live.get("/v1/models").status_code


def test_a_model_that_cannot_be_loaded_ends_the_server(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError("it is damaged")

    monkeypatch.setattr("speculoe_local.server.models.check_memory", refuse)
    with (
        pytest.raises(AssertionError, match="it is damaged"),
        serve(tiny_settings(tiny_model("qwen3moe"))),
    ):
        pass


def test_a_client_that_leaves_a_stream_stops_its_answer(tiny_model: TinyModel) -> None:
    with serve(tiny_settings(tiny_model("qwen3moe"), engine=SLOW)) as live:
        backend = live.models.loaded()[0]
        with live.client() as client, client.stream("POST", "/completion", json=ENDLESS) as stream:
            next(stream.iter_lines())
            assert not backend.idle
        until(lambda: backend.idle)
        assert 1 == backend.snapshot().finished["cancel"]


def test_a_client_that_leaves_without_a_stream_stops_its_answer(tiny_model: TinyModel) -> None:
    with serve(tiny_settings(tiny_model("qwen3moe"), engine=SLOW, parallel=1)) as live:
        backend = live.models.loaded()[0]
        address = ("127.0.0.1", int(live.url.rpartition(":")[2]))
        body = json.dumps({**ENDLESS, "stream": False}).encode()
        head = (
            b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        with (
            socket.create_connection(address) as running,
            socket.create_connection(address) as waiting,
        ):
            running.sendall(head + body)
            waiting.sendall(head + body)
            until(lambda: backend.snapshot().queued == 1)
        until(lambda: backend.idle)
        assert 2 == backend.snapshot().finished["cancel"]


def test_stopping_ends_open_streams_with_an_error_and_in_moments(tiny_model: TinyModel) -> None:
    with serve(tiny_settings(tiny_model("qwen3moe"), engine=SLOW)) as live:
        with live.client() as client, client.stream("POST", "/completion", json=ENDLESS) as stream:
            lines = stream.iter_lines()
            next(lines)
            begin = time.monotonic()
            live.serving.stop()
            rest = [line for line in lines if line.startswith("data: ")]
        assert time.monotonic() - begin < 5
        assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    assert not live.serving.stuck


def test_no_piece_of_an_answer_waits_for_the_clients_acknowledgement(live: Live) -> None:
    """With Nagle's algorithm each answer on a connection that was kept comes 40 ms late."""
    with live.client() as client:
        client.get("/health")
        connections = list(live.serving.server_state.connections)
        sockets = [each.transport.get_extra_info("socket") for each in connections]
        assert sockets
        for each in sockets:
            assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_taken_is_refused_in_one_line() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=rf"--port {port}: .*; choose another"):
            listen("127.0.0.1", port)
    with pytest.raises(OptionError, match="--host"):
        listen("256.1.2.3", 0)


def test_nothing_is_reported_to_anybody(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """FastAPI can export traces where an environment variable says so; this server never does."""
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    api = api_of(create_app(live.models, Settings(), Metrics()))

    told = ("tracing", "metrics", "logs", "operation_spans", "auto_configure")
    assert [False] * 5 == [api._telemetry[name] for name in told]  # type: ignore[literal-required]


def api_of(app: Any) -> FastAPI:
    """The innermost application of what wraps it."""
    while not isinstance(app, FastAPI):
        app = app._app
    return app
