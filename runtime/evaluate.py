"""Quality of ways of running a model, against exact on the same tokens in the same shape.

    text -> windows -> exact run: logits to a file -> each other run: its logits against those

One engine is open at a time. Beside the text (`runtime.recording`), answers: how far a greedy answer stays
the exact one, and `runtime.tasks`. Knows nothing of how a mode works, and nothing of terminals.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from speculoe_local.runtime import tasks
from speculoe_local.runtime.engine import Engine
from speculoe_local.runtime.errors import OptionError, SidecarError
from speculoe_local.runtime.header import shown
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.options import EngineOptions, Sampling
from speculoe_local.runtime.quality import Comparison, common_prefix, summarize
from speculoe_local.runtime.recording import Tokens, record, score, windows
from speculoe_local.runtime.sidecar import Quality, Sidecar, sidecar_path

__all__ = [
    "MODES",
    "WEIGHTS",
    "Plan",
    "Report",
    "Row",
    "Setting",
    "Skipped",
    "evaluate",
    "held_out_text",
    "keep",
]

MODES: Final = ("exact", "speculate", "estimate", "hybrid")
WEIGHTS: Final = ("predicted", "true")
_OPENINGS: Final = 8  # places of the text that are continued to see where answers part


@dataclass(frozen=True, slots=True)
class Setting:
    """A way of running: a mode, and whose weights the executed experts get."""

    mode: str
    weights: str

    def __post_init__(self) -> None:
        for name, value, known in (("modes", self.mode, MODES), ("weights", self.weights, WEIGHTS)):
            if value not in known:
                raise OptionError(
                    f"--{name} {value[:40]!r} is not known; use some of {','.join(known)}"
                )

    @property
    def name(self) -> str:
        """As in a sidecar's `quality`."""
        return f"{self.mode}/{self.weights}"

    def options(self, base: EngineOptions) -> EngineOptions:
        """`base` run this way, whether or not a sidecar knows its quality: that is what is measured."""
        if self.mode == "exact":
            return replace(base, mode="exact")
        changes: dict[str, Any] = {"mode": self.mode, "weights": self.weights, "unmeasured": True}
        return replace(base, **changes)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    `tokens` positions of `text` in windows of `window` tokens that begin with a prompt of `prompt`; 0
    leaves the text out. `generate`: length of the greedy answers that are compared, 0 for none.
    `optional`: leave a setting out where this model cannot be run that way, instead of raising.
    """

    path: Path
    options: EngineOptions
    settings: tuple[Setting, ...]
    text: str
    tokens: int = 1024
    window: int = 512
    prompt: int = 16
    generate: int = 32
    optional: bool = False
    items: tuple[tasks.Item, ...] = ()
    max_tokens: int = 256

    @property
    def sidecar(self) -> Path:
        """Where the model's sidecar is, or would be."""
        return self.options.sidecar or sidecar_path(ModelMap.read(self.path).files[0])


@dataclass(frozen=True, slots=True)
class Row:
    """One setting against exact. `same_tokens`: for each greedy answer, how many tokens it shares with
    the exact one before it departs, `generate` where it never does. Parts left out are None, or empty."""

    setting: Setting
    text: Comparison | None
    same_tokens: tuple[int, ...]
    task: tasks.Score | None

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.setting.mode,
            "weights": self.setting.weights,
            **(self.text.to_json() if self.text is not None else {}),
            "same_tokens": list(self.same_tokens),
            "task": self.task.to_json() if self.task is not None else None,
        }


@dataclass(frozen=True, slots=True)
class Skipped:
    """A setting that this model cannot be run with, and why."""

    setting: Setting
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    plan: Plan
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]

    def to_json(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "model": str(plan.path),
            "expert_budget": plan.options.expert_budget,
            "text": {
                "sha256": hashlib.sha256(plan.text.encode()).hexdigest(),
                "bytes": len(plan.text.encode()),
                "held_out": plan.text == held_out_text(),
            },
            "window": plan.window,
            "prompt_tokens": plan.prompt,
            "generate": plan.generate,
            "items": len(plan.items),
            "rows": [row.to_json() for row in self.rows],
            "skipped": [
                {"mode": s.setting.mode, "weights": s.setting.weights, "reason": s.reason}
                for s in self.skipped
            ],
        }


