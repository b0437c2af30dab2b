"""A server whose model has layers on another machine, when that machine goes away."""

from __future__ import annotations

from dataclasses import replace

from tests.models.fixtures import TinyModel
from tests.runtime.peers import peer
from tests.server.conftest import serve, tiny_settings


def test_a_machine_that_goes_away_fails_requests_and_not_the_server(tiny_model: TinyModel) -> None:
    settings = tiny_settings(tiny_model("qwen3moe"))
    asked = {"prompt": "The quick brown fox", "max_tokens": 300, "temperature": 0, "stream": True}
    with peer() as other:
        engine = replace(settings.engine, device="cpu", rpc=f"{other.endpoint}=2")
        gone = f"{other.endpoint} is gone"
        with (
            serve(replace(settings, engine=engine)) as live,
            live.client() as client,
            client.stream("POST", "/v1/completions", json=asked) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")  # it is answering
            other.kill()
            assert any(gone in line for line in lines)
            later = live.post("/v1/completions", {"prompt": "And now", "max_tokens": 2})

            assert 500 <= later.status_code < 600
            assert gone in later.text
            assert 200 == live.get("/v1/models").status_code
