"""`speculoe-local rpc-serve`: this machine's devices, for a program on another one that says `--rpc`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from speculoe_local.cli import options as opt

__all__ = ["rpc_serve"]

_POLL_S = 0.5


def rpc_serve(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="IPv4 address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")
    ] = 50052,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
) -> None:
    """Let other machines use a device of this one: there, `--rpc HOST:PORT` gives it layers.

    Whoever reaches the port may use it: it asks for no key and encrypts nothing. Ctrl-C ends it.
    """
    from speculoe_local.cli.engine_thread import leave
    from speculoe_local.runtime import devices, machine, rpc
    from speculoe_local.runtime.errors import BackendError
    from speculoe_local.runtime.placement import format_bytes

    chosen = devices.choose(device)
    here = machine.look()
    if not rpc.is_loopback(host):
        print(
            f"warning: whoever reaches {host} may read, write and run what they like in this process: "
            "the protocol has no authentication; keep it to a network of your own, or tunnel it",
            file=sys.stderr,
            flush=True,
        )
    with Path(os.devnull).open("wb") as null:
        os.dup2(null.fileno(), 1)  # ggml prints every connection; clients open several at a time
    exposed = rpc.expose(host, port, chosen, threads or here.cores)
    what = (
        f"the CPU with {threads or here.cores} threads, {format_bytes(here.available_bytes)} available"
        if chosen is None
        else f"{chosen.kind}:{chosen.index} {chosen.description}, {format_bytes(chosen.free_bytes)} free"
    )
    print(f"serving {what} on {exposed.host}:{exposed.port}", file=sys.stderr, flush=True)
    try:
        while exposed.wait(_POLL_S):
            pass
    except KeyboardInterrupt:
        leave(130)
    raise BackendError(f"{exposed.host}:{exposed.port} is no longer listened on; start it again")