def evaluate(plan: Plan, progress: Callable[[float], None] | None = None) -> Report:
    """Run exact, then each setting. `progress` gets the share done, 0 to 1.

    Raises OptionError when the text is too short, BackendError when there is no room for the logits,
    and what opening and running an engine raises.
    """
    lossy = any(setting.mode != "exact" for setting in plan.settings)
    if lossy and not (sidecar := plan.sidecar).exists():
        raise OptionError(
            f"lossy modes need the sidecar {shown(sidecar)}; run `speculoe-local calibrate` first"
        )
    with ExitStack() as stack:
        with Engine.open(
            plan.path, options=Setting("exact", "true").options(plan.options)
        ) as engine:
            if lossy and engine.info.tier == "resident":
                raise OptionError(
                    f"--expert-budget {plan.options.expert_budget} keeps all experts resident, and every mode "
                    "is exact then; use for example 25%"
                )
            scored = _scored(plan, engine)
            openings = _openings(plan, engine)
            steps = sum(len(window) - plan.prompt for window in scored)
            steps += len(openings) * plan.generate + len(plan.items)
            counter = _Counter(steps * (1 + len(plan.settings)), progress)
            recording = stack.enter_context(record(engine, scored, plan.prompt, counter.step))
            answers = [_greedy(engine, opening, plan.generate, counter) for opening in openings]
            exact = tasks.run(engine, plan.items, plan.max_tokens, counter.step)
        rows, skipped = [], []
        for setting in plan.settings:
            try:
                opened = Engine.open(plan.path, options=setting.options(plan.options))
            except (OptionError, SidecarError) as error:
                if not plan.optional:
                    raise
                skipped.append(Skipped(setting, str(error)))
                counter.step(steps)
                continue
            with opened as engine:
                positions = score(engine, recording, counter.step)
                same = [
                    common_prefix(answer, _greedy(engine, opening, plan.generate, counter))
                    for opening, answer in zip(openings, answers, strict=True)
                ]
                right = tasks.run(engine, plan.items, plan.max_tokens, counter.step)
            rows.append(
                Row(
                    setting,
                    summarize(positions) if positions else None,
                    tuple(same),
                    tasks.Score.of(exact, right) if plan.items else None,
                )
            )
    if skipped and not rows:
        raise OptionError(skipped[0].reason)
    return Report(plan, tuple(rows), tuple(skipped))


def held_out_text() -> str:
    """12 kB of prose, dialogue and code written for this project. Nothing that ships was made, calibrated
    or chosen with it; `calibrate` by default learns from what Python ships."""
    place = importlib.resources.files(__package__).joinpath("data").joinpath("heldout.txt")
    return place.read_text(encoding="utf-8")


def keep(report: Report, *, replace_better: bool = False) -> tuple[str, ...]:
    """Write what lossy settings cost into the model's sidecar; the names of those written.

    Figures that come from more tokens stay, unless `replace_better`. Raises SidecarError when the sidecar
    is damaged, or another model's.
    """
    place = report.plan.sidecar
    found = Sidecar.read(place, ModelMap.read(report.plan.path))
    new = {
        row.setting.name: Quality(row.text.kl.value, row.text.top1.value, row.text.tokens)
        for row in report.rows
        if row.text is not None and row.setting.mode != "exact"
    }
    kept = found.quality
    written = {
        name: quality
        for name, quality in new.items()
        if replace_better or name not in kept or kept[name].tokens <= quality.tokens
    }
    if written:
        replace(found, quality={**kept, **written}).write(place)
    return tuple(written)


def _scored(plan: Plan, engine: Engine) -> list[Tokens]:
    if not plan.tokens:
        return []
    window = min(plan.window, engine.info.n_ctx)
    if window < plan.prompt + 2:
        raise OptionError(
            f"a window of {window} tokens scores none behind a prompt of {plan.prompt}; use "
            f"{plan.prompt + 2} or more"
        )
    tokens = engine.vocab.tokenize(plan.text, add_bos=False)
    found = windows(tokens, bos=_bos(engine), window=window, prompt=plan.prompt, scored=plan.tokens)
    if not found:
        raise OptionError(
            f"the text has {len(tokens)} tokens, {plan.prompt + 2} are needed to score one; give more text"
        )
    return found


def _openings(plan: Plan, engine: Engine) -> list[Tokens]:
    """Prompts at even distances over the text."""
    tokens = engine.vocab.tokenize(plan.text, add_bos=False)
    if not plan.generate or not tokens:
        return []
    size = min(2 * plan.prompt, len(tokens))
    starts = np.linspace(0, len(tokens) - size, _OPENINGS).astype(int)
    return [[*_bos(engine), *tokens[at : at + size]] for at in dict.fromkeys(starts.tolist())]


def _bos(engine: Engine) -> Tokens:
    """What the vocabulary wants in front of a text; nothing, or one token."""
    return engine.vocab.tokenize("", add_bos=True)[:1]


def _greedy(engine: Engine, opening: Tokens, n: int, counter: _Counter) -> Tokens:
    engine.forget()  # a prompt that is partly held would be run in another shape
    steps = engine.generate(opening, sampling=Sampling(temp=0), max_tokens=n, ignore_end=True)
    found = [step.token for step in steps]
    counter.step(n)
    return found


@dataclass(slots=True)
class _Counter:
    total: int
    progress: Callable[[float], None] | None
    done: int = field(default=0)

    def step(self, n: int = 1) -> None:
        self.done += n
        if self.progress is not None and self.total:
            self.progress(min(1.0, self.done / self.total))
