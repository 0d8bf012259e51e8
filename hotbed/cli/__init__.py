"""The `hotbed` command. Each subcommand lives in its own file and is imported only when it is called.

The list of commands holds a name and one line for each, so `hotbed --help` and a mistyped command answer at once.
A HotbedError ends as `error: message` on stderr and the exit code of its kind; a traceback is a bug.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import FrameType
from typing import Any, NamedTuple

import typer

import hotbed
from hotbed.cli.console import err, fail, is_log_json, is_verbose, speak
from hotbed.cli.options import RENAMED, LogJson, Quiet, Verbose
from hotbed.errors import ExitCode, HotbedError, exit_code_of


class Command(NamedTuple):
    """Where a subcommand lives, its line and its group in `hotbed --help`."""

    module: str
    attribute: str
    summary: str
    group: str


START, UNDERSTAND, OPERATE = "Start", "Understand", "Operate"
COMMANDS = {
    "train": Command(
        "hotbed.cli.train", "train_command", "Train a model; without arguments, on the embedded click log.", START
    ),
    "prepare": Command("hotbed.cli.prepare", "prepare_command", "Turn raw logs into a dataset directory.", START),
    "evaluate": Command(
        "hotbed.cli.evaluate", "evaluate_command", "Measure a trained model on a split of a dataset.", START
    ),
    "predict": Command(
        "hotbed.cli.evaluate", "predict_command", "Score a dataset or raw files with a trained model.", START
    ),
    "models": Command("hotbed.cli.models", "models_command", "List the models and their options.", START),
    "data": Command("hotbed.cli.data", "data_app", "Describe, list, fetch or generate datasets.", START),
    "report": Command(
        "hotbed.cli.report", "report_command", "Write the report page of a run, or one that compares runs.", UNDERSTAND
    ),
    "plan": Command(
        "hotbed.cli.plan", "plan_command", "Forecast what a run will need and how fast it will be.", UNDERSTAND
    ),
    "tune": Command("hotbed.cli.tune", "tune_command", "Try settings, and keep the best by valid AUC.", START),
    "simulate": Command(
        "hotbed.cli.simulate", "simulate_command", "Count a cache's hits on a dataset, without training.", UNDERSTAND
    ),
    "explain": Command(
        "hotbed.cli.explain", "explain_command", "Show where a row of a run is, and its history.", UNDERSTAND
    ),
    "verify": Command(
        "hotbed.cli.verify", "verify_command", "Prove on your own data that the cache changes no bit.", UNDERSTAND
    ),
    "bench": Command(
        "hotbed.cli.bench", "bench_command", "Time the training step, compared with FBGEMM and torch.", UNDERSTAND
    ),
    "topo": Command(
        "hotbed.cli.topo", "topo_command", "Show NUMA nodes, GPUs and links, and what ranks get of them.", UNDERSTAND
    ),
    "top": Command("hotbed.cli.top", "top_command", "Watch runs while they train.", OPERATE),
    "checkpoint": Command(
        "hotbed.cli.checkpoint", "checkpoint_app", "List, verify, compare and prune the checkpoints of a run.", OPERATE
    ),
    "export": Command(
        "hotbed.cli.export",
        "export_command",
        "Write a trained model for other systems: ONNX, safetensors or Parquet.",
        OPERATE,
    ),
    "serve": Command(
        "hotbed.cli.serve", "serve_command", "Score over HTTP, with the newest checkpoint of a run.", OPERATE
    ),
}
_NEED_ARGUMENTS = ("evaluate", "predict", "prepare", "export", "explain", "report", "serve")
_HAVE_TEMPORARY_FILES = ("bench", "plan", "verify")  # and do not resume
_USAGE = typer.BadParameter.__mro__[1]  # UsageError, of click or of the copy that typer brings
_HELP = {"help_option_names": ["-h", "--help"]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command line and exit with its code."""
    # Threads of torch that spin while they wait starve the readers, and each other on a busy machine: DeepFM on two
    # cores under load trains 36,600 instead of 11,500 samples/s when they sleep. Read once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal gets `?`
    given = list(sys.argv[1:] if arguments is None else arguments)
    speak(log_json="--log-json" in given)
    given = with_new_names(given)
    try:
        app = build_app([*given, *_words_to_complete()])
        with ended_by_sigterm() if _command_in(given) in _HAVE_TEMPORARY_FILES else nullcontext():
            ended = app(args=given, prog_name="hotbed", obj=given, standalone_mode=not is_log_json())
        sys.exit(ended)
    except KeyboardInterrupt:
        sys.exit(fail("interrupted", ExitCode.INTERRUPTED))
    except Exception as error:
        code = exit_code_of(error)
        if isinstance(error, _USAGE):  # without --log-json typer prints it
            sys.exit(fail(error.format_message(), ExitCode.USAGE))  # type: ignore[attr-defined]
        is_bug = not isinstance(error, HotbedError) and code != ExitCode.DOES_NOT_FIT
        if is_bug and not is_log_json():
            raise
        if is_verbose() and not is_log_json():
            traceback.print_exc()
        message = f"{type(error).__name__}: {error}" if is_bug else str(error) or "out of memory"
        sys.exit(fail(message, code, traceback.format_exc() if is_bug or is_verbose() else None))
    finally:
        speak()  # a program may call main again, or a command by itself


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is inside as an error does, so that temporary files are removed; exit code 143."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(ExitCode.TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The command tree; only the subcommand named in `arguments` is imported."""
    app = typer.Typer(
        name="hotbed",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )
    app.callback()(_root)
    wanted = _command_in(arguments)
    for name, entry in COMMANDS.items():
        if name != wanted:
            app.command(name, help=entry.summary, rich_help_panel=entry.group)(_placeholder)
            continue
        command = getattr(import_module(entry.module), entry.attribute)
        if isinstance(command, typer.Typer):
            for one in command.registered_commands:
                assert one.callback is not None
                one.callback, one.context_settings = with_voice(one.callback), _HELP
            app.add_typer(command, name=name, help=entry.summary, rich_help_panel=entry.group, context_settings=_HELP)
        else:
            app.command(
                name, no_args_is_help=name in _NEED_ARGUMENTS, rich_help_panel=entry.group, context_settings=_HELP
            )(with_voice(command))
    return app


