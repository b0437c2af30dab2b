"""Other machines as devices: what `rpc-serve` exposes there, and exposing this one.

The protocol is ggml's (ggml-rpc), over TCP, with neither authentication nor encryption. Knows endpoints
and devices; which layers go where is `spread`'s business.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from speculoe_local.runtime import devices, lib
from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import BackendError, OptionError
from speculoe_local.runtime.options import Peer
from speculoe_local.runtime.spread import Member

__all__ = ["Exposed", "connect", "expose", "is_loopback", "lost", "say_hello", "silent"]

_HELLO: Final = 14  # RPC_CMD_HELLO
_CAPS_BYTES: Final = 24  # RPC_CONN_CAPS_SIZE, all zero: plain TCP
_TIMEOUT_S: Final = 5.0


def connect(peers: Sequence[Peer]) -> tuple[Member, ...]:
    """What each peer exposes, with its memory as of now.

    Raises OptionError where a host has no address, BackendError where nobody answers, or somebody else.
    """
    return tuple(Member(p.endpoint, _devices(p.host, p.port), p.layers) for p in peers)


def lost(endpoints: Sequence[str]) -> str:
    """The first of `endpoints`, each one in use by an open model, whose connection broke; "" for none.

    ggml finds out while it sends or waits for an answer: ask after a graph has finished.
    """
    is_lost = _function("ggml_backend_rpc_is_lost", ctypes.c_bool, ctypes.c_char_p)
    return next((endpoint for endpoint in endpoints if is_lost(endpoint.encode())), "")


def silent(endpoints: Sequence[str]) -> str:
    """The first of `endpoints` where nobody answers now, or ""."""
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        try:
            say_hello(host, int(port))
        except OSError:
            return endpoint
    return ""


def say_hello(host: str, port: int, timeout_s: float = _TIMEOUT_S) -> tuple[int, int, int]:
    """The version of the protocol spoken at `host`:`port`, as (major, minor, patch).

    Asked in our own words first because ggml waits for an answer without end. Raises OSError where
    nobody answers in time, or not in the way of this protocol.
    """
    with socket.create_connection((host, port), timeout=timeout_s) as line:
        line.sendall(struct.pack("<BQ", _HELLO, _CAPS_BYTES) + bytes(_CAPS_BYTES))
        with line.makefile("rb") as answers:
            answer = answers.read(8 + 4 + _CAPS_BYTES)
    if len(answer) != 8 + 4 + _CAPS_BYTES or answer[:8] != struct.pack("<Q", 4 + _CAPS_BYTES):
        raise ConnectionError("it speaks another protocol")
    return answer[8], answer[9], answer[10]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`. Raises OptionError unless it is IPv4."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        raise OptionError(
            f"--host {host[:60]!r} is not an IPv4 address; use one, such as 127.0.0.1"
        ) from None


class Exposed:
    """Devices of this machine that others can use until the process ends: ggml cannot take them back."""

    def __init__(self, host: str, port: int, serving: threading.Thread) -> None:
        self.host, self.port = host, port
        self._serving = serving

    def wait(self, timeout_s: float) -> bool:
        """Whether it still listens after `timeout_s`."""
        self._serving.join(timeout_s)
        return self._serving.is_alive()


def expose(host: str, port: int, device: Device | None, threads: int) -> Exposed:
    """Let others use `device` (None: the CPU, with `threads`); returns once it answers.

    `port` 0 takes a free one. ggml writes a few lines about it on the C library's standard output.

    Raises OptionError when `host` is no IPv4 address of this machine or the port is taken,
    BackendError when it does not start.
    """
    port = _free_port(host, port)
    handle = device.handle if device is not None else _cpu()
    start = _function(
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    table = (ctypes.c_void_p * 1)(handle)

    def serve() -> None:
        start(f"{host}:{port}".encode(), None, threads, 1, table)

    serving = threading.Thread(target=serve, name="rpc", daemon=True)
    serving.start()
    exposed = Exposed(host, port, serving)
    asked = "127.0.0.1" if host == "0.0.0.0" else host
    for _ in range(200):
        try:
            say_hello(asked, port)
            return exposed
        except OSError:
            if not exposed.wait(0.02):
                break
    raise BackendError(f"{host}:{port} cannot be listened on; choose another --host or --port")


def _devices(host: str, port: int) -> tuple[Device, ...]:
    endpoint = f"{host}:{port}"
    try:
        say_hello(host, port)
    except socket.gaierror:
        raise OptionError(f"--rpc {endpoint}: no address for {host!r}; check the name") from None
    except OSError as error:
        reason = error.strerror or str(error) or "no answer"
        raise BackendError(
            f"--rpc {endpoint}: {reason}; run `speculoe-local rpc-serve` there, or leave it out"
        ) from None
    lib.log.clear()
    add = _function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    added = add(endpoint.encode())
    found = devices.listed("rpc", added) if added else ()
    if not found or not all(device.total_bytes for device in found):
        raise BackendError(
            f"--rpc {endpoint}: {lib.log.last()}; both ends need the same version of this program"
        )
    return found


def _free_port(host: str, port: int) -> int:
    is_loopback(host)  # an address at all
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise OptionError(f"--host {host} --port {port}: {error.strerror}; choose others") from None


@functools.cache
def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function of the module, which exports them by name through its registry."""
    find = lib.llama_library.ggml_backend_reg_get_proc_address
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    address = find(devices.registry("rpc"), name.encode())
    if not address:
        raise BackendError(f"the library for --rpc has no {name}; run `make setup`")
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def _cpu() -> int:
    find = lib.llama_library.ggml_backend_dev_by_type
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_int]
    handle: int = find(0)  # GGML_BACKEND_DEVICE_TYPE_CPU
    return handle
