"""Opens GGUF files with llama.cpp in a process of its own: what it cannot load is no result.

Weights stay mapped and untouched, so this reads headers; a file that makes llama.cpp abort ends this
process alone.
"""

from __future__ import annotations

from typing import Any

from speculoe_local.convert.channel import Channel
from speculoe_local.runtime.lib import llama, on_cpu

__all__ = ["Complaint", "main", "open_problem"]

_ERROR = 4  # ggml_log_level


class Complaint:
    """A log callback that keeps llama.cpp's last error."""

    def __init__(self) -> None:
        self.last = ""
        self.callback = llama.llama_log_callback(self)
        llama.llama_log_set(self.callback, None)

    def __call__(self, level: int, text: bytes | None, _data: object) -> None:
        line = (text or b"").decode("utf-8", "replace").strip()
        self.line(line)
        if level >= _ERROR and line.strip("= "):
            # What failed names itself first; what called it only repeats it or says less.
            self.last = line.partition(": ")[2] or line

    def line(self, line: str) -> None:
        """Every line passes here; for who wants to see progress in it."""


def open_problem(path: str, complaint: Complaint) -> str:
    """Why llama.cpp cannot open `path`; empty when it can."""
    params = on_cpu(llama.llama_model_default_params())
    params.use_extra_bufts = False
    complaint.last = ""
    model: Any = llama.llama_model_load_from_file(path.encode(), params)
    if not model:
        return complaint.last or "it gave no reason"
    llama.llama_model_free(model)
    return ""


def main() -> None:
    """Serve the one request on standard input."""
    channel = Channel()
    problem = open_problem(channel.request["path"], Complaint())
    if problem:
        channel.error(problem)
    else:
        channel.result({})


if __name__ == "__main__":
    main()
