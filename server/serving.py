"""Runs the application on a socket until it is told to stop. Knows uvicorn, nothing of dialects."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from speculoe_local.runtime.errors import OptionError, SpeculoeError
from speculoe_local.server.app import create_app
from speculoe_local.server.http.metrics import Metrics
from speculoe_local.server.models import Models
from speculoe_local.server.settings import Settings

__all__ = ["Serving", "listen"]

_BACKLOG = 128
_KEEP_ALIVE_S = 75  # longer than clients' pools keep a connection


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OptionError when the address is taken or not ours."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # asyncio spares a connection Nagle's 40 ms only where its socket names TCP, and this one's leave it out.
        return socket.socket(
            family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listening.detach()
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(
            f"--host {host} --port {port}: {reason}; choose another address or port"
        ) from None


class Serving(uvicorn.Server):
    """One server. `run` serves in this thread; `stop` may be called from any."""

    def __init__(
        self,
        settings: Settings,
        *,
        ready: Callable[[Models], None] | None = None,
        models: Models | None = None,
    ) -> None:
        """`ready` is called, in the loop's thread, once the first model is there."""
        metrics = Metrics()
        self.models = models or Models(settings, observe=metrics.observe)
        self.failure: BaseException | None = None
        self.signal: int | None = None  # what ended it
        self.stuck = False  # a graph runs on: the process must not wait for its thread
        self._settings = settings
        self._ready = ready
        app = create_app(self.models, settings, metrics)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.grace_s)),
            )
        )

    def run_on(self, listening: socket.socket) -> None:
        """Serve until stopped. Raises what kept the first model from loading."""
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._run(listening))
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left))
            if not self.stuck:  # else a thread would be waited for that does not end
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends quietly; whoever called `run_on` decides what the signal means. A second one insists."""
        self.force_exit = self.should_exit
        self.signal = sig
        self.should_exit = True

    async def _run(self, listening: socket.socket) -> None:
        await self.models.start()
        watch = asyncio.create_task(self._watch())
        try:
            await self.serve(sockets=[listening])
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            self.stuck = not await self.models.close()

    async def _watch(self) -> None:
        try:
            await self.models.wait()
        except SpeculoeError as error:
            self.failure = error
            self.should_exit = True
            return
        if self._ready is not None:
            self._ready(self.models)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Open streams end first, with an error; only then their connections can close."""
        self.stuck = not await self.models.close()
        await super().shutdown(sockets)
