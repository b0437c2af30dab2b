"""Dense GGUF -> Mixture-of-Experts GGUF: `analyse` finds a split (torch, minutes), `repack` applies it.

    python -m speculoe_local.convert.upcycle analyse DENSE.gguf split.npz
    python -m speculoe_local.convert.upcycle repack DENSE.gguf split.npz MOE.gguf

Knows the order of the steps and what each is given; the steps live in observe, cluster, distil, repack.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculoe_local.convert import cluster, files, texts, tokens
from speculoe_local.convert.cluster import Shape
from speculoe_local.convert.repack import repack
from speculoe_local.convert.split import Split, flat_router, load_split, pack_split
from speculoe_local.convert.texts import Source
from speculoe_local.runtime.errors import OptionError, SpeculoeError

__all__ = ["DEFAULT_SHAPE", "Source", "Split", "analyse", "load_split", "repack"]

log = logging.getLogger(__name__)

DEFAULT_SHAPE = Shape(shared=1280, experts=16, width=16, used=4)
# Of every four windows three are of the last source (chat, prose) and one of the others (reference).
_PROSE_IN_FOUR = 3
_OBSERVED = 48
_FISHER = 8
_EVERY = 3
_STEPS = 160
_SEED = 0


def analyse(
    dense: Path,
    sources: Sequence[Source],
    out: Path,
    *,
    shape: Shape = DEFAULT_SHAPE,
    steps: int = _STEPS,
    threads: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Split:
    """Find how `dense` is best taken apart on the texts of `sources`, and write the split to `out`.

    Takes tens of minutes on two cores; needs the extra `train`. `progress` gets the stage's name and the
    share of it that is done; 0 `steps` train nothing. Raises ModelError when `dense` is not of
    `dense_torch.ARCHITECTURES`, OptionError when torch is missing, the shape does not fit or the texts
    are too short.
    """
    torch = _torch()
    from speculoe_local.convert import dense_torch, distil, observe

    if threads is not None:
        torch.set_num_threads(threads)
    report = progress or (lambda stage, share: None)
    windows = _mixed_windows(dense, sources)
    model = dense_torch.load_dense(dense, torch.bfloat16)
    seen = observe.observe(
        model,
        windows[:_OBSERVED],
        fisher_windows=_FISHER,
        seed=_SEED,
        progress=lambda share: report("observe", share),
    )
    parts = []
    for index in range(len(model.layers)):
        inputs, energy = observe.neuron_energy(model, seen, index, _EVERY)
        if energy.shape[1] != shape.neurons:
            raise OptionError(
                f"{dense}: {energy.shape[1]} neurons per layer, the shape holds {shape.neurons};"
                " choose sizes that add up"
            )
        parts.append(cluster.partition(inputs, energy, shape, seed=_SEED))
        log.info("layer=%d lost=%.4f", index, parts[-1].lost)
        report("split", (index + 1) / len(model.layers))
    split = _assemble(parts, shape, _provenance(dense, sources, shape, steps))
    del seen
    _keep(split, out)  # so that an interrupted distillation leaves a split that works
    if steps == 0:
        return split
    split = distil.distil(
        model,
        split,
        windows,
        steps=steps,
        progress=lambda step, loss: _log_step(report, step, steps, loss),
    )
    _keep(split, out)
    return split


def _keep(split: Split, out: Path) -> None:
    with files.appearing(out) as file:
        file.write(pack_split(split))


def _log_step(report: Callable[[str, float], None], step: int, steps: int, loss: float) -> None:
    log.info("step=%d kl=%.4f", step, loss)
    report("distil", step / steps)


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise OptionError(
            "analysing a model needs torch; run: pip install 'speculoe-local[train]'"
        ) from exc
    return torch


def _mixed_windows(dense: Path, sources: Sequence[Source]) -> NDArray[np.int32]:
    """Windows of the last source and of all others, mixed three to one, each in a drawn order."""
    prose = tokens.token_windows(dense, sources[-1].documents, seed=_SEED)
    if len(sources) == 1:
        return prose
    others = [document for source in sources[:-1] for document in source.documents]
    reference = tokens.token_windows(dense, others, seed=_SEED)
    mixed = []
    for at in range(len(prose) + len(prose) // _PROSE_IN_FOUR):
        turn, place = divmod(at, _PROSE_IN_FOUR + 1)
        if place < _PROSE_IN_FOUR:
            mixed.append(prose[turn * _PROSE_IN_FOUR + place])
        else:
            mixed.append(reference[turn % len(reference)])
    return np.stack(mixed)


def _assemble(
    parts: Sequence[cluster.Partition], shape: Shape, provenance: dict[str, str]
) -> Split:
    groups = np.stack([part.group for part in parts])
    order = np.argsort(groups, axis=1, kind="stable").astype(np.int16)  # experts first, shared last
    routed = shape.experts * shape.width
    return Split(
        shared=order[:, routed:],
        experts=order[:, :routed].reshape(len(parts), shape.experts, shape.width),
        router=flat_router(np.stack([part.router for part in parts])),
        down_gain=np.ones(groups.shape, dtype=np.float32),
        used=shape.used,
        provenance=provenance,
    )


def _provenance(dense: Path, sources: Sequence[Source], shape: Shape, steps: int) -> dict[str, str]:
    listed = [{"name": s.name, "licence": s.licence, "sha256": s.sha256} for s in sources]
    return {
        "dense": dense.name,
        "dense_sha256": hashlib.sha256(dense.read_bytes()).hexdigest(),
        "recipe": (
            f"{shape.shared} shared neurons, {shape.experts} experts of {shape.width}, {shape.used} used;"
            f" split by Fisher energy, routers and gains distilled for {steps} steps"
        ),
        "texts": json.dumps(listed),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line of the two steps; returns the exit code."""
    parser = argparse.ArgumentParser(prog="upcycle", description="dense GGUF -> MoE GGUF")
    steps = parser.add_subparsers(dest="step", required=True)
    find = steps.add_parser("analyse", help="find a split (needs torch, tens of minutes)")
    find.add_argument("dense", type=Path)
    find.add_argument("split", type=Path)
    find.add_argument("--shared", type=int, default=DEFAULT_SHAPE.shared)
    find.add_argument("--experts", type=int, default=DEFAULT_SHAPE.experts)
    find.add_argument("--width", type=int, default=DEFAULT_SHAPE.width, help="neurons per expert")
    find.add_argument("--used", type=int, default=DEFAULT_SHAPE.used, help="experts per token")
    find.add_argument("--steps", type=int, default=_STEPS, help="windows of distillation")
    find.add_argument("--threads", type=int, default=None)
    find.add_argument(
        "--written",
        type=Path,
        help="JSON list of the text the model wrote; made when it is missing",
    )
    find.add_argument("--verbose", action="store_true", help="log losses")
    apply = steps.add_parser("repack", help="write the MoE GGUF of a split (seconds)")
    apply.add_argument("dense", type=Path)
    apply.add_argument("split", type=Path)
    apply.add_argument("out", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.step == "repack":
            size = repack(args.dense, load_split(args.split), args.out)
            print(f"{args.out}: {size} bytes")
            return 0
        shape = Shape(args.shared, args.experts, args.width, args.used)
        if args.verbose:
            logging.basicConfig(level=logging.INFO, format="%(message)s")
        _analyse_command(args.dense, args.split, shape, args.steps, args.threads, args.written)
    except SpeculoeError as exc:
        print(exc, file=sys.stderr)
        return 1
    return 0


def _analyse_command(
    dense: Path,
    out: Path,
    shape: Shape,
    steps: int,
    threads: int | None,
    written: Path | None,
) -> None:
    began, shown = time.monotonic(), ""

    def report(stage: str, share: float) -> None:
        nonlocal shown
        line = f"{stage} {share:4.0%}"
        if line != shown:
            print(f"{time.monotonic() - began:6.0f} s  {line}", file=sys.stderr)
            shown = line

    own = texts.model_text(dense, written, lambda share: report("write", share), threads)
    sources = (texts.python_topics(), texts.python_docstrings(), own)
    analyse(dense, sources, out, shape=shape, steps=steps, threads=threads, progress=report)
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
