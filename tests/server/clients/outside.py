"""Programs of others, run as their users run them: in processes of their own, against a server of ours.

Knows nothing of what they ask. A script that runs several cases prints, as its last line, one JSON object with
what each case returned, or `{"failure": why}`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["run", "run_cases"]

_LIMIT_S = 240.0
# Loopback is reached without whatever proxy the machine has.
_DIRECT = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
) -> str:
    """What it printed, once it has ended well; an AssertionError with its last lines otherwise."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        input=stdin,
        env={**os.environ, **_DIRECT, **(env or {})},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert 0 == done.returncode, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


class Cases(dict[str, Any]):
    """What each case returned, by its name."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        failure = found.get("failure") if isinstance(found, dict) else None
        assert failure is None, f"{name}: {failure}"
        return found


def run_cases(command: Sequence[str | Path], **how: Any) -> Cases:
    """The cases of a script that prints them."""
    return Cases(json.loads(run(command, **how).splitlines()[-1]))
