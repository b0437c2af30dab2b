"""Other machines on this one: `rpc-serve` in processes of its own, and a line to it that can be cut."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["PROGRAM", "Line", "Peer", "peer"]

# A shell may have told its background processes, and so theirs, to ignore Ctrl-C.
PROGRAM = [
    *(sys.executable, "-c"),
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from speculoe_local.cli import main; main()",
]


class Peer:
    """A running `rpc-serve`; `port` 0 takes a free one."""

    def __init__(self, port: int = 0, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [
                *PROGRAM,
                "rpc-serve",
                "--port",
                str(port),
                "--device",
                "cpu",
                "--threads",
                "1",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.said: list[str] = []
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            if line.startswith("serving "):
                break
        else:
            self.process.wait(30)
            raise AssertionError(self.said)
        self.port = int(line.rpartition(":")[2])
        # What it says from now on is read, so that its pipe never fills.
        self._reader = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._reader.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> tuple[int, str]:
        """Exit code and standard output, once it has ended."""
        assert self.process.stdout is not None and self.process.stderr is not None
        out = self.process.stdout.read()
        code = self.process.wait(30)
        self._reader.join(30)
        self.process.stdout.close()
        self.process.stderr.close()
        return code, out


@contextmanager
def peer(port: int = 0, *arguments: str) -> Iterator[Peer]:
    started = Peer(port, *arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()


class Line:
    """Forwards connections to a peer until `limit` bytes of its answers went through; then all are cut."""

    def __init__(self, to: int, limit: int) -> None:
        self.passed = 0
        self._to, self._limit = to, limit
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            for end in [self._listening, *self._ends]:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(*ends, far), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                room = len(data)
                if source is far:
                    with self._lock:
                        room = min(room, max(0, self._limit - self.passed))
                        self.passed += len(data)
                target.sendall(data[:room])
                if room < len(data):
                    break
        if self.passed > self._limit:
            self.cut()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
