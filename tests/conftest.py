"""What every test may use. Importing our loader first is what makes `llama_cpp` load our libraries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

import speculoe_local.runtime.lib
from tests.models.fixtures import tiny_model

__all__ = ["repository", "tiny_model"]

# Examples are drawn anew on a developer's machine; where a run decides about a change, they are not.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

assert speculoe_local.runtime.lib.library_folder()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout the tests lie in."""
    return Path(__file__).resolve().parent.parent
