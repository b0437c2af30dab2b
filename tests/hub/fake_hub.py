"""A hub on the loopback: tree, resolve, HEAD, Range, and every way of failing that a hub has.

    with FakeHub() as hub:
        hub.add("owner/repo", {"model-Q8_0.gguf": content})
        hub.fail("GET", "Q8_0", Cut(after=1000))

Counts connections and the bytes of bodies it has sent, so that a test can say what was asked twice.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Failure:
    """What the next `times` matching requests get instead. `status` 0 sends the real answer.

    `cut` closes after that many bytes of the body, `body` replaces it, `delay_s` is waited before
    each `chunk` bytes, `gate` is waited for after the first `chunk`.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    body: bytes | None = None
    ignore_range: bool = False
    range_shift: int = 0
    delay_s: float = 0.0
    chunk: int = 1 << 16
    gate: threading.Event | None = None
    times: int = 1


@dataclass
class Request:
    method: str
    path: str
    range: str
    authorization: str


class FakeHub:
    """Serves `repos`: name -> {path: bytes}. Paths in `plain` are no LFS files there."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, str] = {}
        self.wrong_hash: set[str] = set()
        self.plain: set[str] = set()
        self.requests: list[Request] = []
        self.sent: dict[str, int] = {}
        self.connections = 0
        self.token: str | None = None
        self._failures: list[tuple[str, str, Failure]] = []
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.owner = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, repo: str, files: dict[str, bytes], commit: str = COMMIT) -> None:
        self.repos[repo] = dict(files)
        self.commits[repo] = commit

    def fail(self, method: str, path: str, failure: Failure) -> None:
        """`method` requests whose path contains `path` meet `failure`, `failure.times` times."""
        self._failures.append((method, path, failure))

    def failure(self, method: str, path: str) -> Failure:
        with self._lock:
            for wanted, part, failure in self._failures:
                if wanted == method and part in path and failure.times > 0:
                    failure.times -= 1
                    return failure
        return Failure()

    def asked(self, method: str) -> list[Request]:
        return [request for request in self.requests if request.method == method]

    def downloads(self) -> list[Request]:
        return [request for request in self.asked("GET") if "/resolve/" in request.path]

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: FakeHub

    def process_request(self, request: Any, client_address: Any) -> None:
        self.owner.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    owner: FakeHub
    protocol_version = "HTTP/1.1"
    timeout = 20

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def _answer(self, method: str) -> None:
        hub = self.owner
        path = unquote(urlsplit(self.path).path)
        hub.requests.append(
            Request(
                method,
                path,
                self.headers.get("Range", ""),
                self.headers.get("Authorization", ""),
            )
        )
        failure = hub.failure(method, path)
        if failure.status:
            self._send(failure.status, failure.headers, failure.body or b"{}", method)
            return
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
            self._tree(match[1], match[2], failure)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(method, match[1], match[2], match[3], failure)
        else:
            self._send(404, {}, b"{}", method)

    def _known(self, repo: str, revision: str, method: str) -> bool:
        hub = self.owner
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._send(401, {"X-Error-Code": "RepoNotFound"}, b"{}", method)
        elif repo not in hub.repos:
            self._send(404, {"X-Error-Code": "RepoNotFound"}, b"{}", method)
        elif revision not in ("main", "v1", hub.commits[repo]):
            self._send(404, {"X-Error-Code": "RevisionNotFound"}, b"{}", method)
        else:
            return True
        return False

    def _tree(self, repo: str, revision: str, failure: Failure) -> None:
        if not self._known(repo, revision, "GET"):
            return
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": "sub", "oid": "0" * 40, "size": 0}
        ]
        for path, content in self.owner.repos[repo].items():
            entry: dict[str, Any] = {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": _git_sha(content),
            }
            if path not in self.owner.plain:
                entry["lfs"] = {
                    "oid": self._sha(path, content),
                    "size": len(content),
                    "pointerSize": 134,
                }
            entries.append(entry)
        body = failure.body if failure.body is not None else json.dumps(entries).encode()
        self._send(200, {"Content-Type": "application/json"}, body, "GET")

    def _file(self, method: str, repo: str, revision: str, path: str, failure: Failure) -> None:
        if not self._known(repo, revision, method):
            return
        hub = self.owner
        content = hub.repos[repo].get(path)
        if content is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"}, b"{}", method)
            return
        plain = path in hub.plain
        etag = _git_sha(content) if plain else self._sha(path, content)
        headers = {
            "X-Repo-Commit": hub.commits[repo],
            "ETag": f'"{etag}"',
            "X-Linked-Size": str(len(content)),
            "Accept-Ranges": "bytes",
        }
        if not plain:
            headers["X-Linked-Etag"] = f'"{etag}"'
        headers |= failure.headers
        status = 200
        body = failure.body if failure.body is not None else content
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and not failure.ignore_range:
            start = int(asked[1])
            if start >= len(content):
                self._send(416, {"Content-Range": f"bytes */{len(content)}"}, b"", method)
                return
            status, body = 206, body[start:]
            shown = start + failure.range_shift
            headers["Content-Range"] = f"bytes {shown}-{len(content) - 1}/{len(content)}"
        self._send(status, headers, body, method, failure, path)

    def _sha(self, path: str, content: bytes) -> str:
        if path in self.owner.wrong_hash:
            return hashlib.sha256(content + b"?").hexdigest()
        return hashlib.sha256(content).hexdigest()

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        body: bytes,
        method: str,
        failure: Failure | None = None,
        path: str = "",
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if method == "HEAD":
            return
        failure = failure or Failure()
        end = len(body) if failure.cut is None else min(failure.cut, len(body))
        for start in range(0, end, failure.chunk):
            piece = body[start : min(end, start + failure.chunk)]
            self.wfile.write(piece)
            with self.owner._lock:
                self.owner.sent[path] = self.owner.sent.get(path, 0) + len(piece)
            if failure.gate is not None:
                failure.gate.wait(20)
            if failure.delay_s:
                time.sleep(failure.delay_s)
        if end < len(body):
            self.close_connection = True
            self.connection.shutdown(2)


def _git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
