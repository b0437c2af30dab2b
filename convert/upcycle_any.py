"""Any dense llama-like GGUF -> Mixture-of-Experts GGUF, with perplexity before and after.

Chooses sizes that fit the model, holds text out, and hands the rest to `upcycle` (the analysis, torch)
and `repack` (the file). Both models are then measured on the held-out text with llama.cpp.

Limits: the architectures of `dense_torch.ARCHITECTURES`, without stretched positions. Weights in
bfloat16 and the observed inputs (width x layers x 49 KB) must fit into memory. Quality is lost: the MoE
computes a part of the dense network per token, and only a little training of routers makes up for it.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from speculoe_local.convert import gguf_raw, texts
from speculoe_local.convert.cluster import Shape
from speculoe_local.convert.perplexity import Perplexity, perplexity
from speculoe_local.convert.repack import TARGETS, repack
from speculoe_local.convert.split import Split
from speculoe_local.convert.texts import Source
from speculoe_local.convert.upcycle import analyse
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.header import shown

__all__ = ["Upcycled", "fitting_shape", "hold_out", "upcycle"]

_HELD_OUT: Final = 0.1
_MEASURED_WINDOWS: Final = 16
_BLOCK: Final = 32  # neurons that fill a block of Q8_0, in which down projections are written


@dataclass(frozen=True, slots=True)
class Upcycled:
    """What `upcycle` wrote; perplexities are of the same held-out text."""

    path: Path
    bytes: int
    architecture: str
    shape: Shape
    before: Perplexity
    after: Perplexity


def upcycle(
    dense: Path,
    out: Path,
    *,
    experts: int,
    used: int,
    shared: int | None = None,
    documents: Sequence[str] | None = None,
    steps: int = 160,
    split: Path | None = None,
    threads: int | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Upcycled:
    """Write `dense` to `out` with `shared` neurons of each layer always on and the rest in `experts`.

    Of these `used` run per token. Without `shared` about half of the neurons are. `documents` are texts
    to learn from, a tenth held out; without them what ships with Python. `steps` windows train the
    routers, 0 none. `split` keeps the analysis, for `convert.upcycle repack`. `progress` gets the stage
    and its share done. Takes minutes to hours; needs the extra `train`.

    Raises OptionError for sizes that do not fit, too little text or missing torch, ModelError when
    `dense` cannot be upcycled.
    """
    source = gguf_raw.read_gguf(dense)
    shape = fitting_shape(source, experts, used, shared)
    if not out.parent.is_dir():
        raise OptionError(f"{shown(out.parent)} is no folder; make it or name another --out")
    if out.exists() and out.samefile(dense):
        raise OptionError(f"{shown(out)} is the model itself; name another file with --out")
    learn, held = hold_out(_shipped() if documents is None else documents)
    report = progress or (lambda stage, share: None)
    # Measured first: text that is too short, or a model that llama.cpp refuses, costs no analysis.
    before = _measured("perplexity before", dense, held, threads, report)
    digest = hashlib.sha256("\0".join(learn).encode()).hexdigest()
    name = "what ships with Python" if documents is None else f"text {digest[:16]}"
    found = _split(
        dense, Source(name, "as given", tuple(learn)), split, shape, steps, threads, report
    )
    size = repack(source, found, out, progress=lambda share: report("write", share))
    after = _measured("perplexity after", out, held, threads, report)
    target = TARGETS[source.value("general.architecture")]
    return Upcycled(out, size, target, shape, before, after)


def fitting_shape(
    dense: gguf_raw.RawGguf, experts: int, used: int, shared: int | None = None
) -> Shape:
    """Sizes for the layers of `dense`; raises OptionError, naming some that fit, when these do not.

    Experts are equally wide and the shared one is a whole number of them, as the architectures want.
    """
    arch = str(dense.value("general.architecture"))
    if arch not in TARGETS:
        raise ModelError(
            f"{shown(dense.path)}: architecture {arch} cannot be upcycled; give a dense model of "
            f"{', '.join(TARGETS)}"
        )
    neurons = int(dense.value(f"{arch}.feed_forward_length"))
    if experts < 2 or not 1 <= used < experts:
        raise OptionError(
            f"--experts {experts} --used {used}: 2 experts or more, and fewer used than there are"
        )
    widths = [width for width in range(1, neurons // (experts + 1) + 1) if neurons % width == 0]
    # Rows of whole blocks quantize well; a model without such a width still works.
    widths = [width for width in widths if width % _BLOCK == 0] or widths
    if not widths:
        raise OptionError(f"--experts {experts}: {neurons} neurons hold no more than {neurons - 1}")
    choices = {neurons - experts * width: width for width in widths}
    if shared is None:
        shared = min(choices, key=lambda size: abs(size - neurons / 2))
    if shared not in choices:
        near = sorted(choices, key=lambda size: abs(size - shared))[:4]
        raise OptionError(
            f"--shared {shared} does not fit {neurons} neurons and {experts} experts; "
            f"{', '.join(str(size) for size in sorted(near))} do"
        )
    return Shape(shared, experts, choices[shared], used)


def hold_out(documents: Sequence[str], share: float = _HELD_OUT) -> tuple[list[str], str]:
    """Texts to learn from, and one to measure on: the last `share` of the characters."""
    total = sum(len(document) for document in documents)
    room = total - int(total * share)
    learn: list[str] = []
    held: list[str] = []
    for document in documents:
        learn.append(document[:room])
        held.append(document[room:] if room < len(document) else "")
        room = max(0, room - len(document))
    return [text for text in learn if text], "\n\n".join(text for text in held if text)


def _shipped() -> list[str]:
    return [*texts.python_topics().documents, *texts.python_docstrings().documents]


def _split(
    dense: Path,
    source: Source,
    kept: Path | None,
    shape: Shape,
    steps: int,
    threads: int | None,
    report: Callable[[str, float], None],
) -> Split:
    with tempfile.TemporaryDirectory() as scratch:
        return analyse(
            dense,
            [source],
            kept or Path(scratch) / "split.npz",
            shape=shape,
            steps=steps,
            threads=threads,
            progress=report,
        )


def _measured(
    stage: str,
    model: Path,
    text: str,
    threads: int | None,
    report: Callable[[str, float], None],
) -> Perplexity:
    return perplexity(
        model,
        text,
        max_windows=_MEASURED_WINDOWS,
        threads=threads,
        progress=lambda share: report(stage, share),
    )
