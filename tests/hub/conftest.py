"""A hub on the loopback and a tiny model on it, whole and in shards; a cache of its own per test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from speculoe_local.hub.names import parse_name
from speculoe_local.hub.pull import pull
from tests.hub.fake_hub import FakeHub
from tests.models.tiny import build, split

PROGRAM = Path(sys.executable).parent / "speculoe-local"
REPO = "owner/Tiny-GGUF"
VARIABLES = ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The bytes of a tiny mixture-of-experts model in one file."""
    return build("qwen3moe", tmp_path_factory.mktemp("whole") / "tiny.gguf").read_bytes()


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """The same in three files, by their names in the repository."""
    path = build("qwen3moe", tmp_path_factory.mktemp("split") / "tiny-Q4_K_M.gguf")
    return {f"Q4_K_M/{shard.name}": shard.read_bytes() for shard in split(path, 3)}


@pytest.fixture
def hub(whole, shards):
    with FakeHub() as started:
        side = {"README.md": b"# Tiny", "mmproj-F16.gguf": b"GGUF", "imatrix.gguf": b"GGUF"}
        started.plain = {"README.md"}
        started.add(REPO, {"tiny-Q8_0.gguf": whole, **shards, **side})
        yield started


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of this test, in the environment too; the network allowed, whatever the machine says."""
    for variable in (*VARIABLES, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def waits():
    """Seconds that a pull would have slept, in turn."""
    return []


@pytest.fixture
def pulled(hub, cache, waits):
    """Pull in this process, never sleeping."""

    def run(name=REPO, **more):
        given = {"cache": cache, "endpoint": hub.url, "wait": waits.append}
        return pull(parse_name(name), **(given | more))

    return run


@pytest.fixture
def program(hub, cache):
    """Start the installed program on the hub of this test; `more` is environment."""
    started = []

    def start(*arguments, **more):
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", **more}
        process = subprocess.Popen(
            [PROGRAM, *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
