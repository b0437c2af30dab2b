"""Request ids and log lines."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from speculoe_local.server.http import logs
from speculoe_local.server.settings import Settings


class Kept(logging.Handler):
    """Keeps lines as the formatter makes them."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler = Kept(logs.JsonLines())
    logger = logging.getLogger("speculoe_local")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def client(**settings: Any) -> TestClient:
    api = FastAPI()

    @api.api_route("/{path:path}", methods=["GET", "POST"])
    async def echo(request: Request) -> Response:
        body = await request.body()
        if body == b"fail":
            raise RuntimeError("secret of the answer")
        logging.getLogger("speculoe_local.server").info("inside")
        return Response(b"the answer")

    return TestClient(logs.Logged(api, Settings(**settings)), raise_server_exceptions=False)


def test_a_request_is_one_line_without_any_of_its_text(kept: Kept) -> None:
    answer = client().post("/v1/x?q=hidden", content=b"the question")
    line = json.loads(kept.lines[-1])
    assert "request" == line["event"]
    assert ("POST", "/v1/x", 200) == (line["method"], line["path"], line["status"])
    assert (12, 10) == (line["bytes_in"], line["bytes_out"])
    assert answer.headers["x-request-id"] == line["id"]
    shown = "".join(kept.lines)
    assert not any(text in shown for text in ("question", 'answer"', "hidden"))


def test_lines_of_a_request_share_its_id(kept: Kept) -> None:
    client().get("/x", headers={"X-Request-Id": "mine-1"})
    assert ["mine-1", "mine-1"] == [json.loads(line)["id"] for line in kept.lines]


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "é"])
def test_an_id_that_could_garble_the_log_is_replaced(given: str) -> None:
    answer = client().get("/x", headers={"X-Request-Id": given.encode()})
    assert answer.headers["x-request-id"].startswith("req_")


def test_text_is_shown_only_where_the_server_was_told_to(kept: Kept) -> None:
    client(log_prompts=True).post("/x", content=b"the question")
    line = json.loads(kept.lines[-1])
    assert ("the question", "the answer") == (line["body"], line["answer"])


def test_what_is_asked_every_second_is_quiet_unless_it_fails(kept: Kept) -> None:
    client().get("/health")
    assert ["inside"] == [json.loads(line)["event"] for line in kept.lines]
    client().post("/health", content=b"fail")
    assert 500 == json.loads(kept.lines[-1])["status"]


def test_a_client_that_left_is_told_apart(kept: Kept) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        assert "http.disconnect" == (await receive())["type"]

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_message: Any) -> None:
        return None

    scope = {"type": "http", "method": "POST", "path": "/x", "headers": []}
    asyncio.run(logs.Logged(app, Settings())(scope, receive, send))
    assert json.loads(kept.lines[-1])["left"] is True


def test_lines_for_people_have_keys_and_stay_lines() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "two\nlines", (), None)
    record.fields = {"path": '/a b"c\n', "n": 3, "ok": True, "none": ""}
    line = logs.KeyValues().format(record)
    assert line.endswith('Z warning two lines path="/a b\\"c\\n" n=3 ok=true none=""')
    assert "\n" not in line


def test_errors_keep_their_traceback_in_the_log(kept: Kept) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("speculoe_local.server").exception("failed")
    line = json.loads(kept.lines[-1])
    assert "error" == line["level"]
    assert "ValueError: why" in line["error"]


def test_configuring_twice_writes_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("speculoe_local")
    before, level, propagate = logger.handlers[:], logger.level, logger.propagate
    try:
        logs.configure(Settings())
        logs.configure(Settings(log_json=True))
        logging.getLogger("speculoe_local.server").info("once")
        lines = capsys.readouterr().err.splitlines()
        assert ["once"] == [json.loads(line)["event"] for line in lines]
    finally:
        logger.handlers[:], logger.propagate = before, propagate
        logger.setLevel(level)
