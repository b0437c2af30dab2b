"""The converter's process: llama.cpp's convert_hf_to_gguf on one folder, without its prompts and network.

Imports nothing of ours but the channel: the converter brings a `gguf` package that knows more
architectures than the released one, and it must be the only one here.
Source: convert_hf_to_gguf.py and conversion/base.py at the pin.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from speculoe_local.convert.channel import Channel

__all__ = ["main"]


class _Log(logging.Handler):
    """Keeps what the converter complains of, and the tokenizer's hash where it shows one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.error = ""
        self.hash = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "chkhsh:" in text:
            self.hash = text.partition("chkhsh:")[2].strip()
        if record.levelno >= logging.ERROR:
            self.error = text


class _Bar:
    """Stands in for tqdm while tensors are written."""

    def __init__(self, report: Callable[[float], None], total: float | None) -> None:
        self._report, self._total, self._done = report, total or 1, 0.0

    def update(self, n: float = 1) -> None:
        self._done += n
        self._report(min(self._done / self._total, 1.0))

    def close(self) -> None:
        """Nothing was opened."""


def main() -> None:
    """Serve the one request on standard input."""
    channel = Channel()
    log = _Log()
    logging.getLogger().addHandler(log)
    try:
        _convert(channel, log)
    except SystemExit:
        channel.error(log.error or "the converter stopped without a word")
    except Exception as error:
        channel.error(f"{type(error).__name__}: {error}")


def _convert(channel: Channel, log: _Log) -> None:
    request = channel.request
    transformers: Any = importlib.import_module("transformers")
    for loader in (transformers.AutoTokenizer, transformers.AutoConfig):
        loader.from_pretrained = _without_code(loader.from_pretrained, request["allow_code"])
    program: Any = importlib.import_module("convert_hf_to_gguf")
    conversion: Any = importlib.import_module("conversion")
    gguf: Any = importlib.import_module("gguf")
    gguf.fill_templated_filename = lambda name, output_type: name  # braces in a name are its own
    tqdm: Any = importlib.import_module("tqdm")
    tqdm.tqdm = lambda *_, total=None, **__: _Bar(channel.progress, total)
    pre = request["tokenizer_pre"]
    seen: list[str] = []
    known = conversion.TextModel.get_vocab_base_pre

    def pre_of(model: Any, tokenizer: Any) -> str:
        if pre:
            return str(pre)
        try:
            seen.append(known(model, tokenizer))
        except NotImplementedError:
            raise LookupError(log.hash) from None
        return seen[-1]

    conversion.TextModel.get_vocab_base_pre = pre_of
    sys.argv = ["convert", request["folder"], "--outfile", request["out"]]
    sys.argv += ["--outtype", request["outtype"]]
    if request["name"]:
        sys.argv += ["--model-name", request["name"]]
    try:
        program.main()
    except LookupError as error:
        if not log.hash:
            raise
        channel.error(f"unknown tokenizer {error}")
        return
    channel.result({"tokenizer_pre": pre or (seen[-1] if seen else "")})


def _without_code(load: Callable[..., Any], allow: bool) -> Callable[..., Any]:
    """`load` that runs Python from the model's folder only if allowed; the converter asks for it."""

    def guarded(*arguments: Any, **options: Any) -> Any:
        return load(*arguments, **{**options, "trust_remote_code": allow})

    return guarded


if __name__ == "__main__":
    main()
