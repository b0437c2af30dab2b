"""Runs side by side: interleaved, each in a process of its own, compared round by round.

Machines are shared and drift: only ratios of neighbouring rounds mean something, so every figure that
compares two runs is the median over rounds of one round's ratio.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from speculoe_local.runtime import machine
from speculoe_local.runtime.errors import BackendError, OptionError
from speculoe_local.runtime.options import EngineOptions

__all__ = ["RUNS", "Plan", "Report", "RunReport", "bench"]

RUNS = ("upstream", "resident", "cache")
_VOCABULARY = 1000  # prompts are made of the first ids, which every vocabulary has


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `rounds` times, every run answers `tokens` after `prompt_tokens`."""

    path: Path
    runs: tuple[str, ...]
    options: EngineOptions
    prompt_tokens: int = 256
    tokens: int = 64
    rounds: int = 5
    upstream_library: Path | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """Medians over all rounds; durations in milliseconds per output token."""

    name: str
    tpot_ms: float
    tpot_ms_p90: float
    decode_tps: float
    prefill_tps: float
    hit_rate: float
    stall_ms: float
    uploaded_bytes_per_token: float
    exactness: str = "exact"


@dataclass(frozen=True, slots=True)
class Report:
    """`ratios`: TPOT of the first over the second. `prefill_ratios`: prompt time, likewise."""

    plan: Plan
    runs: tuple[RunReport, ...]
    ratios: dict[str, float]
    prefill_ratios: dict[str, float]
    same_tokens: bool
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {name: _rounded(getattr(run, name)) for name in RunReport.__dataclass_fields__}
            for run in self.runs
        ]
        return {
            "model": str(self.plan.path),
            "machine": self.machine,
            "link": self.plan.options.link or "",
            "expert_budget": self.plan.options.expert_budget,
            "tokens": self.plan.tokens,
            "prompt_tokens": self.plan.prompt_tokens,
            "rounds": self.plan.rounds,
            "runs": rows,
            "ratios": {k: round(v, 4) for k, v in self.ratios.items()},
            "decode_ratios": {k: round(1 / v, 4) for k, v in self.ratios.items()},
            "prefill_ratios": {k: round(1 / v, 4) for k, v in self.prefill_ratios.items()},
            "same_tokens": self.same_tokens,
        }


def bench(plan: Plan, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Open every run, warm each up once, then measure in the order A B C, C B A, A B C, ...

    Raises OptionError for an unknown run, BackendError when a worker dies.
    """
    unknown = [name for name in plan.runs if name not in RUNS]
    if unknown or not plan.runs:
        raise OptionError(
            f"--runs {','.join(unknown) or '(none)'} is not known; use some of {','.join(RUNS)}"
        )
    host = machine.look()
    options = replace(plan.options, threads=plan.options.threads or host.cores)
    prompt = [7 + (i * 7919) % (_VOCABULARY - 7) for i in range(plan.prompt_tokens)]
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(_Worker(name, plan, _options_of(name, options)))
            for name in plan.runs
        }
        for name, worker in workers.items():
            progress(f"warming up {name}")
            worker.run(prompt, plan.tokens)
        rounds: list[dict[str, dict[str, Any]]] = []
        for number in range(plan.rounds):
            progress(f"round {number + 1} of {plan.rounds}")
            order = plan.runs if number % 2 == 0 else plan.runs[::-1]
            rounds.append({name: workers[name].run(prompt, plan.tokens) for name in order})
    return Report(
        plan=plan,
        runs=tuple(_summarize(name, [r[name] for r in rounds]) for name in plan.runs),
        ratios=_ratios(plan.runs, rounds, _tpot),
        prefill_ratios=_ratios(plan.runs, rounds, _prefill),
        same_tokens=all(
            r[n]["tokens"] == rounds[0][plan.runs[0]]["tokens"] for r in rounds for n in r
        ),
        machine={
            "cores": host.cores,
            "memory_bytes": host.memory_bytes,
            "threads": options.threads,
        },
    )


def _options_of(name: str, options: EngineOptions) -> EngineOptions:
    return replace(options, expert_budget="100%", link=None) if name == "resident" else options


def _gaps(timing: dict[str, Any]) -> list[float]:
    """Seconds between output tokens."""
    times = timing["times"][1:]
    return [b - a for a, b in itertools.pairwise(times)]


def _tpot(timing: dict[str, Any]) -> float:
    return statistics.median(_gaps(timing))


def _prefill(timing: dict[str, Any]) -> float:
    first, second = timing["times"][:2]
    return float(second - first)


def _ratios(
    names: Sequence[str],
    rounds: list[dict[str, dict[str, Any]]],
    measure: Callable[[dict[str, Any]], float],
) -> dict[str, float]:
    """Each run over each earlier one: median of the ratios within rounds."""
    return {
        f"{a}/{b}": statistics.median(measure(r[a]) / measure(r[b]) for r in rounds)
        for i, a in enumerate(names)
        for b in names[:i]
    }


def _summarize(name: str, timings: list[dict[str, Any]]) -> RunReport:
    gaps = sorted(gap for timing in timings for gap in _gaps(timing))
    tpot = statistics.median(_tpot(timing) for timing in timings)
    n_tokens = sum(len(timing["tokens"]) for timing in timings)
    requests = sum(timing.get("requests", 0) for timing in timings)
    slotted = any(timing.get("tier", "resident") != "resident" for timing in timings)
    return RunReport(
        name=name,
        tpot_ms=tpot * 1e3,
        tpot_ms_p90=gaps[int(0.9 * (len(gaps) - 1))] * 1e3,
        decode_tps=1 / tpot,
        prefill_tps=statistics.median(_prompt_length(t) / _prefill(t) for t in timings),
        hit_rate=sum(t.get("hits", 0) for t in timings) / requests if slotted and requests else 1.0,
        stall_ms=1e3 * sum(t.get("stall_s", 0.0) for t in timings) / n_tokens,
        uploaded_bytes_per_token=sum(t.get("uploaded_bytes", 0) for t in timings) / n_tokens,
    )


def _prompt_length(timing: dict[str, Any]) -> int:
    return int(timing["prompt_tokens"])


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


class _Worker:
    """A process that answers requests for timings."""

    def __init__(self, name: str, plan: Plan, options: EngineOptions) -> None:
        self._name = name
        library = None
        if name == "upstream":
            if plan.upstream_library is None:
                raise OptionError(
                    "--runs upstream needs the unpatched library; run `make upstream`"
                )
            library = str(plan.upstream_library)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "speculoe_local.runtime.bench_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        chosen = {key: getattr(options, key) for key in EngineOptions.__dataclass_fields__}
        if chosen["sidecar"] is not None:
            chosen["sidecar"] = str(chosen["sidecar"])
        self._send({"path": str(plan.path), "library": library, "options": chosen})
        self._receive()

    def run(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        self._send({"prompt": prompt, "tokens": tokens})
        timing: dict[str, Any] = json.loads(self._receive())
        return timing | {"prompt_tokens": len(prompt)}

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _receive(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        return line

    def _fail(self) -> None:
        assert self._process.stderr is not None
        said = self._process.stderr.read().strip().splitlines()
        raise BackendError(f"the run {self._name} ended: {said[-1] if said else 'without a word'}")

    def __enter__(self) -> _Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.kill()
        self._process.wait()
