"""`speculoe-local chat`: a conversation at the terminal, or one answer for a script."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.cli.conversation import Conversation
    from speculoe_local.cli.engine_thread import EngineThread
    from speculoe_local.runtime import Engine, EngineOptions

__all__ = ["chat"]

# Long enough for any file or finished program; whoever waits longer wonders why nothing happens.
_STDIN_NOTICE_S = 2.0


def chat(
    model: opt.ModelName = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "-p",
            "--prompt",
            metavar="TEXT",
            show_default=False,
            help="One answer to TEXT, then exit. Piped input is appended, or stands alone.",
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", show_default=False, help="Instructions to the model."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", show_default=False, help="End the answer here; repeatable."),
    ] = None,
    json_: opt.Json = False,
    logits_hash: Annotated[
        bool, typer.Option("--logits-hash", help="Add the SHA-256 over all decoded logits.")
    ] = False,
    stats: Annotated[
        bool, typer.Option(help="Speed and expert statistics on standard error.")
    ] = True,
    raw: Annotated[bool, typer.Option("--raw", help="Show Markdown as it is.")] = False,
    history: Annotated[
        bool,
        typer.Option(
            envvar="SPECULOE_HISTORY", help="Keep what you type in a file only you can read."
        ),
    ] = True,
    temp: opt.Temp = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    repeat_penalty: opt.RepeatPenalty = 1.0,
    seed: opt.Seed = None,
    max_tokens: opt.MaxTokens = None,
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
    """Chat with a model.

    At a terminal a conversation, /help tells more. With -p TEXT or piped input, one answer: standard
    output carries the answer and nothing else.
    """
    from speculoe_local.cli.conversation import Conversation
    from speculoe_local.cli.engine_thread import EngineThread
    from speculoe_local.runtime import Sampling

    question = _question(prompt)
    if question is None and json_:
        raise typer.BadParameter("--json needs -p TEXT or piped input")
    engine_options = opt.engine_options(
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
    )
    conversation = Conversation(
        sampling=Sampling(
            temp=temp,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
        ),
        max_tokens=max_tokens,
        system=None if system is None else _well_formed(system),
        show_stats=stats,
        markdown=not raw,
    )
    thread = EngineThread()
    code = 1
    engine = None
    try:
        engine = _open(thread, model, engine_options)
        if question is None:
            from speculoe_local.cli.repl import Repl

            code = Repl(
                thread,
                engine,
                conversation,
                stop=stop or (),
                logits_hash=logits_hash,
                keep_history=history,
            ).run()
        else:
            conversation.say("user", question)
            code = _one_shot(
                thread, engine, conversation, stop or [], as_json=json_, logits_hash=logits_hash
            )
    except KeyboardInterrupt:
        code = 130
    finally:
        thread.close(engine.close if engine is not None else None, code)
    raise typer.Exit(code)


def _question(prompt: str | None) -> str | None:
    """What to answer in one shot, or None for a conversation."""
    from speculoe_local.runtime.errors import OptionError

    if prompt is not None and not prompt.strip():
        raise OptionError(f"prompt {prompt!r} is empty: give -p some text")
    if sys.stdin is None or sys.stdin.isatty():
        if prompt is None and not (sys.stdout.isatty() or sys.stderr.isatty()):
            raise OptionError("no terminal to chat at: give -p TEXT or pipe text in")
        return None if prompt is None else _well_formed(prompt)
    waiting = threading.Timer(
        _STDIN_NOTICE_S,
        lambda: print("reading standard input up to its end ...", file=sys.stderr, flush=True),
    )
    waiting.daemon = True
    waiting.start()
    try:
        piped = sys.stdin.buffer.read().decode("utf-8", "replace").strip("\r\n")
    finally:
        waiting.cancel()
    parts = [part for part in (prompt, piped) if part is not None and part.strip()]
    if not parts:
        raise OptionError("standard input is empty: give -p TEXT, pipe text in, or use a terminal")
    return _well_formed("\n\n".join(parts))


def _well_formed(text: str) -> str:
    """Bytes of the command line that are no UTF-8 become U+FFFD: models take text."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _open(thread: EngineThread, model: str | None, engine_options: EngineOptions) -> Engine:
    from speculoe_local.cli.render import LoadBar, note
    from speculoe_local.runtime import Engine
    from speculoe_local.runtime.template import choose

    with LoadBar("Preparing the embedded model") as bar:
        path = opt.resolve_model(model, bar.update)
    with LoadBar(f"Loading {Path(path).name}") as bar:
        engine = thread.call(lambda: Engine.open(path, options=engine_options, progress=bar.update))
    notice = choose(engine.info.template).notice
    if notice is not None:
        note(f"note: {notice}")
    return engine


def _one_shot(
    thread: EngineThread,
    engine: Engine,
    conversation: Conversation,
    stop: list[str],
    *,
    as_json: bool,
    logits_hash: bool,
) -> int:
    from speculoe_local.cli import answer as turn
    from speculoe_local.cli.render import AnswerWriter, note

    writer = AnswerWriter(markdown=conversation.markdown)
    given = turn.answer(
        thread,
        engine,
        conversation,
        show=_ignore if as_json else writer.feed,
        stop=stop,
        logits_hash=logits_hash,
    )
    if as_json:
        # Without UTF-8 escapes keep the object intact where "?" would not.
        utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
        found = turn.as_json(engine.info.name, given)
        print(json.dumps(found, ensure_ascii=not utf8), flush=True)
    else:
        writer.end()
    if conversation.show_stats:
        note(given.stats.line())
    if logits_hash and not as_json:
        note(f"logits_sha256 {turn.logits_sha256(given)}")
    return 130 if given.finish_reason == "cancel" else 0


def _ignore(text: str) -> None:
    pass
