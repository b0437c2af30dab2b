"""The ollama package against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import ollama
import pytest

from tests.server.conftest import Live

SHORT = {"temperature": 0, "num_predict": 12}
SUM = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def client(embedded_server: Live) -> Iterator[ollama.Client]:
    found = ollama.Client(host=embedded_server.url, trust_env=False)
    yield found
    found._client.close()


def test_models_are_listed_shown_and_seen_running(client: ollama.Client) -> None:
    listed = client.list().models
    assert ["embedded"] == [model.model for model in listed]
    shown = client.show("embedded")
    assert shown.capabilities is not None
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert shown.modelinfo is not None
    arch = shown.modelinfo["general.architecture"]
    assert 2048 == shown.modelinfo[f"{arch}.context_length"]
    assert 2048 == client.ps().models[0].context_length


def test_a_stream_joined_is_the_answer_in_one_piece(client: ollama.Client) -> None:
    whole = client.chat("embedded", SUM, options=SHORT)
    parts = list(client.chat("embedded", SUM, options=SHORT, stream=True))
    assert whole.message.content
    assert whole.message.content == "".join(part.message.content or "" for part in parts)
    assert [False] * (len(parts) - 1) + [True] == [part.done for part in parts]
    last = parts[-1]
    assert last.done_reason in ("stop", "length")
    assert last.eval_count == whole.eval_count
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert last.eval_duration is not None
    assert last.total_duration is not None
    assert last.total_duration > last.eval_duration > 0


def test_generating_raw_goes_on_where_the_prompt_ends(client: ollama.Client) -> None:
    found = client.generate("embedded", "The capital of France is", raw=True, options=SHORT)
    assert "Paris" in found.response


def test_a_schema_is_kept(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "even": {"type": "boolean"}},
        "required": ["n", "even"],
        "additionalProperties": False,
    }
    found = client.chat("embedded", SUM, format=schema, options={**SHORT, "num_predict": 60})
    assert found.message.content is not None
    value = json.loads(found.message.content)
    assert {"n": int, "even": bool} == {key: type(each) for key, each in value.items()}


def test_vectors_of_texts(client: ollama.Client) -> None:
    found = client.embed("embedded", ["a cat", "a cat", "the stock market"])
    same, again, other = found.embeddings
    assert 576 == len(same)
    # Texts that are embedded side by side may differ in their last bits.
    assert 1.0 == pytest.approx(sum(a * b for a, b in zip(same, again, strict=True)), abs=1e-3)
    assert sum(a * b for a, b in zip(same, other, strict=True)) < 0.999


def test_a_prompt_that_does_not_fit_is_an_error_with_numbers(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="2048") as caught:
        client.chat("embedded", [{"role": "user", "content": "word " * 3000}])
    assert 400 == caught.value.status_code


def test_an_answer_that_is_left_alone_is_not_finished(
    client: ollama.Client, embedded_server: Live
) -> None:
    before = dict(embedded_server.models.loaded()[0].snapshot().finished)
    stream = client.chat("embedded", SUM, stream=True, options={"num_predict": -1})
    next(iter(stream))
    stream.close()  # type: ignore[attr-defined]  # an Iterator by its type, a generator in truth
    for _ in range(200):
        after = embedded_server.models.loaded()[0].snapshot().finished
        if after["cancel"] > before["cancel"]:
            break
        client.ps()
    assert after["cancel"] > before["cancel"]
