"""The models of a server by name: loaded when asked for, unloaded when they rest or memory is short.

Fulfils `jobs.Backends`. Lives in one event loop; loading and freeing happen in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from speculoe_local.runtime.opened import Opened, open_model
from speculoe_local.server.batching.diskcache import DiskCache
from speculoe_local.server.batching.runner import sequences_for
from speculoe_local.server.batching.scheduler import Observer, Scheduler
from speculoe_local.server.catalog import check_memory, entry_of
from speculoe_local.server.errors import Loading, NoMemory, ShuttingDown, UnknownModel
from speculoe_local.server.jobs import ModelEntry
from speculoe_local.server.settings import Settings

__all__ = ["Models"]

_log = logging.getLogger("speculoe_local.server")
_LATEST = ":latest"  # what Ollama's clients append
_SHORTEST_LOOK_S = 0.05


@dataclass(slots=True)
class _Served:
    entry: ModelEntry
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one load or unload at a time
    backend: Scheduler | None = None
    progress: float = 0.0


class Models:
    """All models of a server. `start` before use, `close` at the end."""

    def __init__(
        self,
        settings: Settings,
        *,
        observe: Observer | None = None,
        open_: Callable[..., Opened] = open_model,
    ) -> None:
        """Reads the headers. Raises ModelError for a file that is no model."""
        self._settings = settings
        self._observe = observe
        self._open = open_
        self._served = {s.name: _Served(entry_of(s.name, s.path)) for s in settings.models}
        self._first: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closing = False

    @property
    def strict(self) -> bool:
        return self._settings.strict

    async def start(self) -> None:
        """Begin to load the default model; returns at once."""
        if self._settings.default_model is not None:
            self._first = asyncio.create_task(self._load_first(self._settings.default_model))
        if self._settings.idle_s:
            self._keeper = asyncio.create_task(self._unload_resting())

    async def get(self, name: str | None) -> Scheduler:
        """Raises UnknownModel, Loading while the first model of a starting server loads, ModelError,
        BudgetError, NoMemory, ShuttingDown."""
        if self._closing:
            raise ShuttingDown
        served = self._find(name)
        if served.backend is None and self.progress() is not None:
            raise Loading(served.progress)
        if self._failure is not None and served.backend is None:
            raise self._failure
        async with served.lock:
            if served.backend is None:
                await self._load(served)
            assert served.backend is not None
            served.backend.last_used = time.monotonic()
            return served.backend

    def entries(self) -> tuple[ModelEntry, ...]:
        return tuple(self._entry(served) for served in self._served.values())

    def loaded(self) -> tuple[Scheduler, ...]:
        return tuple(s.backend for s in self._served.values() if s.backend is not None)

    def progress(self) -> float | None:
        """0..1 while the first model loads, None once it is there (or cannot be)."""
        if self._first is None or self._first.done():
            return None
        name = self._settings.default_model
        return self._served[name].progress if name is not None else None

    @property
    def failure(self) -> BaseException | None:
        """Why the first model could not be loaded."""
        return self._failure

    async def wait(self) -> None:
        """Until the first model is there. Raises what kept it from loading."""
        if self._first is not None:
            await asyncio.shield(self._first)
        if self._failure is not None:
            raise self._failure

    async def unload(self, name: str) -> bool:
        """Drop a model from memory; answers that run end first. False: it was not loaded."""
        served = self._find(name)
        async with served.lock:
            if served.backend is None:
                return False
            while not served.backend.idle:
                await asyncio.sleep(_SHORTEST_LOOK_S)
            await self._free(served)
        return True

    async def close(self) -> bool:
        """End all answers and free all models. False: a graph would not end within the grace period."""
        self._closing = True  # what loads stops at the next report of its progress
        if self._keeper is not None:
            self._keeper.cancel()
        return all(await asyncio.gather(*(self._close(s) for s in self._served.values())))

    async def _close(self, served: _Served) -> bool:
        if served.backend is not None:  # at once: streams wait for it
            return await asyncio.to_thread(served.backend.close, self._settings.grace_s)
        try:
            await asyncio.wait_for(served.lock.acquire(), self._settings.grace_s)
        except asyncio.TimeoutError:
            return False
        served.lock.release()
        if served.backend is None:
            return True
        return await asyncio.to_thread(served.backend.close, self._settings.grace_s)

    # --- one model

    def _find(self, name: str | None) -> _Served:
        default = self._settings.default_model
        if not name or not self.strict:
            known = name in self._served if name else False
            name = name if known else default
        found = self._served.get(name or "") or self._served.get((name or "").removesuffix(_LATEST))
        if found is None:
            raise UnknownModel(name or "", tuple(self._served))
        return found

    async def _load_first(self, name: str) -> None:
        try:
            async with self._served[name].lock:
                await self._load(self._served[name])
        except Exception as error:
            _log.error("model %s cannot be loaded: %s", name, error)
            self._failure = error

    async def _load(self, served: _Served) -> None:
        """With the lock held. Makes room by unloading what rests, longest first."""
        entry, options = served.entry, self._settings.engine
        contexts = 1 if self._settings.shared_kv else self._settings.parallel
        while True:
            try:
                await asyncio.to_thread(check_memory, entry.path, options, contexts)
                break
            except NoMemory:
                if not await self._unload_longest_resting(served):
                    raise

        def progress(part: float) -> None:
            served.progress = part
            if self._closing:
                raise ShuttingDown

        def load() -> Scheduler:
            parallel, shared = self._settings.parallel, self._settings.shared_kv
            opened = self._open(
                entry.path,
                options=options,
                n_parallel=parallel,
                n_sequences=sequences_for(parallel, shared=shared),
                shared=shared,
                progress=progress,
            )
            return Scheduler(
                opened,
                entry,
                parallel=parallel,
                queue=self._settings.queue,
                shared=shared,
                disk=self._disk(entry),
                observe=self._observe,
            )

        served.progress = 0.0
        _log.info("loading %s", entry.name)
        served.backend = await asyncio.to_thread(load)
        served.progress = 1.0
        _log.info("loaded %s in %.1f s", entry.name, served.backend.info.load_s)

    async def _free(self, served: _Served) -> None:
        """With the lock held."""
        backend, served.backend = served.backend, None
        if backend is not None:
            await asyncio.to_thread(backend.close)
            _log.info("unloaded %s", served.entry.name)

    async def _unload_longest_resting(self, wanted: _Served) -> bool:
        resting = [
            s
            for s in self._served.values()
            if s is not wanted and s.backend is not None and s.backend.idle and not s.lock.locked()
        ]
        if not resting:
            return False
        served = min(resting, key=lambda s: s.backend.last_used if s.backend else 0.0)
        async with served.lock:
            await self._free(served)
        return True

    async def _unload_resting(self) -> None:
        """Unloads what nobody used for `idle_s`; the default model too."""
        limit = self._settings.idle_s
        while True:
            await asyncio.sleep(max(_SHORTEST_LOOK_S, min(limit / 4, 5.0)))
            for served in self._served.values():
                backend = served.backend
                if backend is None or served.lock.locked():
                    continue
                if backend.idle and time.monotonic() - backend.last_used >= limit:
                    async with served.lock:
                        await self._free(served)

    def _entry(self, served: _Served) -> ModelEntry:
        backend = served.backend
        if backend is None:
            return served.entry
        left = self._settings.idle_s - (time.monotonic() - backend.last_used)
        expires = time.time() + left if self._settings.idle_s else None
        return replace(served.entry, loaded=True, expires_at=expires)

    def _disk(self, entry: ModelEntry) -> DiskCache | None:
        if self._settings.cache_dir is None:
            return None
        return DiskCache(
            self._settings.cache_dir,
            f"{entry.digest} {self._settings.engine.repack}",
            max_bytes=self._settings.cache_bytes,
            min_tokens=self._settings.cache_min_tokens,
        )
