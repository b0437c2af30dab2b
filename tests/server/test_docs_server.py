"""docs/server.md: every block is run, or sent, and must bring what the page shows below it.

What the page shows of a reply is a part of it: "..." is any text, a number any number, fields and lines may be
left out. Requests without a temperature get 0, or the test would be a game of chance; a stream is left as soon
as it has brought what is shown.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
import typer.main

from speculoe_local.cli.app import app
from speculoe_local.convert.calibrate import calibrate
from speculoe_local.runtime import EngineOptions
from tests.models.fixtures import TinyModel
from tests.server.conftest import Live, serve, tiny_settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "server.md"
HERE = "http://127.0.0.1:8080"
SETTINGS = ("json", "toml", "vim", "yaml")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text and the line of the page it begins at."""

    kind: str
    text: str
    line: int

    @property
    def is_reply(self) -> bool:
        return self.kind == "http" and self.text.startswith("HTTP/")


def sections() -> dict[str, list[Block]]:
    """The blocks under each heading of the second level."""
    found: dict[str, list[Block]] = {}
    lines = iter(enumerate(PAGE.read_text(encoding="utf-8").splitlines(), start=1))
    heading = "The server"
    for number, line in lines:
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("```"):
            body = []
            for _, inside in lines:
                if inside == "```":
                    break
                body.append(inside)
            found.setdefault(heading, []).append(Block(line[3:], "\n".join(body), number))
    return found


SECTIONS = sections()


@pytest.fixture(scope="module")
def guarded(tiny_model: TinyModel) -> Iterator[Live]:
    """The server that the page's section about keys speaks of."""
    settings = tiny_settings(
        tiny_model("qwen3moe"), keys=("secret",), origins=("https://notes.example",)
    )
    with serve(settings) as running:
        yield running


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Live:
    """The server that a section's blocks are meant for."""
    name = {"llama.vim and llama.vscode": "filling", "Who may ask": "guarded"}
    found: Live = request.getfixturevalue(name.get(request.node.callspec.id, "embedded_server"))
    return found


@pytest.mark.parametrize("heading", SECTIONS, ids=str)
def test_the_blocks_of_a_section_do_what_the_page_says(heading: str, served: Live) -> None:
    blocks = SECTIONS[heading]
    names: dict[str, Any] = {}
    try:
        for at, block in enumerate(blocks):
            shown = blocks[at + 1] if at + 1 < len(blocks) else None
            with _placed(block):
                _check(block, shown, blocks, served, names)
    finally:
        for client in names.values():  # scripts leave it to the end of their process
            if isinstance(client, openai.OpenAI | anthropic.Anthropic):
                client.close()
            elif isinstance(client, ollama.Client):
                client._client.close()


