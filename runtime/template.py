"""Chat templates: from messages to the prompt the model was trained on, in bounded time and memory.

Templates run in a process of their own (template_worker.py), started on first use and kept: about
0.1 s once, then well under a millisecond beyond the rendering itself. Knows nothing of tokens.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from speculoe_local.runtime.errors import TemplateError

__all__ = ["CHATML", "CHATML_STOP", "ChosenTemplate", "choose", "prewarm", "render"]

CHATML_STOP = "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CPU_LIMIT_S = 2.0
# A machine whose cores are all taken by decoding may render ten times slower: that is no loop.
WALL_LIMIT_S = 20.0
START_LIMIT_S = 60.0
MEMORY_LIMIT_BYTES = 512 << 20
MAX_CHARS = 8 << 20
MAX_ERROR_CHARS = 300

_WORKER = Path(__file__).with_name("template_worker.py")
# The worker gets this process's import path and nothing else: no site, no working directory.
_BOOT = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv[1]); del sys.argv[1]; "
    "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


class _RoleAndContent(Protocol):
    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


class ChosenTemplate(NamedTuple):
    """`source` is what to render; `notice`, when not None, tells the user why it is not the model's;
    `stops` are stop strings that the choice calls for."""

    source: str
    notice: str | None
    stops: tuple[str, ...]


def choose(template: str | None) -> ChosenTemplate:
    """The model's own template, or ChatML where the GGUF has none."""
    if template is not None and template.strip():
        return ChosenTemplate(template, None, ())
    notice = "the GGUF has no chat template (tokenizer.chat_template): using ChatML"
    return ChosenTemplate(CHATML, notice, (CHATML_STOP,))


def render(
    template: str,
    messages: Sequence[Mapping[str, Any] | _RoleAndContent],
    *,
    bos: str,
    eos: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> str:
    """The prompt as text, special tokens included as the template writes them.

    `messages`: mappings as OpenAI clients send them, or objects with `role` and `content`. `bos`
    and `eos` are the texts of those tokens ("" when the model has none); most templates write
    `bos` themselves, so add none when tokenising a text that begins with it. `extra` are further
    variables of the template, for example `enable_thinking`; all values must fit in JSON.

    Raises `TemplateError` where the template refuses the messages, is wrong, or exceeds 2 s of
    processor time, 512 MiB or 8 Mi characters.
    """
    variables = {
        **extra,
        "messages": [_plain(message) for message in messages],
        "tools": None if tools is None else list(tools),
        "documents": extra.get("documents"),
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos,
        "eos_token": eos,
    }
    request = {"template": template, "variables": variables, "max_chars": MAX_CHARS}
    try:
        line = json.dumps(request).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"chat template: a variable does not fit in JSON: {error}") from error
    reply = _process.ask(line)
    if "error" in reply:
        raise TemplateError(f"chat template {_one_line(reply['error'])}")
    return reply["text"]


def prewarm() -> None:
    """Start the worker without waiting for it, so that the first `render` finds it ready."""
    _process.start()


def _plain(message: Mapping[str, Any] | _RoleAndContent) -> dict[str, Any]:
    if isinstance(message, Mapping):
        return dict(message)
    return {"role": message.role, "content": message.content}


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= MAX_ERROR_CHARS else flat[: MAX_ERROR_CHARS - 1] + "…"


class _WorkerProcess:
    """One worker, restarted after it had to be ended. Any thread may ask; requests queue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ready = False

    def start(self) -> None:
        with self._lock:
            self._start()

    def ask(self, line: bytes) -> dict[str, str]:
        """The worker's reply; raises `TemplateError` when it takes too long or dies."""
        with self._lock:
            process = self._start()
            try:
                if not self._ready:
                    self._await_start()
                return self._exchange(process, line)
            except BaseException:
                # Also on Ctrl-C: a late reply must never be taken for the next one's.
                self._stop()
                raise

    def close(self) -> None:
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a forked child: the worker and its pipes belong to the parent."""
        self.__init__()  # type: ignore[misc]

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        command = [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps(sys.path), str(_WORKER)]
        try:
            process = subprocess.Popen(
                [*command, str(MEMORY_LIMIT_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C at the terminal is for us, not for the worker
            )
        except OSError as error:
            raise TemplateError(
                f"chat template: cannot start {sys.executable!r} to run it: {error}"
            ) from error
        self._process, self._ready = process, False
        self._replies = queue.SimpleQueue()
        threading.Thread(
            target=_read_lines, args=(process, self._replies), name="template", daemon=True
        ).start()
        return process

    def _await_start(self) -> None:
        try:
            line = self._replies.get(timeout=START_LIMIT_S)
        except queue.Empty:
            raise TemplateError(
                f"chat template: its process is not ready after {START_LIMIT_S:.0f} s"
            ) from None
        if not line:
            raise TemplateError("chat template: its process does not start: is jinja2 installed?")
        self._ready = True

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, str]:
        assert process.stdin is not None
        # The worker reads a request whole before it answers, so writing cannot block for ever.
        with suppress(BrokenPipeError):
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        reply = self._await_reply(process)
        if not reply:
            raise TemplateError("chat template brings down its process: the template is at fault")
        decoded: dict[str, str] = json.loads(reply)
        return decoded

    def _await_reply(self, process: subprocess.Popen[bytes]) -> bytes:
        """Wait, watching processor time and memory once the usual few milliseconds are over."""
        with suppress(queue.Empty):
            return self._replies.get(timeout=0.1)
        import psutil

        began = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            watched = psutil.Process(process.pid)
            cpu_before = _cpu_seconds(watched)
            while True:
                with suppress(queue.Empty):
                    return self._replies.get(timeout=0.02)
                if watched.memory_info().rss > MEMORY_LIMIT_BYTES:
                    raise TemplateError(
                        f"chat template needs more than {MEMORY_LIMIT_BYTES >> 20} MiB: "
                        "the template is at fault"
                    )
                cpu = _cpu_seconds(watched) - cpu_before
                if cpu > CPU_LIMIT_S or time.monotonic() - began > WALL_LIMIT_S:
                    raise TemplateError(
                        f"chat template is not done after {CPU_LIMIT_S:.0f} s: it loops"
                    )
        return self._replies.get(timeout=1)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def _cpu_seconds(process: Any) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _read_lines(process: subprocess.Popen[bytes], replies: queue.SimpleQueue[bytes]) -> None:
    """Hand over replies; an empty one says that the worker is gone."""
    assert process.stdout is not None
    with suppress(OSError, ValueError):
        for line in process.stdout:
            replies.put(line)
    replies.put(b"")


_process = _WorkerProcess()
atexit.register(_process.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)
