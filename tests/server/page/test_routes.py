"""The page: its files, what it may load, what it looks at."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from speculoe_local.server.errors import Loading
from speculoe_local.server.jobs import LayerView, Snapshot
from speculoe_local.server.page import routes as page
from speculoe_local.server.settings import Settings
from tests.server.fake_backend import FakeBackend, FakeBackends, client_of, say

FOLDER = Path(page.__file__).with_name("static")


class Slotted(FakeBackend):
    """A model whose experts have slots."""

    def snapshot(self, *, layers: bool = False) -> Snapshot:
        views = (LayerView(1, 8, 2.0, 3.0, 1.0, 0.5, 0.75),) if layers else ()
        return replace(super().snapshot(), layers=views, residency=0.25)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    client = client_of(page.router(FakeBackends(FakeBackend(say("x"))), Settings()))
    answer = client.get("/")
    assert 200 == answer.status_code
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    assert named
    assert all(client.get(name).status_code == 200 for name in named)
    assert not re.search(r"<script>|<style>|\son[a-z]+=|style=", answer.text)


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_its_files_name_no_other_server_and_make_no_markup_of_text(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_its_files_are_served_as_what_they_are() -> None:
    client = client_of(page.router(FakeBackends(FakeBackend(say("x"))), Settings()))
    script = client.get("/page/static/chat.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "nosniff" == script.headers["x-content-type-options"]
    assert 404 == client.get("/page/static/../page.py").status_code


def test_the_state_has_what_the_page_draws() -> None:
    client = client_of(page.router(FakeBackends(Slotted(say("x"))), Settings()))
    state = client.get("/page/state").json()
    assert state["loading"] is None
    assert ["fake"] == state["served"]
    model = state["models"][0]
    assert (0.25, "exact") == (model["residency"], model["mode"])
    assert 0 == model["experts"]["requests"]
    layer = model["layers"][0]
    assert {"block": 1, "n_expert": 8, "slots": 2.0, "hit_rate": 0.75}.items() <= layer.items()
    drawn = (FOLDER / "live.js").read_text()
    for name in re.findall(r"\b(?:model|chosen)\.([a-z_]+)", drawn):
        assert name in model, name
    for name in re.findall(r"\blayer\.([a-z_]+)", drawn):
        assert name in layer, name
    for name in re.findall(r"\b(?:now|experts)\.([a-z_]+)|since\(\"([a-z_]+)\"\)", drawn):
        assert (name[0] or name[1]) in model["experts"], name


def test_a_model_on_its_way_is_shown_as_such() -> None:
    backends = FakeBackends(FakeBackend(say("x")), loading=Loading(0.5))
    state = client_of(page.router(backends, Settings())).get("/page/state").json()
    assert 0.5 == state["loading"]
