"""The program under test: in a pipe (`run`) or on a terminal (`terminal`), with a home of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pyte
import pytest

FAKE = Path(__file__).with_name("fake_program.py")
ROWS, COLUMNS = 50, 100


class Terminal:
    """A program on a pseudo-terminal, and the screen a user would see."""

    def __init__(self, command, env):
        self.child = pexpect.spawn(
            command[0], command[1:], env=env, dimensions=(ROWS, COLUMNS), timeout=20
        )
        self.child.delaybeforesend = None
        self.raw = b""
        self._screen = pyte.Screen(COLUMNS, ROWS)
        # The program may ask where the cursor is, and waits for the terminal's answer.
        self._screen.write_process_input = self.child.send
        self._stream = pyte.ByteStream(self._screen)

    def press(self, keys):
        self.child.send(keys)

    def enter(self, line):
        """Type a line, see it on the screen, press Enter."""
        self.press(line)
        self._until(lambda: not self._on_prompt(), line, 20)
        self.press("\r")

    def lines(self):
        return [line.rstrip() for line in self._screen.display]

    def see(self, text, seconds=20):
        """Read until `text` is on the screen."""
        self._until(lambda: any(text in line for line in self.lines()), text, seconds)

    def ready(self):
        """Read until the program waits for input on an empty line."""
        self._until(lambda: self._on_prompt(), ">>> ", 20)

    def answering(self, seconds=60):
        """Read until an answer has begun."""
        self._until(lambda: self._screen.cursor.x > 0 and not self._on_input(), "answer", seconds)

    def leaves(self):
        """Read to the end; the exit code."""
        self.child.expect(pexpect.EOF)
        self._take(self.child.before)
        self.child.close()
        return self.child.exitstatus

    def _on_input(self):
        return self._screen.display[self._screen.cursor.y].startswith(">>>")

    def _on_prompt(self):
        return self._on_input() and self._screen.cursor.x == 4

    def _until(self, holds, what, seconds):
        end = time.monotonic() + seconds
        while not holds():
            left = end - time.monotonic()
            assert left > 0, f"{what!r} is not on the screen:\n" + "\n".join(self.lines())
            try:
                self._take(self.child.read_nonblocking(65536, timeout=min(left, 0.5)))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                pytest.fail(f"left before {what!r}:\n" + "\n".join(self.lines()))

    def _take(self, data):
        self.raw += data
        self._stream.feed(data)


@pytest.fixture
def env(tmp_path):
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "SPECULOE_HISTORY", "SPECULOE_TRACEBACK")
    }
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    return {**kept, **home, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    return path


@pytest.fixture
def run(env, model):
    """Run the program over the fake engine with pipes; `input` is bytes on standard input."""

    def start(*arguments, input=b"", model=model, **more):
        command = [sys.executable, FAKE, "chat", *([model] if model else []), *arguments]
        return subprocess.run(
            command, input=input, env={**env, **more}, capture_output=True, timeout=30, check=False
        )

    return start


@pytest.fixture
def terminal(env, model):
    """Start the program over the fake engine on a terminal."""
    started = []

    def start(*arguments, model=model, command=None, **more):
        command = command or [sys.executable, FAKE, "chat", model]
        opened = Terminal([str(part) for part in [*command, *arguments]], {**env, **more})
        started.append(opened)
        return opened

    yield start
    for opened in started:
        opened.child.close(force=True)
