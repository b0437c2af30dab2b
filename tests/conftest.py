"""What every test may use. Importing our loader first is what makes `llama_cpp` load our libraries."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

import speculoe_local.runtime.lib
from speculoe_local.runtime import devices
from tests.models.fixtures import tiny_model

__all__ = ["repository", "tiny_model"]

# Examples are drawn anew on a developer's machine; where a run decides about a change, they are not.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

assert speculoe_local.runtime.lib.library_folder()

# A suite that was started in the background ignores Ctrl-C, and its children would: tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A driver reads these once, when it starts: devices are Mesa's in software, whatever the machine has.
os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
for _driver in sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd.*json")):
    os.environ.setdefault("VK_DRIVER_FILES", str(_driver))

# A build for the CPU has no device to test; one that was asked to have one and lacks it must fail.
_WITHOUT_DEVICE = "vulkan" not in (*devices.built(), *os.environ.get("BACKEND", "").split(","))
_ON_DEVICE = [
    f"runtime/test_{name}.py"
    for name in ("device", "lost_device", "misses_on_device", "pinned_on_device", "several_devices")
]
collect_ignore = _ON_DEVICE if _WITHOUT_DEVICE else []


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout the tests lie in."""
    return Path(__file__).resolve().parent.parent


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _WITHOUT_DEVICE:
        terminalreporter.write_line(
            f"left out: {', '.join(_ON_DEVICE)}; this build is for the CPU alone (make test BACKEND=vulkan)"
        )