def with_voice(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `--quiet`, `--verbose` and `--log-json`, which every command has."""
    if "quiet" in inspect.signature(command).parameters:
        return command

    @functools.wraps(command)
    def speaking(*, quiet: bool = False, verbose: bool = False, log_json: bool = False, **options: Any) -> None:
        speak(quiet, verbose, log_json)
        command(**options)

    own = inspect.signature(command, eval_str=True)
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("quiet", Quiet), ("verbose", Verbose), ("log_json", LogJson))
    ]
    speaking.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])  # type: ignore[attr-defined]
    speaking.__annotations__ = {one.name: one.annotation for one in (*own.parameters.values(), *more)}
    return speaking


def with_new_names(arguments: list[str]) -> list[str]:
    """The arguments with options under the names they have now; a line on stderr names the old ones."""
    renamed = RENAMED.get(_command_in(arguments) or "", {})
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in renamed:
            err().print(f"note: {name} is now {renamed[name]}; the old name still works")
        found.append(renamed.get(name, name) + equals + value)
    return found


def _command_in(arguments: Sequence[str]) -> str | None:
    return next((one for one in arguments if not one.startswith("-") and one != "hotbed"), None)


def _words_to_complete() -> list[str]:
    """The words of the line that a shell asks to complete."""
    return os.environ.get("_TYPER_COMPLETE_ARGS", os.environ.get("COMP_WORDS", "")).split()


def _placeholder() -> None:
    """The entry of a command that is not imported."""


def _show_version(value: bool) -> None:
    if value:
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
