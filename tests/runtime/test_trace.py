"""A trace is what viewers expect, and it shows what happened."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from speculoe_local.runtime import Engine, EngineOptions
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.trace import Trace, as_chrome, as_svg, excerpt, record
from tests.models.fixtures import TinyModel


def traced(path: Path, **more: object) -> Trace:
    options = EngineOptions(expert_budget="70%", threads=1, ctx=256, **more)  # type: ignore[arg-type]
    with Engine.open(path, options=options) as engine:
        return record(engine, "Why is the sky blue?", max_tokens=24)


def test_the_json_follows_the_trace_event_format(tiny_model: TinyModel) -> None:
    found = json.loads(json.dumps(as_chrome(traced(tiny_model("bailingmoe")))))

    names = {
        e["tid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"
    }
    spans = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert {"M", "X"} == {e["ph"] for e in found["traceEvents"]}
    assert len(spans) > 100
    for span in spans:
        assert {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"} == span.keys()
        assert span["ts"] >= 0
        assert span["dur"] >= 0
        assert names[span["tid"]] == span["cat"]


def test_every_kind_of_work_has_its_track(tiny_model: TinyModel) -> None:
    tracks = {event.track for event in traced(tiny_model("bailingmoe")).events}

    assert {
        "compute",
        "stalls",
        "uploads: demand",
        "uploads: predicted",
        "uploads: prompt",
        "predictions",
    } == tracks


def test_uploads_on_one_link_last_as_long_as_the_link_says(tiny_model: TinyModel) -> None:
    trace = traced(tiny_model("bailingmoe"), link="10MB/s", upload_threads=1, predict="none")

    copies = [e for e in trace.events if e.track == "uploads: demand"]
    nbytes = 64 * 32 * 34 / 32  # the smallest matrix of the model, Q8_0
    assert len(copies) > 20
    assert all(e.end_us - e.begin_us > 0.9 * nbytes / 10 for e in copies)


def test_the_picture_is_well_formed_and_shows_a_few_layers(tiny_model: TinyModel) -> None:
    trace = traced(tiny_model("bailingmoe"))
    begin, end = excerpt(trace, layers=3)

    root = ElementTree.fromstring(as_svg(trace, begin, end))

    assert begin < end
    assert root.tag.endswith("svg")
    assert len(root.findall(".//{*}rect/{*}title")) >= 3


def test_a_resident_model_has_nothing_to_trace(tiny_model: TinyModel) -> None:
    with (
        Engine.open(tiny_model("llama")) as engine,
        pytest.raises(OptionError, match="nothing is uploaded"),
    ):
        record(engine, "hello", max_tokens=2)
