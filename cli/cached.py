"""`speculoe-local list`, `rm`, `verify` and `path`: the models that are in the cache. No network."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.hub.cache import CachedModel

__all__ = ["list_", "path", "rm", "verify"]

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="As `list` shows it; a quant's case does not matter.")
]


def list_(json_: opt.Json = False) -> None:
    """List the GGUF models in the cache: size, shards, whether complete, last use."""
    from speculoe_local.hub import cache

    root = cache.cache_dir()
    found = cache.models(root)
    if json_:
        shown = [model.to_json() for model in found]
        print(json.dumps({"cache": str(root), "models": shown}))
        return
    if not found:
        print(f"no models in {root}: speculoe-local pull owner/repo")
        return
    width = max(len(model.name) for model in found)
    print(f"{'NAME':{width}} {'SIZE':>10} {'SHARDS':>6} {'LAST USE':>10}  STATE")
    for model in found:
        print(_row(model, width, time.time()))


def path(
    name: Name,
    json_: opt.Json = False,
) -> None:
    """Print where a pulled model lies; of a split one, its first shard."""
    from speculoe_local.hub import cache
    from speculoe_local.hub.names import parse_name

    model = cache.ready(parse_name(name))
    print(json.dumps(model.to_json()) if json_ else model.path)


def rm(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="As `list` shows it; owner/repo removes all models of it."
        ),
    ],
    json_: opt.Json = False,
) -> None:
    """Remove a model from the cache, except bytes that another file needs, and its sidecar.

    A model that is open, or being pulled, is refused.
    """
    from speculoe_local.hub.names import parse_name
    from speculoe_local.hub.remove import remove
    from speculoe_local.runtime.placement import format_bytes

    removed = remove(parse_name(name))
    if json_:
        print(json.dumps({"removed": [one.to_json() for one in removed]}))
        return
    for one in removed:
        print(f"{one.name} removed, {format_bytes(one.freed_bytes)} freed")


def verify(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", show_default=False, help="As `list` shows it. Default: all models."
        ),
    ] = None,
    json_: opt.Json = False,
) -> None:
    """Read models in the cache and compare them with their hashes. Exit code 1 if any is wrong."""
    from speculoe_local.cli.render import LoadBar
    from speculoe_local.hub import cache
    from speculoe_local.hub.names import parse_name
    from speculoe_local.hub.verify import verify as run

    found = [cache.find(parse_name(name))] if name is not None else list(cache.models())
    total = sum(file.nbytes for model in found for file in model.files) or 1
    done = 0
    with LoadBar("verifying") as bar:

        def report(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            bar.update(done / total)

        results = [(model, run(model, report)) for model in found]
    good = all(model.complete and not any(f.problem for f in files) for model, files in results)
    if json_:
        shown = [
            {
                "name": model.name,
                "ok": model.complete and not any(file.problem for file in files),
                "complete": model.complete,
                "missing": list(model.missing),
                "files": [file.to_json() for file in files],
            }
            for model, files in results
        ]
        print(json.dumps({"ok": good, "models": shown}))
    else:
        for model, files in results:
            for file in files:
                verdict = file.problem or (
                    "ok" if file.checked else "ok (header; no hash is known)"
                )
                print(f"{model.name}  {file.file.path}: {verdict}")
            for missing in model.missing:
                print(f"{model.name}  {missing}: missing; speculoe-local pull {model.name}")
        if not found:
            print("no models in the cache")
    if not good:
        raise typer.Exit(1)


def _row(model: CachedModel, width: int, now_s: float) -> str:
    from speculoe_local.runtime.placement import format_bytes

    shards = len(model.files) + len(model.missing)
    state = "complete"
    if not model.complete:
        whole = f" of {format_bytes(model.total_bytes)}" if model.total_bytes else ""
        state = (
            f"INCOMPLETE, {len(model.files)} of {shards} files{whole}; "
            f"speculoe-local pull {model.name}"
        )
    used = _ago(now_s - model.last_used) if model.last_used else "-"
    return f"{model.name:{width}} {format_bytes(model.nbytes):>10} {shards:>6} {used:>10}  {state}"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "now"
