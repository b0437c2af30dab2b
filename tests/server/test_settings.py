"""What a server may be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculoe_local.runtime.errors import OptionError
from speculoe_local.server.settings import ModelSpec, Settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 70000}, "--port 70000 is not in 0..65535"),
        ({"parallel": 0}, "--parallel 0 is not in 1..64"),
        ({"queue": -1}, "--queue"),
        ({"ping_s": -1}, "--ping"),
        ({"idle_s": -1}, "--unload-after"),
        ({"cache_bytes": 5}, "--cache-size"),
        ({"max_body_bytes": 5}, "--max-body"),
        ({"origins": ("*",)}, "--cors-origin"),
        ({"keys": ("",)}, "API key"),
        ({"keys": ("k\u00e9y",)}, "API key"),
        ({"models": (ModelSpec("a", Path("x")), ModelSpec("a", Path("y")))}, "used twice"),
        ({"models": (ModelSpec("", Path("x")),)}, "empty"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Settings(**wrong)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_model_is_the_default() -> None:
    assert Settings().default_model is None
    two = (ModelSpec("a", Path("x")), ModelSpec("b", Path("y")))
    assert "a" == Settings(models=two).default_model
