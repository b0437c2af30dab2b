"""`speculoe-local show`: what is known of a model; so far, what is in its sidecar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.runtime.sidecar import Sidecar

__all__ = ["as_json", "show", "table"]

_COLUMNS = ("residual", "quasi-hidden", "ridge", "previous-token", "chance")
_KINDS = ("recall", "precision_top1")


def show(
    model: opt.ModelName = None,
    sidecar: Annotated[
        bool, typer.Option("--sidecar", help="Show the model's sidecar, as `calibrate` wrote it.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            help="The sidecar to show. Default: MODEL with suffix .speculoe.gguf.",
        ),
    ] = None,
    json_: opt.Json = False,
) -> None:
    """Show what is known of a model.

    With --sidecar: how well each layer's experts are predicted, and by what.
    """
    if not sidecar:
        raise typer.BadParameter("say what to show: --sidecar")
    from speculoe_local.runtime.modelmap import ModelMap
    from speculoe_local.runtime.sidecar import Sidecar, sidecar_path

    path = opt.resolve_model(model)
    place = file or sidecar_path(path)
    found = Sidecar.read(place, ModelMap.read(path))
    print(json.dumps(as_json(path, place, found)) if json_ else table(path, place, found))


def as_json(model: Path, place: Path, sidecar: Sidecar) -> dict[str, Any]:
    """The sidecar without its arrays. Rates are shares, 0 to 1."""
    return {
        "model": str(model),
        "sidecar": str(place),
        "bytes": place.stat().st_size,
        "fingerprint": sidecar.fingerprint,
        "text": {
            "sha256": sidecar.text_sha256,
            "bytes": sidecar.text_bytes,
            "tokens": sidecar.tokens,
            "held_out": sidecar.held_out,
        },
        "means": _means(sidecar),
        "layers": [
            {
                "block": layer.block,
                "source": layer.source,
                "strategy": layer.strategy,
                "predictable": layer.predictable,
                "reason": layer.reason,
                "experts": len(layer.seen),
                "seen": int(layer.seen.sum()),
                "shared": layer.shared_mean is not None,
                **{
                    kind: {who: round(rate, 4) for who, rate in getattr(layer, kind).items()}
                    for kind in _KINDS
                },
            }
            for layer in sidecar.layers
        ],
    }


def table(model: Path, place: Path, sidecar: Sidecar) -> str:
    """Layers as rows: recall of each predictor, precision of the most certain expert, strategy."""
    lines = [
        f"{place.name}: calibrated for {model.name} on {sidecar.tokens} tokens, "
        f"measured on {sidecar.held_out} others",
        "recall: share of a layer's true experts that are predicted from the layer before; "
        "top: how often the most certain one is right",
        "",
        f"{'layer':>5} {'residual':>9} {'quasi':>7} {'ridge':>7} {'previous':>9} {'chance':>7} "
        f"{'quasi top':>10} {'ridge top':>10} {'seen':>9}  strategy",
    ]
    for layer in sidecar.layers:
        precision = layer.precision_top1
        seen = f"{int(layer.seen.sum())}/{len(layer.seen)}"
        lines.append(
            _row(str(layer.block), layer.recall, precision)
            + f" {seen:>9}  {layer.strategy}"
            + (f" ({layer.reason})" if layer.reason else "")
        )
    n_predicted = sum(layer.predictable for layer in sidecar.layers)
    if n_predicted:
        means = _means(sidecar)
        row = _row("mean", means["recall"], means["precision_top1"])
        lines.append(f"{row} {'':>9}  over {n_predicted} predicted layers")
    else:
        lines.append("no layer of this model can be predicted")
    return "\n".join(lines)


def _means(sidecar: Sidecar) -> dict[str, dict[str, float]]:
    return {
        kind: {
            who: round(mean, 4) for who in _COLUMNS if (mean := sidecar.mean(kind, who)) is not None
        }
        for kind in _KINDS
    }


def _row(label: str, recall: Mapping[str, float], precision: Mapping[str, float]) -> str:
    widths = (9, 7, 7, 9, 7)
    cells = [_rate(recall, who, width) for who, width in zip(_COLUMNS, widths, strict=True)]
    cells += [_rate(precision, who, 10) for who in ("quasi-hidden", "ridge")]
    return f"{label:>5} " + " ".join(cells)


def _rate(rates: Mapping[str, float], who: str, width: int) -> str:
    return f"{rates[who]:{width}.3f}" if who in rates else f"{'-':>{width}}"
