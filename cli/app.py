"""The `speculoe-local` program: its sub-commands, `--version`, and what each error exits with.

Imports nothing heavy, so that `--help` is instant; commands import what they need when they run.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

import speculoe_local
from speculoe_local.cli import (
    bench,
    cached,
    calibrate,
    chat,
    doctor,
    evaluate,
    plan,
    pull,
    replay,
    rpc_serve,
    serve,
    show,
    trace,
    train_estimator,
)
from speculoe_local.cli import convert as convert_command
from speculoe_local.cli import inspect as inspect_command
from speculoe_local.cli import quantize as quantize_command
from speculoe_local.cli import repack as repack_command
from speculoe_local.cli import upcycle as upcycle_command

__all__ = ["app", "main"]

TRACEBACK_VARIABLE = "SPECULOE_TRACEBACK"


class _Program(TyperGroup):
    """Runs a sub-command and turns what it raises into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read our output has had enough (`| head -1`): that is no failure.
            _discard_stdout()
            raise typer.Exit(0) from None
        except (typer.Exit, typer.Abort, TyperException):
            raise  # usage: typer shows it, with exit code 2
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            raise typer.Exit(_report(error)) from None
        return result


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run Mixture-of-Experts GGUF models that do not fit into fast memory.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"speculoe-local {speculoe_local.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("bench")(bench.bench)
app.command("calibrate")(calibrate.calibrate)
app.command("train-estimator")(train_estimator.train_estimator)
app.command("show")(show.show)
app.command("pull")(pull.pull)
app.command("list")(cached.list_)
app.command("path")(cached.path)
app.command("verify")(cached.verify)
app.command("rm")(cached.rm)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("replay")(replay.replay)
app.command("rpc-serve")(rpc_serve.rpc_serve)
app.command("trace")(trace.trace)
app.command("inspect")(inspect_command.inspect)
app.command("quantize")(quantize_command.quantize)
app.command("convert")(convert_command.convert)
app.command("repack")(repack_command.repack)
app.command("upcycle")(upcycle_command.upcycle)
app.command("eval")(evaluate.evaluate)


def main() -> None:
    """The entry point. Exits with 0 done, 1 failed, 2 usage, 130 interrupted."""
    app(prog_name="speculoe-local")


def _report(error: Exception) -> int:
    # Importing the runtime here could fail in the very way that is to be reported. Whoever raised
    # one of its errors has imported them.
    errors: Any = sys.modules.get("speculoe_local.runtime.errors")
    known = errors is not None and isinstance(error, errors.SpeculoeError)
    if known:
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
    else:
        text = f"unexpected {type(error).__name__}: {error} ({TRACEBACK_VARIABLE}=1 shows where)"
    print("error:", *text.splitlines(), file=sys.stderr)
    return 2 if known and isinstance(error, errors.OptionError) else 1


def _discard_stdout() -> None:
    """Let the flush at exit go nowhere instead of failing once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
