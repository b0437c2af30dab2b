"""schemathesis sends what our OpenAPI allows, and much that it does not, to every route of a tiny model's server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.server.clients.outside import run
from tests.server.conftest import Live

# Messages are checked by code that no schema describes: without a hint, nearly every chat would end there.
TURN = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"type": "string", "maxLength": 40},
    },
    "required": ["role", "content"],
}
HINTS = {"messages": {"type": "array", "items": TURN, "minItems": 1, "maxItems": 3}}


def hinted(schema: Any) -> Any:
    """The same schema, its properties that `HINTS` names replaced."""
    if isinstance(schema, list):
        return [hinted(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: hinted(each) for name, each in schema.items()}
    if isinstance(found.get("properties"), dict):
        found["properties"] |= {n: HINTS[n] for n in HINTS.keys() & found["properties"].keys()}
    return found


def finished(live: Live) -> dict[str, int]:
    """How many jobs of the model ended in which way."""
    (model,) = live.models.loaded()
    return dict(model.snapshot().finished)


def test_no_request_is_the_servers_error(filling: Live, tmp_path: Path) -> None:
    document = hinted(filling.get("/openapi.json").json())
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    report = tmp_path / "report.json"
    run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", Path(__file__).with_name("schemathesis.toml")),
            *("run", "openapi.json", "--url", filling.url),
            *("--report", "json", "--report-json-path", report),
        ],
        cwd=tmp_path,
    )
    found = json.loads(report.read_text())
    assert sum(map(len, document["paths"].values())) == found["operations"]["tested"]
    assert [] == found["failures"] == found["errors"]
    assert found["test_cases"]["generated"] > 1000
    # Not all was refused: the model has been at work, and still is.
    ended = finished(filling)
    assert ended["stop"] + ended["length"] > 100
    assert 200 == filling.post("/completion", {"prompt": "go", "n_predict": 2}).status_code
