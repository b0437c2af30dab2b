"""The bars of a bench report: to one scale, well-formed, and labelled with what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from speculoe_local.runtime import EngineOptions
from speculoe_local.runtime.bench import Plan, Report, RunReport
from speculoe_local.runtime.chart import as_svg

RUN = RunReport(
    name="cache", tpot_ms=20.0, tpot_ms_p90=21.0, decode_tps=50.0, prefill_tps=100.0, hit_rate=0.5, copy_ms=9.0,
    compute_ms=15.0, stall_ms=5.0, overlap_bound=0.0, overlap_reached=0.0, uploaded_bytes_per_token=1.0, recall=0.0,
    recall_nonresident=0.0, precision_nonresident=0.0, prediction_us=0.0,
)  # fmt: skip


def test_bars_are_to_scale_and_say_what_they_stand_for() -> None:
    lossy = replace(RUN, name="speculate", tpot_ms=10.0, stall_ms=0.0, exactness="lossy", kl=0.0283)
    plan = Plan(Path("a&b.gguf"), ("cache", "speculate"), EngineOptions(expert_budget="25%"))
    report = Report(plan, (RUN, lossy), {"speculate/cache": 0.5}, {}, True)

    drawing = as_svg(report)

    widths = [
        float(r.get("width", ""))
        for r in ElementTree.fromstring(drawing).iter()
        if r.tag.endswith("rect")
    ]
    assert [315.0, 105.0, 210.0, 0.0] == widths
    assert re.search(r"20\.0 ms<", drawing)
    assert "10.0 ms, x 0.50, lossy KL 0.028" in drawing
    assert "a&amp;b, experts 25%" in drawing
