"""Runs side by side: interleaved, each in a process of its own, compared round by round.

Machines are shared and drift: only ratios of neighbouring rounds mean something. And the process opened
first is a little slower than the same run opened second (2 to 3 % on the embedded model): half of the rounds
are made by processes opened in the other order. A figure that compares two runs is the geometric mean over
both sittings of the median of their rounds' ratios.
"""

from __future__ import annotations

import importlib.resources
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from speculoe_local.runtime import machine
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError
from speculoe_local.runtime.lib import llama, on_cpu
from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.options import EngineOptions, parse_link

__all__ = ["RUNS", "Plan", "Report", "RunReport", "bench", "options_of"]

RUNS = (
    "upstream",
    "resident",
    "ondemand",
    "cache",
    "prefetch",
    "prefetch-native",
    "misses-cpu",
    "misses-split",
    "misses-auto",
    "speculate",
    "estimate",
    "hybrid",
)
LOSSY = ("speculate", "estimate", "hybrid")
_MISSES: dict[str, Literal["cpu", "split", "auto"]] = {
    "misses-cpu": "cpu",
    "misses-split": "split",
    "misses-auto": "auto",
}
Round = dict[str, dict[str, Any]]  # by run, what its process said
_STRIDE = 167  # tokens between the prompts of two rounds: no round continues what another has seen


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: `rounds` times, every run answers `tokens` after `prompt_tokens`.

    `copy_share` sets the modelled link so that on-demand copies take that share of TPOT.
    """

    path: Path
    runs: tuple[str, ...]
    options: EngineOptions
    prompt_tokens: int = 256
    tokens: int = 64
    rounds: int = 5
    upstream_library: Path | None = None
    copy_share: float | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """Medians over all rounds; durations in milliseconds per output token.

    `copy_ms`: uploaded bytes over the link's rate; `compute_ms`: TPOT less stall. `overlap_bound`: the
    share of on-demand TPOT that perfect overlap could hide, sum over layers but the first of
    min(copy, window), over TPOT, where the window is the time from a layer having its experts to the
    next asking for its own; `overlap_reached`: what this run hid of it. Both 0 without an on-demand run, or with a cache.
    `fixed_us_per_layer`: compute beyond the resident run's, in microseconds per MoE layer: reading ids back,
    waking, launching; what remains when all hits. 0 without a resident run. `kl` is what the sidecar says a lossy run costs, None if that was never measured.
    """

    name: str
    tpot_ms: float
    tpot_ms_p90: float
    decode_tps: float
    prefill_tps: float
    hit_rate: float
    copy_ms: float
    compute_ms: float
    stall_ms: float
    overlap_bound: float
    overlap_reached: float
    uploaded_bytes_per_token: float
    recall: float
    recall_nonresident: float
    precision_nonresident: float
    prediction_us: float
    exactness: str = "exact"
    kl: float | None = 0.0
    fixed_us_per_layer: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """`ratios`: TPOT of the first over the second. `prefill_ratios`: prompt time, likewise. `same_tokens`:
    whether all exact runs gave the same answers."""

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
    """Two sittings: open every run, warm each up, measure in the order A B C, A B C, ..., then all in reverse.

    Raises OptionError for an unknown run, BackendError when a worker dies.
    """
    unknown = [name for name in plan.runs if name not in RUNS]
    if unknown or not plan.runs:
        raise OptionError(
            f"--runs {','.join(unknown) or '(none)'} is not known; use some of {','.join(RUNS)}"
        )
    host = machine.look()
    options = replace(plan.options, threads=plan.options.threads or host.cores)
    text = _text(plan.path)
    prompt = _prompt(text, 0, plan.prompt_tokens)
    plan = replace(plan, options=options)
    if plan.copy_share is not None:
        progress("measuring compute time, to set the link")
        plan = replace(plan, options=replace(options, link=_link_for(plan, prompt)))
    half = (plan.rounds + 1) // 2
    orders = [(plan.runs, range(half)), (plan.runs[::-1], range(half, plan.rounds))]
    sittings = [_sit(plan, text, order, numbers, progress) for order, numbers in orders if numbers]
    rounds = list(itertools.chain(*sittings))
    ondemand = [r["ondemand"] for r in rounds] if "ondemand" in plan.runs else None
    runs = [_summarize(name, plan, [r[name] for r in rounds], ondemand) for name in plan.runs]
    return Report(
        plan=plan,
        runs=_with_fixed_cost(runs, len(ModelMap.read(plan.path).layers)),
        ratios=_ratios(plan.runs, sittings, _tpot),
        prefill_ratios=_ratios(plan.runs, sittings, _prefill),
        same_tokens=all(
            len({tuple(t["tokens"]) for t in r.values() if t["exactness"] == "exact"}) <= 1
            for r in rounds
        ),
        machine={
            "cores": host.cores,
            "memory_bytes": host.memory_bytes,
            "threads": options.threads,
        },
    )


def _sit(
    plan: Plan,
    text: list[int],
    order: Sequence[str],
    numbers: range,
    progress: Callable[[str], None],
) -> list[Round]:
    """Rounds `numbers`, in processes of their own that all stay open beside each other."""
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(_Worker(name, plan, options_of(name, plan.options)))
            for name in order
        }
        for name, worker in workers.items():
            progress(f"warming up {name}")
            worker.run(_prompt(text, 0, plan.prompt_tokens), plan.tokens)
        rounds = []
        for number in numbers:
            progress(f"round {number + 1} of {plan.rounds}")
            # Another prompt each round: a cache must not profit from having seen the answer before.
            prompt = _prompt(text, number + 1, plan.prompt_tokens)
            rounds.append({name: workers[name].run(prompt, plan.tokens) for name in order})
        return rounds


def _text(path: Path) -> list[int]:
    """Token ids of a text that calibration does not read; no weights are loaded for it."""
    params = on_cpu(llama.llama_model_default_params())
    params.vocab_only = True
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ModelError(f"{path} has no vocabulary that llama.cpp can read; name a chat model")
    held_out = importlib.resources.files("speculoe_local.runtime") / "data" / "heldout.txt"
    try:
        return Vocabulary(model).tokenize(held_out.read_text(encoding="utf-8"), add_bos=False)
    finally:
        llama.llama_model_free(model)


def _prompt(text: list[int], number: int, n_tokens: int) -> list[int]:
    """Another part of the text each round, which begins anew where it ends."""
    return [text[(number * _STRIDE + i) % len(text)] for i in range(n_tokens)]


def options_of(name: str, options: EngineOptions) -> EngineOptions:
    """How a run opens its engine."""
    if name in ("upstream", "resident"):
        return replace(options, expert_budget="100%", link=None, buffers="slots", predict="none")
    if name == "ondemand":
        return replace(options, buffers="two-layer", predict="none")
    if name == "cache":
        return replace(options, predict="none")
    if name in LOSSY:
        return replace(options, mode=name, predict=None)
    if name in _MISSES:
        return replace(options, misses=_MISSES[name])
    return replace(options, loop="native") if name == "prefetch-native" else options


def _link_for(plan: Plan, prompt: list[int]) -> str:
    """The rate at which on-demand copies take `copy_share` of TPOT: compute is measured without a link."""
    share = plan.copy_share
    if share is None or not 0 < share < 1:
        raise OptionError(f"--copy-share {share} is not between 0 and 1; use for example 0.86")
    options = options_of("ondemand", replace(plan.options, link=None))
    with _Worker("ondemand", plan, options) as worker:
        worker.run(prompt, plan.tokens)
        timing = worker.run(prompt, plan.tokens)
    found = ModelMap.read(plan.path)
    nbytes = sum(layer.n_expert_used * layer.expert_bytes for layer in found.layers)
    seconds = _tpot(timing) * share / (1 - share)
    return f"{nbytes / seconds / 1e6:.3f}MB/s"


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
    sittings: Sequence[Sequence[Round]],
    measure: Callable[[dict[str, Any]], float],
) -> dict[str, float]:
    """Each run over each earlier one."""

    def ratio(a: str, b: str) -> float:
        return statistics.geometric_mean(
            statistics.median(measure(r[a]) / measure(r[b]) for r in rounds) for rounds in sittings
        )

    return {f"{a}/{b}": ratio(a, b) for i, a in enumerate(names) for b in names[:i]}


def _summarize(
    name: str, plan: Plan, timings: list[dict[str, Any]], ondemand: list[dict[str, Any]] | None
) -> RunReport:
    gaps = sorted(gap for timing in timings for gap in _gaps(timing))
    tpot = statistics.median(_tpot(timing) for timing in timings)
    n_tokens = sum(len(timing["tokens"]) for timing in timings)

    def per_token(counter: str) -> float:
        return float(sum(t.get("slots", {}).get(counter, 0) for t in timings)) / n_tokens

    def share(part: str, whole: str, otherwise: float = 0.0) -> float:
        return float(per_token(part) / per_token(whole)) if per_token(whole) else otherwise

    rate = parse_link(plan.options.link).rate if plan.options.link else 0.0
    moved = per_token("uploaded_bytes") - per_token("staged_bytes")
    stall = 1e-9 * statistics.median(
        t.get("slots", {}).get("stall_ns", 0) / len(t["tokens"]) for t in timings
    )
    # What a cache keeps is not overlap: the figure is for runs that keep as little as on-demand does.
    alike = ondemand if plan.options.buffers == "two-layer" else None
    bound, reached = _overlap(plan, rate, timings, alike) if alike else (0.0, 0.0)
    return RunReport(
        name=name,
        tpot_ms=tpot * 1e3,
        tpot_ms_p90=gaps[int(0.9 * (len(gaps) - 1))] * 1e3,
        decode_tps=1 / tpot,
        prefill_tps=statistics.median(_prompt_length(t) / _prefill(t) for t in timings),
        hit_rate=share("hits", "requests", 1.0),
        copy_ms=1e3 * moved / rate if rate else 0.0,
        compute_ms=1e3 * (tpot - stall),
        stall_ms=1e3 * stall,
        overlap_bound=bound,
        overlap_reached=reached,
        uploaded_bytes_per_token=moved,
        recall=share("true_predicted", "true_experts"),
        recall_nonresident=share("true_nonresident_predicted", "true_nonresident"),
        precision_nonresident=share("true_nonresident_predicted", "predicted_nonresident"),
        prediction_us=1e6 * statistics.median(t.get("prediction_s", 0.0) for t in timings),
        exactness=timings[0]["exactness"],
        kl=timings[0].get("kl") if name in LOSSY else 0.0,
    )


def _with_fixed_cost(runs: list[RunReport], layers: int) -> tuple[RunReport, ...]:
    resident = next((run for run in runs if run.name == "resident"), None)
    if resident is None or not layers:
        return tuple(runs)
    return tuple(
        replace(run, fixed_us_per_layer=1e3 * (run.compute_ms - resident.compute_ms) / layers)
        if run.name not in ("upstream", "resident")
        else run
        for run in runs
    )


def _overlap(
    plan: Plan, rate: float, timings: list[dict[str, Any]], ondemand: list[dict[str, Any]]
) -> tuple[float, float]:
    """(bound as a share of on-demand TPOT, share of the bound that this run hid)."""
    if not rate:
        return 0.0, 0.0
    layers = ModelMap.read(plan.path).layers
    windows = len(layers) - 1
    copy = statistics.mean(layer.n_expert_used * layer.expert_bytes for layer in layers[1:]) / rate
    bounds, hidden = [], []
    for ours, base in zip(timings, ondemand, strict=True):
        window = 1e-9 * base["slots"]["window_ns"] / (len(base["tokens"]) - 1) / windows
        bound = windows * min(copy, window)
        bounds.append(bound / _tpot(base))
        hidden.append((_tpot(base) - _tpot(ours)) / bound)
    return statistics.median(bounds), statistics.median(hidden)


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
        return {"exactness": "exact"} | timing | {"prompt_tokens": len(prompt)}

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
