"""The `hotbed` command. Each subcommand lives in its own file and is imported only when it is called.

The list of commands holds a name and one line for each, so `hotbed --help` and a mistyped command answer at once.
A HotbedError ends as `error: message` on stderr and exit code 2; a traceback is a bug.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import typer

import hotbed
from hotbed.cli.console import fail
from hotbed.errors import HotbedError


class Command(NamedTuple):
    """Where a subcommand lives, and its line in `hotbed --help`."""

    module: str
    attribute: str
    summary: str


COMMANDS = {
    "train": Command(
        "hotbed.cli.train", "train_command", "Train a model; without arguments, on the embedded click log."
    ),
    "evaluate": Command("hotbed.cli.evaluate", "evaluate_command", "Measure a trained model on a split of a dataset."),
    "predict": Command("hotbed.cli.evaluate", "predict_command", "Score a dataset or raw files with a trained model."),
    "serve": Command("hotbed.cli.serve", "serve_command", "Score over HTTP, with the newest checkpoint of a run."),
    "prepare": Command("hotbed.cli.prepare", "prepare_command", "Turn raw logs into a dataset directory."),
    "data": Command("hotbed.cli.data", "data_app", "Describe a dataset, or fetch a public one."),
    "models": Command("hotbed.cli.models", "models_command", "List the models and their options."),
    "plan": Command("hotbed.cli.plan", "plan_command", "Forecast what a run will need and how fast it will be."),
    "simulate": Command(
        "hotbed.cli.simulate", "simulate_command", "Count a cache's hits on a dataset, without training."
    ),
    "verify": Command("hotbed.cli.verify", "verify_command", "Prove on your own data that the cache changes no bit."),
    "explain": Command("hotbed.cli.explain", "explain_command", "Show where a row of a run is, and its history."),
    "bench": Command("hotbed.cli.bench", "bench_command", "Time the training step, compared with FBGEMM and torch."),
    "checkpoint": Command(
        "hotbed.cli.checkpoint", "checkpoint_app", "List, verify, compare and prune the checkpoints of a run."
    ),
    "export": Command(
        "hotbed.cli.export", "export_command", "Write a trained model for other systems: ONNX, safetensors or Parquet."
    ),
    "top": Command("hotbed.cli.top", "top_command", "Watch runs while they train."),
    "report": Command(
        "hotbed.cli.report", "report_command", "Write the report page of a run, or one that compares runs."
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit with its code."""
    # Threads of torch that spin while they wait starve the readers, and each other on a busy machine: DeepFM on two
    # cores under load trains 36,600 instead of 11,500 samples/s when they sleep. Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal gets `?`
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build_app(given)(args=given, prog_name="hotbed")
    except HotbedError as error:
        sys.exit(fail(str(error)))
    except KeyboardInterrupt:
        sys.exit(fail("interrupted", code=130))


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The command tree; only the subcommand named in `arguments` is imported."""
    app = typer.Typer(
        name="hotbed",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    app.callback()(_root)
    wanted = next((one for one in arguments if not one.startswith("-")), None)
    for name, entry in COMMANDS.items():
        if name == wanted:
            command = getattr(import_module(entry.module), entry.attribute)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, help=entry.summary)
            else:
                app.command(
                    name,
                    no_args_is_help=name in ("evaluate", "predict", "prepare", "export", "explain", "report", "serve"),
                )(command)
        else:
            app.command(name, help=entry.summary)(_placeholder)
    return app


def _placeholder() -> None:
    """The entry of a command that is not imported."""


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hotbed {hotbed.__version__}")
        raise typer.Exit()


def _root(
    show_version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=_show_version,
    ),
) -> None:
    """Train click-through-rate and recommendation models with large embedding tables.

    [bold]Start here:[/bold] hotbed train
    """
