"""`speculoe-local eval`: what executing predicted experts costs in quality, as a table or JSON."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.runtime.evaluate import Report, Row, Setting
    from speculoe_local.runtime.quality import Comparison
    from speculoe_local.runtime.tasks import Score

__all__ = ["evaluate"]

_MODES = "speculate,estimate,hybrid"


def evaluate(
    model: opt.ModelName = None,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            show_default=False,
            help=f"What to measure. Default: those of {_MODES} that the model's sidecar allows.",
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="predicted: executed experts get the predictor's weights; true: the router's.",
        ),
    ] = "predicted,true",
    tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Positions to score; 0: none.")
    ] = 1024,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="UTF-8 text to score; repeatable. Default: one that no default calibration sees.",
        ),
    ] = None,
    window: Annotated[
        int, typer.Option(min=2, metavar="N", help="Tokens that see each other.")
    ] = 512,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a window, those that are its prompt.")
    ] = 16,
    generate: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Length of greedy answers to compare; 0: none."),
    ] = 32,
    task: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help='Questions too: JSON lines {"prompt", "answer"}, or with "choices" and a number as answer.',
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Longest answer to a question of --task.")
    ] = 256,
    write: Annotated[
        bool | None,
        typer.Option(
            "--write/--no-write",
            show_default=False,
            help="Note KL and agreement in the sidecar. Default: if there is one, and no --text.",
        ),
    ] = None,
    json_: opt.Json = False,
    expert_budget: opt.ExpertBudget = "25%",
    sidecar: opt.Sidecar = None,
    source: opt.Source = "auto",
    repack: opt.Repack = True,
    threads: opt.Threads = None,
    ctx: opt.Ctx = 4096,
    batch: opt.Batch = 512,
    ubatch: opt.Ubatch = 512,
) -> None:
    """Measure lossy modes against exact: KL, agreement of the likeliest token, perplexity.

    Text is run token by token, as answers are; each mode runs the same tokens as exact does.
    """
    from speculoe_local.cli.render import LoadBar, note
    from speculoe_local.runtime import evaluate as runtime
    from speculoe_local.runtime import tasks
    from speculoe_local.runtime.errors import OptionError

    options = opt.engine_options(
        expert_budget=expert_budget,
        mode="exact",
        predict=None,
        device="auto",
        link=None,
        sidecar=sidecar,
        threads=threads,
        ctx=ctx,
        batch=batch,
        ubatch=ubatch,
        source=source,
        repack=repack,
    )
    settings = _settings(modes or _MODES, weights)
    items = tasks.read(task) if task is not None else ()
    content = "\n\n".join(_read(file) for file in text) if text else runtime.held_out_text()
    path = opt.resolve_model(model)
    plan = runtime.Plan(
        path=path,
        options=options,
        settings=settings,
        text=content,
        tokens=tokens,
        window=window,
        prompt=prompt_tokens,
        generate=generate,
        optional=modes is None,
        items=items,
        max_tokens=max_tokens,
    )
    place = plan.sidecar
    if write and not place.exists():
        raise OptionError(f"--write: {place} does not exist; run `speculoe-local calibrate` first")
    with LoadBar("evaluating") as bar:
        report = runtime.evaluate(plan, progress=bar.update)
    written: tuple[str, ...] = ()
    if write or (write is None and not text and place.exists()):
        written = runtime.keep(report, replace_better=bool(write))
    if json_:
        print(json.dumps({**report.to_json(), "sidecar": str(place), "written": list(written)}))
    else:
        print(_table(report))
    for skipped in report.skipped:
        note(f"{skipped.setting.name} left out: {skipped.reason}")
    if written:
        note(f"{place}: quality of {', '.join(written)} written")


def _settings(modes: str, weights: str) -> tuple[Setting, ...]:
    """Each mode with each kind of weights; exact has its own."""
    from speculoe_local.runtime.errors import OptionError
    from speculoe_local.runtime.evaluate import Setting

    def listed(name: str, text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts:
            raise OptionError(f"{name} {text[:40]!r} names nothing; leave it out for all")
        return parts

    kinds = listed("--weights", weights)
    found = [
        Setting(mode, kind)
        for mode in listed("--modes", modes)
        for kind in (("true",) if mode == "exact" else kinds)
    ]
    return tuple(dict.fromkeys(found))


def _read(file: Path) -> str:
    from speculoe_local.runtime.errors import OptionError

    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"--text {str(file)!r} is not UTF-8 at byte {error.start}; give a text file"
        ) from error
    except OSError as error:
        raise OptionError(f"--text {str(file)!r} cannot be read: {error.strerror}") from error


def _table(report: Report) -> str:
    plan = report.plan
    scored = max((row.text.tokens for row in report.rows if row.text is not None), default=0)
    lines = [f"{plan.path.name}: each mode against exact, budget {plan.options.expert_budget}"]
    if scored:
        lines += [
            f"{scored} positions, one token at a time, windows of {plan.window}; "
            "KL in nats, +- standard error",
            "",
            f"{'mode':<10} {'weights':<9} {'KL mean':>9} {'+-':>7} {'99.9 %':>8} {'max':>7} "
            f"{'top-1 %':>8} {'+-':>5} {'ppl':>8} {'exact':>8} {'ratio':>7} {'+-':>6}",
            *(_text_line(row, row.text) for row in report.rows if row.text is not None),
        ]
    if any(row.same_tokens for row in report.rows):
        lines += [
            "",
            f"greedy answers of {plan.generate} tokens: how many are as in exact",
            *(_same_line(row) for row in report.rows),
        ]
    if plan.items:
        lines += [
            "",
            f"{len(plan.items)} questions: right, right in exact, lost, won, p of McNemar's exact test",
            *(_task_line(row, row.task) for row in report.rows if row.task is not None),
        ]
    return "\n".join(lines)


def _name(row: Row) -> str:
    return f"{row.setting.mode:<10} {row.setting.weights:<9}"


def _text_line(row: Row, found: Comparison) -> str:
    return (
        f"{_name(row)} {found.kl.value:9.5f} {found.kl.error:7.5f} {found.kl_p999:8.4f} "
        f"{found.kl_max:7.3f} {100 * found.top1.value:8.2f} {100 * found.top1.error:5.2f} "
        f"{found.ppl.value:8.3f} {found.ppl_exact.value:8.3f} {found.ppl_ratio.value:7.4f} "
        f"{found.ppl_ratio.error:6.4f}"
    )


def _same_line(row: Row) -> str:
    return f"{_name(row)} median {statistics.median(row.same_tokens):g} of " + " ".join(
        str(count) for count in sorted(row.same_tokens)
    )


def _task_line(row: Row, found: Score) -> str:
    return (
        f"{_name(row)} {found.right:6d} {found.right_exact:6d} {found.lost:5d} {found.won:5d} "
        f"{found.p:8.4f}"
    )
