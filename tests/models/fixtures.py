"""The pytest fixture of this package; a conftest takes it with one import."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.tiny import cached

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Return `get(family, quant=None) -> Path`, each model built once per session."""
    directory = tmp_path_factory.mktemp("tiny-models")

    def get(family: str, quant: str | None = None) -> Path:
        return cached(family, quant, directory)

    return get
