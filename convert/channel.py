"""The worker's side of `child`: one request in, lines of JSON out.

Standard library only, so that a worker decides itself what is imported.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

__all__ = ["Channel"]


class Channel:
    """The worker's side: standard output is the channel, whatever else prints goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.request: dict[str, Any] = json.loads(sys.stdin.readline())

    def progress(self, share: float) -> None:
        self._send({"progress": share})

    def note(self, text: str) -> None:
        self._send({"note": text})

    def result(self, value: Any) -> None:
        self._send({"result": value})

    def error(self, text: str) -> None:
        """One line, whatever `text` has."""
        self._send({"error": " ".join(text.split())})

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()
