"""What `show` says of a model: its shape, its experts, its bytes by tier, what lies beside it.

From headers alone; no weight is read.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speculoe_local.runtime.modelmap import ModelMap
    from speculoe_local.runtime.sidecar import Sidecar

__all__ = ["as_json", "text"]


def as_json(name: str, path: Path) -> dict[str, Any]:
    """The model at `path`, called `name`. Raises ModelError where it is none."""
    from speculoe_local.runtime.header import type_name
    from speculoe_local.runtime.modelmap import ModelMap

    model = ModelMap.read(path)
    types: Counter[str] = Counter()
    for tensor in model.tensors.values():
        types[type_name(tensor.ggml_type)] += tensor.nbytes
    template = model.metadata.get("tokenizer.chat_template")
    return {
        "model": name,
        "path": str(path),
        "shards": len(model.files),
        "name": model.name,
        "architecture": model.architecture,
        "layers": model.n_layer,
        "moe_layers": len(model.layers),
        "embedding": model.n_embd,
        "vocabulary": model.n_vocab,
        "trained_context": model.metadata.get(f"{model.architecture}.context_length"),
        "experts": model.n_expert,
        "experts_used": model.n_expert_used,
        "shared_experts": any(layer.has_shared for layer in model.layers),
        "bytes": {
            "total": model.total_bytes,
            "routed_experts": model.routed_bytes,
            "shared_experts": sum(layer.shared_bytes for layer in model.layers),
            "other": model.other_bytes - sum(layer.shared_bytes for layer in model.layers),
            "one_expert": max((layer.expert_bytes for layer in model.layers), default=0),
            "experts_per_token": sum(
                layer.n_expert_used * layer.expert_bytes for layer in model.layers
            ),
        },
        "types": dict(types.most_common()),
        "template": template if isinstance(template, str) else None,
        "fingerprint": model.fingerprint,
        "sidecar": _sidecar(path, model),
    }


def text(found: dict[str, Any]) -> str:
    """The same for people; `show --json` has the template in full."""
    from speculoe_local.runtime.placement import format_bytes

    nbytes = found["bytes"]
    rows = [
        ("model", f"{found['name']} ({found['architecture']})"),
        (
            "file",
            found["path"] + (f" and {found['shards'] - 1} more" if found["shards"] > 1 else ""),
        ),
        ("layers", f"{found['layers']}, {found['moe_layers']} of them with experts"),
    ]
    if found["experts"]:
        shared = ", and a shared expert" if found["shared_experts"] else ""
        rows += [
            ("experts", f"{found['experts']} a layer, {found['experts_used']} used{shared}"),
            (
                "routed",
                f"{format_bytes(nbytes['routed_experts'])}: what --expert-budget is about; one expert "
                f"{format_bytes(nbytes['one_expert'])}, one token {format_bytes(nbytes['experts_per_token'])}",
            ),
        ]
    if found["shared_experts"]:
        rows.append(("shared", format_bytes(nbytes["shared_experts"])))
    rows += [
        ("other", f"{format_bytes(nbytes['other'])} that always stay in memory"),
        ("total", format_bytes(nbytes["total"])),
        ("types", ", ".join(f"{kind} {format_bytes(n)}" for kind, n in found["types"].items())),
        ("context", f"{found['trained_context'] or 'unknown'} tokens trained for"),
        (
            "template",
            f"{len(found['template'])} characters" if found["template"] else "none: ChatML",
        ),
        ("sidecar", _sidecar_text(found["sidecar"])),
    ]
    return "\n".join(f"{label:9} {value}" for label, value in rows)


def _sidecar(path: Path, model: ModelMap) -> dict[str, Any]:
    from speculoe_local.runtime.errors import SidecarError
    from speculoe_local.runtime.sidecar import Sidecar, sidecar_path

    place = sidecar_path(path)
    if not place.exists():
        return {"path": str(place), "state": "none"}
    try:
        found = Sidecar.read(place, model)
    except SidecarError as error:
        return {"path": str(place), "state": "unusable", "problem": str(error)}
    return {"path": str(place), "state": "fits", "recall": _recalls(found)}


def _recalls(sidecar: Sidecar) -> dict[str, float]:
    from speculoe_local.runtime.sidecar import PREDICTORS

    means = {who: sidecar.mean("recall", who) for who in PREDICTORS}
    return {who: round(mean, 4) for who, mean in means.items() if mean is not None}


def _sidecar_text(found: dict[str, Any]) -> str:
    if found["state"] == "none":
        return "none; `speculoe-local calibrate` makes one"
    if found["state"] == "unusable":
        return str(found["problem"])
    recalls = ", ".join(f"{who} {rate:.2f}" for who, rate in found["recall"].items())
    return f"{found['path']}: recall {recalls or 'not measured'}"
