"""What every test may use. Importing our loader first is what makes `llama_cpp` load our libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

import speculoe_local.runtime.lib
from tests.models.fixtures import tiny_model

__all__ = ["repository", "tiny_model"]

assert speculoe_local.runtime.lib.library_folder()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout the tests lie in."""
    return Path(__file__).resolve().parent.parent
