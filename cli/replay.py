"""`speculoe-local replay`: slot policies on a routing trace, as a table or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.runtime.replay import Replay, Row

__all__ = ["replay"]


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE.npz", help="ids [tokens, layers, k], and meta: JSON with n_expert."
        ),
    ],
    residency: Annotated[
        str,
        typer.Option(metavar="A,B,...", help="Shares of all experts that have a slot, 0 to 1."),
    ] = "0.10,0.25,0.50,0.75",
    policy: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="lru; lfu-decay: use counts that fade; learned: expected use, the engine's own; "
            "static: the most frequent of the first half; clairvoyant: the bound.",
        ),
    ] = "lru,lfu-decay,learned,static,clairvoyant",
    json_: opt.Json = False,
) -> None:
    """How often experts would be resident, by slot policy and residency.

    The first half of the trace warms the slots, the second half counts.
    """
    from speculoe_local.cli.render import LoadBar
    from speculoe_local.runtime import replay as runtime

    shares = tuple(_share(text) for text in _listed("--residency", residency))
    policies = _listed("--policy", policy)
    loaded = runtime.load_trace(trace)
    with LoadBar(f"Replaying {trace.name}") as bar:
        found = runtime.replay(loaded, residencies=shares, policies=policies, progress=bar.update)
    if json_:
        print(json.dumps(found.to_json()))
    else:
        _show(found)


def _listed(name: str, text: str) -> tuple[str, ...]:
    from speculoe_local.runtime.errors import OptionError

    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise OptionError(f"{name} {text[:40]!r} names nothing; leave it out for all")
    return parts


def _share(text: str) -> float:
    from speculoe_local.runtime.errors import OptionError

    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise OptionError(f"--residency {text[:40]!r} is not a number; use 0.25 or 25%") from None


def _show(found: Replay) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{found.trace}: {found.tokens} tokens, of which {found.warm:.0%} warm the slots\n"
        "hit rate (uploads per token) by share of experts resident",
        caption="* what the engine does",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    shares = list(dict.fromkeys(row.residency for row in found.rows))
    table.add_column("policy", no_wrap=True)
    table.add_column("pool", no_wrap=True)
    for share in shares:
        table.add_column(f"{share * 100:g} %", justify="right", no_wrap=True)
    cells = {(row.policy, row.pool, row.residency): _cell(row) for row in found.rows}
    for policy, pool in dict.fromkeys((row.policy, row.pool) for row in found.rows):
        table.add_row(policy, pool, *(cells.get((policy, pool, share), "-") for share in shares))
    Console(highlight=False, soft_wrap=True).print(table)


def _cell(row: Row) -> str:
    mark = "*" if row.default else " "
    return f"{row.hit_rate * 100:.1f} ({row.uploads_per_token:.1f}){mark}"
