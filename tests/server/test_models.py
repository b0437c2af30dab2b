"""Several models by name: found, loaded when asked for, dropped when they rest or memory is short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculoe_local.runtime import EngineOptions, Sampling
from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.opened import open_model
from speculoe_local.server import models as module
from speculoe_local.server.catalog import check_memory, entry_of, kv_bytes, needed_bytes
from speculoe_local.server.errors import Loading, NoMemory, ShuttingDown, UnknownModel
from speculoe_local.server.jobs import Job
from speculoe_local.server.models import Models
from speculoe_local.server.settings import ModelSpec, Settings
from tests.models.fixtures import TinyModel

OPTIONS = EngineOptions(expert_budget="60%", threads=1, ctx=256)


def settings(tiny_model: TinyModel, *families: str, **more: Any) -> Settings:
    specs = tuple(ModelSpec(family, tiny_model(family)) for family in families)
    found = Settings(models=specs, strict=len(specs) > 1, engine=OPTIONS, parallel=2)
    return replace(found, **more)


@asynccontextmanager
async def serving(asked: Settings, **more: Any) -> AsyncIterator[Models]:
    models = Models(asked, **more)
    await models.start()
    try:
        yield models
    finally:
        assert await models.close()


async def until(what: Callable[[], bool]) -> None:
    for _ in range(1000):
        if what():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to pass")


def run(main: Awaitable[None]) -> None:
    async def whole() -> None:
        await main

    asyncio.run(whole())


def test_one_model_alone_answers_to_any_name(tiny_model: TinyModel) -> None:
    async def main() -> None:
        async with serving(settings(tiny_model, "qwen3moe")) as models:
            await models.wait()
            found = {id(await models.get(name)) for name in (None, "", "gpt-4o", "qwen3moe")}
            assert 1 == len(found)

    run(main())


def test_of_several_an_unknown_name_is_refused_and_the_known_ones_named(
    tiny_model: TinyModel,
) -> None:
    async def main() -> None:
        async with serving(settings(tiny_model, "qwen3moe", "llama")) as models:
            await models.wait()
            with pytest.raises(UnknownModel, match="use one of qwen3moe, llama"):
                await models.get("gpt-4o")
            assert "qwen3moe" == (await models.get(None)).info.name
            assert "llama" == (await models.get("llama:latest")).info.name

    run(main())


def test_models_are_loaded_when_asked_for_and_once(tiny_model: TinyModel) -> None:
    opened: list[str] = []

    def counting(path: Path, **more: Any) -> Any:
        opened.append(path.name)
        return open_model(path, **more)

    async def main() -> None:
        asked = settings(tiny_model, "qwen3moe", "llama")
        async with serving(asked, open_=counting) as models:
            await models.wait()
            assert [True, False] == [entry.loaded for entry in models.entries()]
            await asyncio.gather(*(models.get("llama") for _ in range(5)))
            assert 2 == len(opened)
            assert 2 == len(models.loaded())
            assert await models.unload("llama")
            assert not await models.unload("llama")
            assert [True, False] == [entry.loaded for entry in models.entries()]

    run(main())


def test_while_the_first_model_loads_requests_are_told_so(tiny_model: TinyModel) -> None:
    go = threading.Event()

    def slow(path: Path, *, progress: Callable[[float], None], **more: Any) -> Any:
        progress(0.25)
        assert go.wait(10)
        return open_model(path, progress=progress, **more)

    async def main() -> None:
        async with serving(settings(tiny_model, "qwen3moe"), open_=slow) as models:
            await until(lambda: models.progress() == 0.25)
            with pytest.raises(Loading) as caught:
                await models.get(None)
            assert 0.25 == caught.value.progress
            go.set()
            await models.wait()
            assert models.progress() is None
            assert (await models.get(None)).info.n_ctx == 256

    run(main())


def test_a_model_that_cannot_be_loaded_says_why_to_whoever_waits(tiny_model: TinyModel) -> None:
    def broken(path: Path, **more: Any) -> Any:
        raise ModelError(f"{path} cannot be loaded: it is a test")

    async def main() -> None:
        async with serving(settings(tiny_model, "qwen3moe"), open_=broken) as models:
            with pytest.raises(ModelError, match="it is a test"):
                await models.wait()
            with pytest.raises(ModelError, match="it is a test"):
                await models.get(None)

    run(main())


def test_closing_stops_what_loads(tiny_model: TinyModel) -> None:
    begun = threading.Event()

    def endless(path: Path, *, progress: Callable[[float], None], **more: Any) -> Any:
        begun.set()
        while True:
            progress(0.5)

    async def main() -> None:
        models = Models(settings(tiny_model, "qwen3moe"), open_=endless)
        await models.start()
        assert await asyncio.to_thread(begun.wait, 10)
        assert await models.close()
        with pytest.raises(ShuttingDown):
            await models.get(None)

    run(main())


def test_a_model_that_rests_is_unloaded_and_comes_back(tiny_model: TinyModel) -> None:
    async def main() -> None:
        asked = settings(tiny_model, "qwen3moe", idle_s=0.3)
        async with serving(asked) as models:
            await models.wait()
            entry = models.entries()[0]
            assert entry.expires_at is not None
            await until(lambda: not models.loaded())
            backend = await models.get(None)
            ticket = await backend.submit(Job((5, 6), Sampling(temp=0), max_tokens=2))
            assert [d async for d in ticket][-1].finish in ("length", "stop")

    run(main())


def test_memory_is_made_by_unloading_what_rests(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 1

    def check(path: Path, options: EngineOptions, contexts: int) -> None:
        if len(models.loaded()) >= room:
            raise NoMemory(path.name, 2, 1)

    models: Models

    async def main() -> None:
        nonlocal models, room
        async with serving(settings(tiny_model, "qwen3moe", "llama")) as models:
            monkeypatch.setattr(module, "check_memory", check)
            await models.wait()
            await models.get("llama")
            assert ["llama"] == [backend.info.name for backend in models.loaded()]
            busy = await (await models.get("llama")).submit(
                Job((5,), Sampling(temp=0), ignore_end=True)
            )
            await anext(aiter(busy))
            with pytest.raises(NoMemory):
                await models.get("qwen3moe")
            busy.cancel()
            assert [d async for d in busy][-1].finish == "cancel"
            assert "qwen3moe" == (await models.get("qwen3moe")).info.name

    run(main())


def test_memory_is_checked_before_loading(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    check_memory(path, OPTIONS, 4)

    with pytest.raises(NoMemory, match=r"needs \d.* of memory and .* are free"):
        check_memory(path, replace(OPTIONS, ctx=1 << 24), 1 << 16)


def test_what_a_model_needs_grows_with_context_and_budget(tiny_model: TinyModel) -> None:
    model = ModelMap.read(tiny_model("qwen3moe"))
    small = needed_bytes(model, OPTIONS, 1)

    assert kv_bytes(model, 256) == needed_bytes(model, OPTIONS, 2) - small
    assert small < needed_bytes(model, replace(OPTIONS, expert_budget="100%"), 1)
    heads = int(model.metadata["qwen3moe.attention.head_count_kv"])  # type: ignore[arg-type]
    size = int(model.metadata["qwen3moe.attention.key_length"])  # type: ignore[arg-type]
    assert 2 * 2 * heads * size * 256 * model.n_layer == kv_bytes(model, 256)


def test_an_entry_says_what_the_header_does(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    entry = entry_of("tiny", path)

    assert ("tiny", "qwen3moe", path) == (entry.name, entry.architecture, entry.path)
    assert 0 < entry.size_bytes <= path.stat().st_size
    assert entry.n_params > 1000
    assert (False, None) == (entry.loaded, entry.expires_at)
