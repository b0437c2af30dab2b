"""`speculoe-local show`: what is known of a model, and in detail what is in its sidecar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.runtime.sidecar import Sidecar

__all__ = ["as_json", "show", "table"]

# Predictors in the order of the table, with the heading and width of their recall.
_COLUMNS = {
    "residual": ("residual", 9),
    "quasi-hidden": ("quasi", 7),
    "ridge": ("ridge", 7),
    "adapter": ("adapter", 8),
    "mlp": ("mlp", 7),
    "previous-token": ("previous", 9),
    "chance": ("chance", 7),
}
_TRAINED = ("adapter", "mlp")
_TOPS = ("quasi-hidden", "ridge", *_TRAINED)
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
    """Show architecture, experts, sizes by tier, types, template and sidecar of a model.

    With --sidecar: how well each layer's experts are predicted, and by what.
    """
    if not sidecar and file is None:
        from speculoe_local.cli import summary

        place = opt.resolve_model(model)
        shown = summary.as_json(model or place.stem, place)
        print(json.dumps(shown) if json_ else summary.text(shown))
        return
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
        "training": None if sidecar.training is None else asdict(sidecar.training),
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
    columns = _columns(sidecar)
    lines = [
        f"{place.name}: calibrated for {model.name} on {sidecar.tokens} tokens, "
        f"measured on {sidecar.held_out} others",
        "recall: share of a layer's true experts that are predicted from the layer before; "
        "top: how often the most certain one is right",
        "",
        f"{'layer':>5} "
        + " ".join(f"{_COLUMNS[who][0]:>{_COLUMNS[who][1]}}" for who in columns)
        + "".join(f" {_COLUMNS[who][0] + ' top':>11}" for who in _TOPS if who in columns)
        + f" {'seen':>9}  strategy",
    ]
    if (training := sidecar.training) is not None:
        lines[1:1] = [
            f"estimators trained on {training.tokens} tokens, stopped by {training.validation}; all "
            f"predictors measured on {training.held_out} others"
        ]
    for layer in sidecar.layers:
        precision = layer.precision_top1
        seen = f"{int(layer.seen.sum())}/{len(layer.seen)}"
        lines.append(
            _row(str(layer.block), columns, layer.recall, precision)
            + f" {seen:>9}  {layer.strategy}"
            + (f" ({layer.reason})" if layer.reason else "")
        )
    n_predicted = sum(layer.predictable for layer in sidecar.layers)
    if n_predicted:
        means = _means(sidecar)
        row = _row("mean", columns, means["recall"], means["precision_top1"])
        lines.append(f"{row} {'':>9}  over {n_predicted} predicted layers")
        if "strategy" in means["recall"]:
            lines.append(
                f"with each layer's strategy: recall {means['recall']['strategy']:.3f}, "
                f"top {means['precision_top1']['strategy']:.3f}"
            )
    else:
        lines.append("no layer of this model can be predicted")
    return "\n".join(lines)


def _means(sidecar: Sidecar) -> dict[str, dict[str, float]]:
    """Means over the predicted layers; of a trained sidecar also of what each layer's strategy is."""
    means = {
        kind: {
            who: round(mean, 4) for who in _COLUMNS if (mean := sidecar.mean(kind, who)) is not None
        }
        for kind in _KINDS
    }
    used = [layer for layer in sidecar.layers if layer.predictable and layer.strategy != "none"]
    if sidecar.training is not None and used:
        for kind in _KINDS:
            rates = [getattr(layer, kind)[layer.strategy] for layer in used]
            means[kind]["strategy"] = round(sum(rates) / len(rates), 4)
    return means


def _columns(sidecar: Sidecar) -> list[str]:
    """The predictors to show: those of training only where something was trained."""
    trained = {who for layer in sidecar.layers for who in _TRAINED if who in layer.recall}
    return [who for who in _COLUMNS if who not in _TRAINED or who in trained]


def _row(
    label: str, columns: list[str], recall: Mapping[str, float], precision: Mapping[str, float]
) -> str:
    cells = [_rate(recall, who, _COLUMNS[who][1]) for who in columns]
    cells += [_rate(precision, who, 11) for who in _TOPS if who in columns]
    return f"{label:>5} " + " ".join(cells)


def _rate(rates: Mapping[str, float], who: str, width: int) -> str:
    return f"{rates[who]:{width}.3f}" if who in rates else f"{'-':>{width}}"