@contextlib.contextmanager
def _placed(block: Block) -> Iterator[None]:
    """Failures name the line of the page."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"docs/server.md:{block.line}: {error!r}") from error


def _check(
    block: Block, shown: Block | None, blocks: list[Block], served: Live, names: dict[str, Any]
) -> None:
    text = block.text.replace(HERE, served.url)
    if block.kind == "python":
        assert shown is None or shown.kind in ("text", "python")
        printed = _printed(text, names)
        if shown is not None and shown.kind == "text":
            assert shown.text.split("\n") == printed.rstrip("\n").split("\n")
    elif block.kind == "http" and not block.is_reply:
        assert shown is not None
        assert shown.is_reply
        _replay(block, shown, served)
        _is_configured(block, blocks)
    elif block.kind == "sh":
        if text.startswith("curl"):
            assert shown is not None
            _expect(shown.text, _curl(text).splitlines(), whole=shown.kind == "json")
        else:
            _is_command(text)
    elif block.kind == "json":
        json.loads(block.text)
    else:
        assert block.is_reply or block.kind in ("text", "javascript", *SETTINGS)


def _printed(code: str, names: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(PAGE), "exec"), names)
    return out.getvalue()


def _curl(command: str) -> str:
    """What curl prints; where there is none, what its arguments ask for."""
    if shutil.which("curl"):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        return done.stdout
    return _fetched(command)


def _fetched(command: str) -> str:
    """A curl command by other means: -s, -N, -d, -H and an address."""
    words = shlex.split(command)[1:]
    headers, body, url = {}, None, ""
    while words:
        word = words.pop(0)
        if word == "-d":
            body = words.pop(0)
        elif word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name] = value
        elif not word.startswith("-"):
            url = word
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request("POST" if body else "GET", f"/{path}", body, headers)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _replay(block: Block, shown: Block, served: Live) -> None:
    """Send a request as it stands on the page; httpx would refuse some headers that clients send."""
    head, _, body = block.text.partition("\n\n")
    first, *rest = head.split("\n")
    method, path = first.split()
    headers = dict(re.split(r":\s*", line, maxsplit=1) for line in rest)
    status, _, reply = shown.text.partition("\n\n")
    host = served.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(method, path, _greedy(path, body) if body else None, headers)
        answer = connection.getresponse()
        assert int(status.split()[1]) == answer.status
        lines = (line.decode().rstrip("\n") for line in answer)
        kind = answer.headers.get_content_type()
        if reply:
            _expect(reply, lines, whole=kind == "application/json")
    finally:
        connection.close()


def _greedy(path: str, body: str) -> str:
    asked = json.loads(body)
    sampling = asked.setdefault("options", {}) if path.startswith("/api/") else asked
    sampling.setdefault("temperature", 0)
    return json.dumps(asked)


def _expect(shown: str, lines: Iterable[str], *, whole: bool) -> None:
    """Whether `lines` have what is shown: as one JSON value, or as lines among others, in this order."""
    if whole:
        _is_part(json.loads(shown), json.loads("\n".join(lines)))
        return
    left = iter(lines)
    for want in shown.split("\n"):
        if want:
            assert any(_matches(want, line) for line in left), f"nothing like {want}"


def _matches(shown: str, line: str) -> bool:
    if not shown.startswith(("data: {", "{")):
        return line.startswith(shown)
    if line[:1] != shown[:1] or not line.endswith("}"):
        return False
    try:
        _is_part(json.loads(shown.removeprefix("data: ")), json.loads(line.removeprefix("data: ")))
    except AssertionError:
        return False
    return True


def _is_part(shown: Any, found: Any, at: str = "reply") -> None:
    if isinstance(shown, dict):
        assert isinstance(found, dict), at
        for key, value in shown.items():
            assert key in found, f"{at}.{key} is not there"
            _is_part(value, found[key], f"{at}.{key}")
    elif isinstance(shown, list):
        assert isinstance(found, list), at
        assert len(shown) <= len(found), at
        for i, (one, other) in enumerate(zip(shown, found, strict=False)):
            _is_part(one, other, f"{at}[{i}]")
    elif shown == "...":
        assert isinstance(found, str), at
        assert found, at
    elif isinstance(shown, int | float) and not isinstance(shown, bool):
        assert isinstance(found, int | float), at
        assert not isinstance(found, bool), at
    else:
        assert shown == found, at


def _is_configured(block: Block, blocks: list[Block]) -> None:
    """Settings of the section lead to where the request goes."""
    told = [b.text for b in blocks if b.kind in SETTINGS or b.text.startswith("export")]
    bases = re.findall(re.escape(HERE) + r"([\w/.-]*)", "\n".join(told))
    path = block.text.split("\n")[0].split()[1]
    assert not bases or any(path.startswith(base.rstrip("/")) for base in bases), (path, bases)


def _is_command(text: str) -> None:
    """Commands of ours parse; of others there is nothing here to run."""
    serving = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["speculoe-local", "serve"]:
            serving.make_context("serve", words[2:])
        else:
            assert words[0] in ("export", "lm_eval"), line


def test_curl_commands_mean_the_same_without_curl(embedded_server: Live) -> None:
    blocks = SECTIONS["curl"]
    for block, shown in zip(blocks[2:6:2], blocks[3:6:2], strict=True):
        answer = _fetched(block.text.replace(HERE, embedded_server.url))
        _expect(shown.text, answer.splitlines(), whole=shown.kind == "json")


def test_routes_options_and_figures_on_the_page_exist(embedded_server: Live) -> None:
    page = PAGE.read_text(encoding="utf-8")
    routes = embedded_server.get("/openapi.json").json()["paths"]
    named = re.findall(r"`(GET|POST) (/[\w/.-]*)`", page)
    assert len(named) > 25
    for method, path in named:
        if path not in ("/", "/openapi.json"):
            assert method.lower() in routes[path], path
    serving = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {option for parameter in serving.params for option in parameter.opts}
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    assert [] == [name for name in re.findall(r"`(--[a-z-]+)", prose) if name not in known]
    figures = re.findall(r"^# TYPE (\w+)", embedded_server.get("/metrics").text, re.MULTILINE)
    assert set(re.findall(r"`(speculoe_\w+)`", page)) <= set(figures)


def test_a_lossy_server_says_so_wherever_the_page_names(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, sidecar = tiny_model("qwen3moe"), tmp_path / "tiny.speculoe.gguf"
    calibrate(model, sidecar, texts=["Which experts does it need? " * 60], tokens=256, threads=1)
    engine = EngineOptions(
        expert_budget="60%",
        threads=1,
        ctx=512,
        mode="speculate",
        unmeasured=True,
        sidecar=sidecar,
    )
    with serve(tiny_settings(model, engine=engine)) as lossy:
        props = lossy.get("/props").json()
        body = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 2}
        answer = lossy.post("/v1/chat/completions", body).json()
        figures = lossy.get("/metrics").text
    experts = answer["timings"]["experts"]
    assert ("speculate", "lossy: unmeasured") == (props["mode"], props["exactness"])
    assert ("speculate", "lossy") == (experts["mode"], experts["exactness"])
    assert "speculoe-local-speculate" == answer["system_fingerprint"]
    assert re.search(r'speculoe_model_info{.*exactness="lossy.*mode="speculate"', figures)


def test_a_reply_that_lacks_what_is_shown_is_noticed() -> None:
    with pytest.raises(AssertionError, match="b is not there"):
        _expect('{"a": {"b": 1}}', ['{"a": {}}'], whole=True)
    with pytest.raises(AssertionError):
        _expect('data: {"a": "x"}\ndata: [DONE]', ['data: {"a": "y"}', "data: [DONE]"], whole=False)
    with pytest.raises(AssertionError):
        _expect("event: b\nevent: a", ["event: a", "event: b"], whole=False)
