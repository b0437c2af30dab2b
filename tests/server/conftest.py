"""Real servers on loopback, in this process: tiny models and the embedded one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from speculoe_local.convert.embedded import embedded_model
from speculoe_local.runtime import EngineOptions
from speculoe_local.server.models import Models
from speculoe_local.server.serving import Serving, listen
from speculoe_local.server.settings import ModelSpec, Settings
from tests.models import tiny, vocab
from tests.models.fixtures import TinyModel

_START_S = 120.0
_FIM = {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3, "fim_rep": 4, "fim_sep": 5}


@dataclass(frozen=True, slots=True)
class Live:
    """A server that listens; `url` has no slash at its end."""

    url: str
    serving: Serving

    @property
    def models(self) -> Models:
        return self.serving.models

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **more)


@contextmanager
def serve(settings: Settings, *, wait: bool = True) -> Iterator[Live]:
    """Serve until the block ends; with `wait` the first model is there when it begins."""
    ready = threading.Event()
    listening = listen(settings.host, settings.port)
    port = listening.getsockname()[1]
    serving = Serving(settings, ready=lambda _models: ready.set())
    failures: list[BaseException] = []

    def main() -> None:
        try:
            serving.run_on(listening)
        except BaseException as error:
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=main, name="server")
    thread.start()
    try:
        assert not wait or ready.wait(_START_S)
        assert not failures, failures
        yield Live(f"http://{settings.host}:{port}", serving)
    finally:
        serving.stop()
        thread.join(_START_S)
        assert not thread.is_alive()


def tiny_settings(path: Path, **more: Any) -> Settings:
    """One tiny model named `tiny`, a context of 512 tokens, half of the experts in slots."""
    return replace(
        Settings(
            models=(ModelSpec("tiny", path),),
            engine=EngineOptions(expert_budget="60%", threads=1, ctx=512),
            port=0,
            ping_s=0.2,
        ),
        **more,
    )


@pytest.fixture(scope="session")
def live(tiny_model: TinyModel) -> Iterator[Live]:
    """A server of a tiny qwen3moe."""
    with serve(tiny_settings(tiny_model("qwen3moe"))) as running:
        yield running


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a tiny model that fills gaps: its first bytes serve as the marks of them."""
    usual = vocab.metadata()
    marks = {f"tokenizer.ggml.{name}_token_id": token for name, token in _FIM.items()}
    path = tmp_path_factory.mktemp("fim") / "fim.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab, "metadata", lambda: {**usual, **marks})
        tiny.build("qwen3moe", path)
    with serve(tiny_settings(path)) as running:
        yield running


@pytest.fixture(scope="session")
def embedded_server() -> Iterator[Live]:
    """A server of the embedded model."""
    settings = Settings(
        models=(ModelSpec("embedded", embedded_model(None)),),
        engine=EngineOptions(ctx=2048),
        port=0,
        ping_s=0.5,
    )
    with serve(settings) as running:
        yield running
