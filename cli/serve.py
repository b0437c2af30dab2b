"""`speculoe-local serve`: an HTTP server for editors, agents and scripts."""

from __future__ import annotations

import ipaddress
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.server.models import Models
    from speculoe_local.server.settings import ModelSpec

__all__ = ["serve"]

_EMBEDDED = "embedded"


def serve(
    model: opt.ModelName = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--models",
            metavar="NAME=MODEL",
            show_default=False,
            help="Serve several by name, loaded on demand; repeatable. The first is the default.",
        ),
    ] = None,
    alias: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="The name MODEL answers to."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 takes a free one.")
    ] = 8080,
    parallel: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Answers that run at a time.")
    ] = 4,
    queue: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests that may wait beside these.")
    ] = 64,
    kv: Annotated[
        Literal["separate", "shared"],
        typer.Option(
            help="separate: --ctx tokens for each of --parallel. shared: for all together, less "
            "memory, and rounding may depend on what else runs."
        ),
    ] = "separate",
    unload_after: Annotated[
        float,
        typer.Option(min=0, metavar="S", help="Unload a model that rests S seconds; 0: never."),
    ] = 0.0,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=False, help="Keep long prompts' KV here across restarts."
        ),
    ] = None,
    cache_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that --cache-dir may take.")
    ] = "2GiB",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            show_default=False,
            envvar="SPECULOE_API_KEY",
            help="Ask clients for this key; repeatable. A file keeps it out of the process list.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Keys, one a line."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", show_default=False, help="Let pages of ORIGIN call; repeatable."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", show_default=False, help="Accept NAME in Host headers; repeatable."
        ),
    ] = None,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest request body.")] = "32MiB",
    ping: Annotated[
        float,
        typer.Option(min=0, metavar="S", help="Period of comments in event streams; 0: none."),
    ] = 15.0,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Let the log show prompts and answers.")
    ] = False,
    merge_system: Annotated[
        bool, typer.Option(help="Join system messages where a template takes one only.")
    ] = True,
    temp: opt.Temp = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    seed: opt.Seed = None,
    expert_budget: opt.ExpertBudget = "auto",
    mode: opt.Mode = "exact",
    weights: opt.Weights = "predicted",
    unmeasured: opt.Unmeasured = False,
    predict: opt.Predict = None,
    sidecar: opt.Sidecar = None,
    link: opt.Link = None,
    source: opt.Source = "auto",
    repack: opt.Repack = True,
    rpc: opt.Rpc = None,
    misses: opt.Misses = "upload",
    pin: opt.Pin = "auto",
    pin_layers: opt.PinLayers = "",
    n_cpu_moe: opt.NCpuMoe = 0,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    ctx: opt.Ctx = 4096,
    batch: opt.Batch = 512,
    ubatch: opt.Ubatch = 512,
) -> None:
    """Serve models over HTTP: OpenAI, llama-server, Ollama and Anthropic requests.

    Standard error says where it listens and when the model is there; standard output stays empty.
    """
    from speculoe_local.cli.engine_thread import leave
    from speculoe_local.runtime import Sampling
    from speculoe_local.server.http import logs
    from speculoe_local.server.serving import Serving, listen
    from speculoe_local.server.settings import Settings

    if models and (model is not None or alias is not None):
        raise typer.BadParameter("MODEL and --alias go without --models")
    settings = Settings(
        models=_specs(model, models or [], alias),
        strict=bool(models),
        engine=opt.engine_options(
            expert_budget=expert_budget,
            mode=mode,
            weights=weights,
            unmeasured=unmeasured,
            predict=predict,
            device=device,
            link=link,
            sidecar=sidecar,
            threads=threads,
            ctx=ctx,
            batch=batch,
            ubatch=ubatch,
            source=source,
            repack=repack,
            rpc=rpc,
            misses=misses,
            pin=pin,
            pin_layers=pin_layers,
            n_cpu_moe=n_cpu_moe,
        ),
        sampling=Sampling(
            temp=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
        ),
        host=host,
        port=port,
        parallel=parallel,
        shared_kv=kv == "shared",
        queue=queue,
        ping_s=ping,
        idle_s=unload_after,
        cache_dir=cache_dir,
        cache_bytes=_size("--cache-size", cache_size),
        keys=(*(api_key or ()), *_keys_in(api_key_file)),
        hosts=tuple(allow_host or ()),
        origins=tuple(cors_origin or ()),
        max_body_bytes=_size("--max-body", max_body),
        log_json=log_json,
        log_prompts=log_prompts,
        merge_system=merge_system,
    )
    logs.configure(settings)
    listening = listen(host, port)
    address = listening.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    print(f"listening on http://{shown}:{address[1]}", file=sys.stderr, flush=True)
    if not settings.keys and not ipaddress.ip_address(address[0]).is_loopback:
        print(
            "warning: whoever reaches this address may use it; ask for a key with --api-key-file",
            file=sys.stderr,
            flush=True,
        )
    serving = Serving(settings, ready=_say_ready)
    serving.run_on(listening)
    code = 130 if serving.signal == signal.SIGINT else 0
    if serving.stuck:
        leave(code)
    raise typer.Exit(code)


def _say_ready(models: Models) -> None:
    for backend in models.loaded():
        info = backend.info
        print(
            f"ready: {info.name}, {info.n_ctx} tokens for each of {info.n_parallel} answers, "
            f"{info.exactness}, loaded in {info.load_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )


def _specs(model: str | None, models: list[str], alias: str | None) -> tuple[ModelSpec, ...]:
    from speculoe_local.runtime.errors import OptionError
    from speculoe_local.server.settings import ModelSpec

    if not models:
        path = opt.resolve_model(model)
        return (ModelSpec(alias or (_EMBEDDED if model is None else _name_of(model)), path),)
    found = []
    for text in models:
        name, equals, where = text.partition("=")
        if not equals:
            name, where = _name_of(text), text
        if not where:
            raise OptionError(f"--models {text!r} names no file; use NAME=MODEL")
        found.append(ModelSpec(name, opt.resolve_model(None if where == _EMBEDDED else where)))
    return tuple(found)


def _name_of(model: str) -> str:
    """A pulled name as it is; of a path what is left without folder, suffix and number of a part."""
    if not Path(model).expanduser().exists():
        return model
    return re.sub(r"-[0-9]{5}-of-[0-9]{5}$", "", Path(model).stem)


def _size(option: str, text: str) -> int:
    from speculoe_local.runtime.errors import OptionError
    from speculoe_local.runtime.placement import parse_budget

    nbytes = parse_budget(text).nbytes
    if nbytes is None:
        raise OptionError(f"{option} {text[:40]!r} is not a size; use for example 512MiB")
    return nbytes


def _keys_in(path: Path | None) -> tuple[str, ...]:
    """One key a line; empty lines and those with # in front do not count."""
    if path is None:
        return ()
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(line for line in lines if line and not line.startswith("#"))
