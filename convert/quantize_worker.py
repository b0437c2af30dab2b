"""The quantizer's process: one llama_model_quantize, then the result is opened once more.

Takes a request of `quantize` (see `child`) with types already decided; knows llama.cpp's structures.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, Final

from speculoe_local.convert.channel import Channel
from speculoe_local.convert.imatrix import read_imatrix
from speculoe_local.convert.open_worker import Complaint, open_problem
from speculoe_local.runtime.errors import SpeculoeError
from speculoe_local.runtime.lib import llama

__all__ = ["main"]

_STEP: Final = re.compile(r"\[ *(\d+)/ *(\d+)\] ")
_ROWS_AT_ONCE: Final = 1 << 30  # bytes; upstream's default of 8 GiB is more than many machines have


class _Log(Complaint):
    """llama.cpp's log, whose steps become progress."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        super().__init__()

    def line(self, line: str) -> None:
        if step := _STEP.match(line):
            self._channel.progress((int(step[1]) - 1) / max(int(step[2]), 1))


def main() -> None:
    """Serve the one request on standard input."""
    channel = Channel()
    try:
        _quantize(channel, _Log(channel))
    except (SpeculoeError, OSError) as error:
        channel.error(str(error))


def _quantize(channel: Channel, log: _Log) -> None:
    request = channel.request
    params = llama.llama_model_quantize_default_params()
    params.ftype = request["ftype"]
    params.nthread = request["threads"]
    params.allow_requantize = True  # what that costs is said to the user, who has no other weights
    params.max_buf_size = _ROWS_AT_ONCE
    types = request["types"]
    overrides = (llama.llama_model_tensor_override * (len(types) + 1))()
    for row, (pattern, kind) in zip(overrides, types, strict=False):
        row.pattern, row.type = pattern.encode(), kind
    params.tt_overrides = overrides
    kept: list[Any] = []
    if request["imatrix"]:
        params.imatrix = _imatrix(Path(request["imatrix"]), kept)
    status = llama.llama_model_quantize(
        request["model"].encode(), request["out"].encode(), ctypes.byref(params)
    )
    if status:
        channel.error(log.last or f"llama_model_quantize returned {status}")
        return
    channel.progress(1.0)
    if problem := open_problem(request["out"], log):
        channel.error(f"llama.cpp cannot open the result: {problem}")
    else:
        channel.result({})


def _imatrix(path: Path, kept: list[Any]) -> Any:
    """The entries as llama.cpp takes them; `kept` must live as long as they do."""
    entries = read_imatrix(path).entries
    table = (llama.llama_model_imatrix_data * (len(entries) + 1))()
    for row, (name, entry) in zip(table, entries.items(), strict=False):
        weights = entry.weights().reshape(-1)
        kept.append(weights)
        row.name = name.encode()
        row.data = weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        row.size = weights.size
    kept.append(table)
    return table


if __name__ == "__main__":
    main()
