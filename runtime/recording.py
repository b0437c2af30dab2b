"""A text run token by token: the logits of one run kept, and those of another compared with them.

A window's first tokens are its prompt, the others are decode steps of one token, so that a policy that
answers differently is at work exactly as in an answer: in wider batches it would hardly show. The
position right after a prompt is not scored: prompts are run by the true router in every mode.

Knows an engine that scores tokens; nothing of modes or files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.engine import Engine
from speculoe_local.runtime.errors import BackendError
from speculoe_local.runtime.quality import Position, compare

__all__ = ["Recording", "Tokens", "record", "score", "windows"]

Floats = npt.NDArray[np.float32]
Tokens = list[int]


def windows(
    tokens: Sequence[int], *, bos: Sequence[int], window: int, prompt: int, scored: int
) -> list[Tokens]:
    """Cut consecutive windows of at most `window` tokens, each begun with `bos`, that have `scored` scored
    positions in all, fewer where the text ends: of n tokens, n - 1 - `prompt` are scored."""
    found: list[Tokens] = []
    at, left = 0, scored
    while left > 0:
        size = min(window, prompt + 1 + left)
        chunk = [*bos, *tokens[at : at + size - len(bos)]]
        if len(chunk) < prompt + 2:
            break
        found.append(chunk)
        at += len(chunk) - len(bos)
        left -= len(chunk) - 1 - prompt
    return found


class Recording:
    """The logits of windows, float32 as they came, in a temporary file. Close it, or use it as a context
    manager.

    A file, not memory: 1,000 positions of a vocabulary of 200,000 are 800 MB.
    """

    def __init__(self, windows: Sequence[Tokens], prompt: int, n_vocab: int) -> None:
        """Raises BackendError when the folder for temporary files has no room."""
        self.windows = windows
        self.prompt = prompt
        self._row = np.dtype(np.float32).itemsize * n_vocab
        need = self._row * sum(len(window) - 1 - prompt for window in windows)
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if need > free:
            raise BackendError(
                f"logits take {need} bytes, {folder} has {free}; use fewer --tokens, or set TMPDIR"
            )
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it

    def append(self, row: Floats) -> None:
        self._file.write(row.tobytes())

    def row(self, number: int) -> Floats:
        """Logits [n_vocab] of the number-th scored position, over all windows."""
        self._file.seek(number * self._row)
        return np.frombuffer(self._file.read(self._row), np.float32)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def record(
    engine: Engine,
    windows: Sequence[Tokens],
    prompt: int,
    step: Callable[[], None] = lambda: None,
) -> Recording:
    """Run windows; keep the logits of every scored position. `step` is called for each token run."""
    recording = Recording(windows, prompt, engine.vocab.size)
    try:
        for window in windows:
            _each(engine, window, prompt, lambda _, row: recording.append(row), step)
    except BaseException:
        recording.close()
        raise
    return recording


def score(
    engine: Engine, recording: Recording, step: Callable[[], None] = lambda: None
) -> list[Position]:
    """Run the recorded windows with `engine`; how each position compares with the recorded one."""
    positions: list[Position] = []

    def see(target: int, row: Floats) -> None:
        positions.append(compare(recording.row(len(positions)), row, target))

    for window in recording.windows:
        _each(engine, window, recording.prompt, see, step)
    return positions


def _each(
    engine: Engine,
    window: Tokens,
    prompt: int,
    see: Callable[[int, Floats], None],
    step: Callable[[], None],
) -> None:
    """Show `see` each decode step of a window: the token that follows, and the logits before it."""
    seen = 0
    for row in engine.score(window[:-1], prompt=prompt):
        step()
        if seen:  # the first row is the prompt's
            see(window[prompt + seen], row)
        seen += 1
    if seen != len(window) - prompt:
        raise BackendError(f"scoring was interrupted after {seen} of {len(window) - prompt} tokens")
