"""Between the worker thread, which makes deltas, and event loops, which wait for them."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from speculoe_local.server.jobs import Delta, Job

__all__ = ["LiveTicket", "Mail"]

Item = Delta | BaseException


class LiveTicket:
    """An accepted job, waited for in the loop that made it."""

    def __init__(
        self, job: Job, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[LiveTicket], None]
    ) -> None:
        self.id = uuid.uuid4().hex
        self.job = job
        self.loop = loop
        self.cancelled = False  # written by any thread, read by the worker
        self._on_cancel = on_cancel
        self._items: deque[Item] = deque()
        self._more = asyncio.Event()

    def cancel(self) -> None:
        """Nobody waits any more. Any thread; harmless when the answer is done."""
        if not self.cancelled:
            self.cancelled = True
            self._on_cancel(self)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[Delta]:
        while True:
            while self._items:
                item = self._items.popleft()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finish is not None:
                    return
            self._more.clear()
            await self._more.wait()

    def deliver(self, item: Item) -> None:
        """In the ticket's loop only."""
        self._items.append(item)
        self._more.set()


class Mail:
    """What a step of the worker has to tell, sent with one wake-up per loop."""

    def __init__(self) -> None:
        self._outgoing: dict[asyncio.AbstractEventLoop, list[tuple[LiveTicket, Item]]] = {}

    def put(self, ticket: LiveTicket, item: Item) -> None:
        self._outgoing.setdefault(ticket.loop, []).append((ticket, item))

    def flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for loop, items in outgoing.items():
            with suppress(RuntimeError):  # the loop is closed: nobody waits there
                loop.call_soon_threadsafe(_deliver, items)


def _deliver(items: list[tuple[LiveTicket, Item]]) -> None:
    for ticket, item in items:
        ticket.deliver(item)
