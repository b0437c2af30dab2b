"""A bench report as a picture: one bar per run, time per output token split into compute and stall. Pure."""

from __future__ import annotations

from html import escape

from speculoe_local.runtime.bench import Report, RunReport

__all__ = ["as_svg"]

_BAR, _GAP, _LEFT, _WIDE, _RIGHT = 18, 8, 110, 420, 190
_COMPUTE, _STALL, _TEXT = "#4878a8", "#d08848", "#555"


def as_svg(report: Report) -> str:
    """Bars to one scale. A label gives TPOT in milliseconds, its ratio to the first run, and what a lossy
    run costs; the title says model, budget, link and batch shape."""
    longest = max(run.tpot_ms for run in report.runs)
    rows = [
        _row(run, i, longest, report.ratios.get(f"{run.name}/{report.runs[0].name}"))
        for i, run in enumerate(report.runs)
    ]
    height = 62 + len(rows) * (_BAR + _GAP)
    plan = report.plan
    title = f"{plan.path.stem}, experts {plan.options.expert_budget}" + (
        f", link {plan.options.link}" if plan.options.link else ""
    )
    shape = f"{plan.prompt_tokens} + {plan.tokens} tokens, {plan.rounds} rounds, ubatch {plan.options.ubatch}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDE + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">\n'
        f'<text x="8" y="18" font-weight="bold" fill="{_TEXT}">{escape(title)}</text>\n'
        f'<text x="8" y="34" fill="{_TEXT}">time per output token: '
        f'<tspan fill="{_COMPUTE}">compute</tspan>, <tspan fill="{_STALL}">waiting for experts</tspan>; '
        f"{escape(shape)}</text>\n" + "".join(rows) + "</svg>\n"
    )


def _row(run: RunReport, number: int, longest: float, ratio: float | None) -> str:
    top = 46 + number * (_BAR + _GAP)
    stall = min(run.stall_ms, run.tpot_ms) / longest * _WIDE
    whole = run.tpot_ms / longest * _WIDE
    label = f"{run.tpot_ms:.1f} ms"
    if ratio is not None:
        label += f", x {ratio:.2f}"
    if run.exactness == "lossy":
        label += ", lossy" + ("" if run.kl is None else f" KL {run.kl:.3f}")
    middle = top + _BAR - 5
    return (
        f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end" fill="{_TEXT}">{escape(run.name)}</text>\n'
        f'<rect x="{_LEFT}" y="{top}" width="{whole - stall:.1f}" height="{_BAR}" fill="{_COMPUTE}"/>\n'
        f'<rect x="{_LEFT + whole - stall:.1f}" y="{top}" width="{stall:.1f}" height="{_BAR}" fill="{_STALL}"/>\n'
        f'<text x="{_LEFT + whole + 6:.1f}" y="{middle}" fill="{_TEXT}">{escape(label)}</text>\n'
    )
