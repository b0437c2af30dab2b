"""Who is let in: hosts, origins, keys, sizes."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.testclient import TestClient

from speculoe_local.server.dialects.by_path import envelope_for
from speculoe_local.server.dialects.openai.common import envelope
from speculoe_local.server.http.envelopes import fault_response
from speculoe_local.server.http.safety import Guarded, is_public, key_in, may_ask_as, may_call_from
from speculoe_local.server.settings import Settings

KEY = "a-long-and-secret-key"
PAGE = "http://127.0.0.1:3000"


def guarded(**settings: Any) -> TestClient:
    """A server that answers anything it is asked with the number of bytes it got."""
    api = FastAPI()

    @api.api_route("/{path:path}", methods=["GET", "POST"])
    async def echo(request: Request) -> Response:
        try:
            return Response(str(len(await request.body())))
        except Exception as error:
            return fault_response(envelope, error)

    return TestClient(
        Guarded(api, Settings(**settings), envelope_for), base_url="http://127.0.0.1:8080"
    )


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "127.1.2.3", "x.localhost", ""],
)
def test_a_name_of_this_machine_is_ours(host: str) -> None:
    assert may_ask_as(host, bound_to="127.0.0.1", hosts=())


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1"]
)
def test_a_name_that_leads_here_by_somebody_elses_will_is_not(host: str) -> None:
    assert not may_ask_as(host, bound_to="127.0.0.1", hosts=())
    assert may_ask_as(host, bound_to="127.0.0.1", hosts=("evil.example", host.split(":")[0]))


def test_bound_to_the_world_any_name_will_do_unless_they_are_listed() -> None:
    assert may_ask_as("box.lan:8080", bound_to="0.0.0.0", hosts=())
    assert may_ask_as("box.lan:8080", bound_to="0.0.0.0", hosts=("box.lan",))
    assert not may_ask_as("evil.example", bound_to="0.0.0.0", hosts=("box.lan",))


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8080", True),
        ("https://evil.example", False),
        ("http://localhost:3000", False),
        ("null", False),
        ("vscode-file://vscode-app", True),
        ("https://listed.example", True),
        ("https://listed.example/", True),
        ("https://listed.example.evil.example", False),
    ],
)
def test_pages_may_call_from_here_or_from_the_list(origin: str, allowed: bool) -> None:
    origins = ("https://listed.example",)
    assert allowed == may_call_from(origin, host="127.0.0.1:8080", origins=origins)


def test_a_foreign_host_and_a_foreign_page_are_refused_before_any_route() -> None:
    client = guarded()
    for header in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        answer = client.post("/v1/chat/completions", content=b"{}", headers=header)
        assert 403 == answer.status_code
        assert "permission_error" == answer.json()["error"]["type"]
        assert "access-control-allow-origin" not in answer.headers


def test_only_listed_pages_may_read_answers() -> None:
    client = guarded(origins=(PAGE,))
    answer = client.post("/x", content=b"ab", headers={"Origin": PAGE})
    assert (200, "2") == (answer.status_code, answer.text)
    assert PAGE == answer.headers["access-control-allow-origin"]
    assert "access-control-allow-credentials" not in answer.headers
    assert "access-control-allow-origin" not in client.get("/x").headers


def test_a_browser_is_told_beforehand_what_it_may_send() -> None:
    client = guarded(origins=(PAGE,), keys=(KEY,))
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    answer = client.options("/v1/chat/completions", headers=asked)
    assert 204 == answer.status_code
    assert "authorization" in answer.headers["access-control-allow-headers"]
    refused = client.options(
        "/v1/chat/completions", headers={**asked, "Origin": "https://x.example"}
    )
    assert 403 == refused.status_code


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"X-Api-Key": KEY},
        {"api-key": KEY},
    ],
)
def test_a_key_is_accepted_in_each_of_its_places(headers: dict[str, str]) -> None:
    assert 200 == guarded(keys=("other", KEY)).get("/v1/models", headers=headers).status_code


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer wrong"},
        {"X-Api-Key": KEY[:-1]},
        {"X-Api-Key": f"{KEY}x"},
    ],
)
def test_without_a_key_there_is_no_answer(headers: dict[str, str]) -> None:
    client = guarded(keys=(KEY,))
    for path in (
        "/v1/models",
        "/metrics",
        "/tokenize",
        "/api/tags",
        "/page/state",
        "/openapi.json",
    ):
        answer = client.get(path, headers=headers)
        assert 401 == answer.status_code
        assert "Bearer" == answer.headers["www-authenticate"]
        assert KEY not in answer.text


def test_readiness_and_the_page_itself_need_no_key() -> None:
    client = guarded(keys=(KEY,))
    for path in ("/health", "/", "/page/static/chat.js"):
        assert is_public(path)
        assert 200 == client.get(path).status_code


def test_where_no_key_is_set_any_will_do() -> None:
    for value in ("Bearer ", "Bearer undefined", ""):
        assert 200 == guarded().get("/v1/models", headers={"Authorization": value}).status_code


def test_a_bearer_goes_before_other_headers() -> None:
    assert "a" == key_in({"authorization": "Bearer a", "x-api-key": "b"})
    assert "b" == key_in({"authorization": "Bearer ", "x-api-key": "b"})


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/x", "error"), ("/api/chat", "error"), ("/v1/messages", "type")],
)
def test_refusals_come_in_the_envelope_of_their_dialect(path: str, kind: str) -> None:
    answer = guarded(keys=(KEY,)).post(path, json={})
    assert 401 == answer.status_code
    assert kind in answer.json()


def test_bodies_are_bounded_whatever_they_say_of_themselves() -> None:
    client = guarded(max_body_bytes=1024)
    assert 200 == client.post("/x", content=b"a" * 1024).status_code
    told = client.post("/x", content=b"a" * 1025)
    assert 413 == told.status_code
    assert "1024" in told.json()["error"]["message"]
    pieces = (b"a" * 512 for _ in range(3))
    assert 413 == client.post("/x", content=pieces).status_code
