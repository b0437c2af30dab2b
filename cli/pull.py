"""`speculoe-local pull`: fetch a model by name, and say whether it will run here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.hub.cache import CachedModel

__all__ = ["placement_of", "pull"]


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="owner/repo, owner/repo:QUANT, owner/repo:file.gguf (each with @REVISION after the "
            "repository), hf: or hf.co/ before it, or an address on the hub.",
        ),
    ],
    offline: Annotated[
        bool, typer.Option("--offline", help="Make no connection: succeed if all is there.")
    ] = False,
    json_: opt.Json = False,
) -> None:
    """Fetch a model from the hub into the cache that the Hugging Face tools and llama.cpp share.

    Without QUANT: Q4_K_M, else Q8_0, else the first. Interrupted, the same command goes on. With --json
    progress is one JSON object a line on standard error, the result the last and only one on standard
    output.
    """
    from speculoe_local.cli.pull_progress import PullProgress
    from speculoe_local.hub.names import parse_name
    from speculoe_local.hub.pull import pull as run
    from speculoe_local.runtime.placement import format_bytes

    asked = parse_name(name)
    with PullProgress(str(asked), as_json=json_) as shown:
        done = run(asked, offline=offline, progress=shown.update)
    model = done.model
    plan = placement_of(model)
    if json_:
        result = {
            "event": "done",
            **model.to_json(),
            "fetched_bytes": done.fetched_bytes,
            "seconds": round(done.seconds, 2),
            "placement": plan,
        }
        print(json.dumps(result))
        return
    count = len(model.files)
    size = f"{format_bytes(model.nbytes)} in {count} file{'s' if count > 1 else ''}"
    came = (
        f"{format_bytes(done.fetched_bytes)} fetched and verified in {done.seconds:.0f} s"
        if done.fetched_bytes
        else "all there already"
    )
    print(f"{model.name}: {size}; {came}")
    print(model.path)
    print(plan["text"])
    if plan["runs"]:
        print(f"run it with: speculoe-local chat {model.name}")


def placement_of(model: CachedModel) -> dict[str, Any]:
    """How the model would lie in this machine's memory now, with the default budget, and how fast `plan` thinks
    it would be.

    `runs` is False where even one token's experts do not fit, or the file is no model of language;
    `text` then says why and what is needed.
    """
    from speculoe_local.cli.plan import brief
    from speculoe_local.runtime import machine, placement
    from speculoe_local.runtime.errors import BudgetError, ModelError
    from speculoe_local.runtime.modelmap import ModelMap
    from speculoe_local.runtime.needs import HOST_RESERVE_BYTES, needs_of
    from speculoe_local.runtime.options import EngineOptions

    host = machine.look()
    try:
        read, default = ModelMap.read(model.path), EngineOptions()
        needs = needs_of(read, default.ctx, default.ubatch)
        room = needs.room(host.available_bytes, HOST_RESERVE_BYTES, on_device=False)
        found = placement.plan(
            read,
            placement.parse_budget("auto"),
            available_bytes=read.other_bytes + max(0, room),
        )
    except (BudgetError, ModelError) as error:
        return {"runs": False, "available_bytes": host.available_bytes, "text": str(error)}
    verdict = brief(model.path)
    return {
        "runs": True,
        "kind": found.kind,
        "available_bytes": host.available_bytes,
        "budget_bytes": found.budget_bytes,
        "used_bytes": found.used_bytes,
        "smallest_bytes": found.smallest_bytes,
        "residency": round(found.residency, 4),
        "slots": found.slots,
        "verdict": list(verdict),
        "text": "\n".join((placement.describe(found), *verdict)),
    }
