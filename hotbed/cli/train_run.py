"""A run from its settings to its result: build, start or resume, train, print; what `hotbed train` and `hotbed fit` share."""

from __future__ import annotations

import dataclasses
import json
import shlex
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from hotbed.cli.console import compiled_text, err, is_log_json, is_quiet, out, print_json, waiting
from hotbed.cli.messages import (
    compare_forecast,
    describe_start,
    next_commands,
    print_forecast,
    print_result,
    report_parallel_choices,
    warn_about_few_steps,
    warn_about_no_valid,
    warn_about_one_class,
)
from hotbed.cli.progress import Warnings, WatchOptions, open_watchers, progress_display
from hotbed.cli.ranks import RunStart, TorchrunRanks
from hotbed.cli.settings import open_dataset, suited_config, with_source

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.host.compiling import CompileReport
    from hotbed.parallel.world import World
    from hotbed.run.config import RunConfig
    from hotbed.telemetry.observer import Observer
    from hotbed.train.build import BuiltTraining
    from hotbed.train.loop import Training


class StartOptions(NamedTuple):
    """How a run is started and observed."""

    quiet: bool
    source: Path | None = None
    forecast: bool = False
    watching: WatchOptions = WatchOptions()
    rows: str | None = None  # to watch
    dry_run: bool = False
    as_json: bool = False
    given: frozenset[str] | None = None  # settings that the user chose; the others suit the log. None: all


def train_run(
    config: RunConfig, requested: RunStart | None, ranks: TorchrunRanks, options: StartOptions, compiled: CompileReport
) -> Path:
    """Start or continue a run, train it to the end and print its result; returns its folder."""
    from hotbed.data.dataset import describe
    from hotbed.run.folder import alone, default_run, find_data_or_say, make_run, read_json, write_text
    from hotbed.run.remote_folder import local_copy
    from hotbed.telemetry.trackers import open_trackers
    from hotbed.train.build import build, compare
    from hotbed.train.disk_room import check_room
    from hotbed.train.warm_start import source_of, start_from

    config = with_source(config)
    world = ranks.connect(config.train.device, config.parallel.timeout, config.parallel.bind)
    fresh = default_run(config.model.name, config.data.path)
    start = world.from_first(ranks.start(requested, fresh) if world.is_first else None)
    run_folder, quiet = start.run, options.quiet or not world.is_first
    for choice in (ranks.cores, ranks.placement):
        if choice is not None and not quiet:
            _say(str(choice))
    entries = None if options.source is None or start.resume else source_of(local_copy(options.source), run_folder)
    data = find_data_or_say(config.data.path, run_folder) if start.resume else config.data.path
    dataset = _dataset(data, ranks, world)
    if options.given is not None and not start.resume and not config.follow.source:
        config = suited_config(config, options.given, dataset, (lambda _: None) if quiet else _say)
    compare(config, dataset.fingerprint, world)
    wanted = options.watching if world.is_first else WatchOptions()
    with alone(run_folder) if world.is_first else nullcontext(), open_watchers(wanted, _say) as watchers:
        with nullcontext() if quiet else waiting("building tables and model"):
            world.stage("building tables and model", alone=True)
            trackers = open_trackers(wanted.trackers, run_folder, dataclasses.asdict(config), _say)
            observers = [*_observers(run_folder, quiet, world), *watchers.observers, *trackers]
            built = build(config, dataset, run_folder, observers, world)
            watchers.watch(built.training.learner.tables.clock, built.training.observer.say)
            if options.rows is not None:
                _watch_rows(built.training, options.rows)
            if start.resume:
                built.training.resume()
                if _is_finished(built.training):
                    if not (start.repeats or ranks.has_begun(run_folder)):
                        _refuse_finished(built.training)
                    if world.is_first:  # a rank was lost after the run had ended, or the job is repeated
                        print_result(read_json(run_folder / "summary.json"), run_folder)
                    return run_folder
            if world.is_first:
                check_room(built.training, start.overwrite)
            if options.dry_run:
                if world.is_first:
                    _print_dry_run(built, start, options.as_json)
                return run_folder
            if world.is_first:
                noted = {} if start.resume else {"path": str(dataset.path.resolve()), **describe(dataset)}
                if not start.resume:
                    make_run(run_folder, start.overwrite)
                ranks.begin(run_folder)
                write_text(run_folder / "config.json", config.to_json())
                if not start.resume:
                    write_text(run_folder / "data.json", json.dumps(noted) + "\n")
            world.stage("waiting for the run folder")
            world.any(False)
            carried = None if entries is None else start_from(entries, run_folder, built.training.learner, dataset)
        if carried is not None and not quiet:
            err().print(f"warm start {carried.text()}")
        if world.is_first:
            chosen = options.given is not None and "data.batch_size" not in options.given
            warn_about_few_steps(built.training, config.data.batch_size, chosen=chosen)
            warn_about_one_class(dataset.schema)
            warn_about_no_valid(built.training)
        if options.forecast and world.size == 1 and not config.follow.source:
            print_forecast(config, dataset, run_folder, quiet)
        _run(built, quiet, compiled, options.as_json)
    return run_folder


def _print_dry_run(built: BuiltTraining, start: RunStart, as_json: bool) -> None:
    """What the run would do; settings, data, memory and disk have been checked, and nothing is written."""
    from hotbed.train.disk_room import saves_of

    training = built.training
    if as_json:
        samples, steps = training.loaders.train.num_rows, training.total_steps
        saved = saves_of(training).total
        print_json(
            {"dry_run": True, "run": str(training.run), "samples": samples, "steps": steps, "saved_bytes": saved}
        )
        return
    replaced = ", replacing what is there" if start.overwrite else ""
    out().print(
        f"dry run: {describe_start(built)}{replaced}; {training.total_steps:,} steps, saving {saves_of(training)}. "
        "Nothing was written.",
    )


def _watch_rows(training: Training, text: str) -> None:
    from hotbed.errors import ConfigError
    from hotbed.telemetry.observer import Observers
    from hotbed.train.row_watch import RowWatch, parse_rows

    if training.world.size > 1:
        raise ConfigError(
            "--watch-rows records the gradients of one process; with several ranks, each has only a part of them."
        )
    tables = training.learner.tables
    if training.learner.sequences:
        names = ", ".join(training.learner.sequences)
        raise ConfigError(
            f"--watch-rows records gradients of pooled vectors; this model reads {names} vector by vector. Leave it out, or "
            "watch with a model that pools sequences, such as dnn."
        )
    watch = RowWatch(training.run, tables, parse_rows(text, tables.tables))
    training.learner = dataclasses.replace(training.learner, watch=watch.watch)
    training.observer = Observers([training.observer, watch])


def _say(text: str) -> None:
    err().print(text)


def _dataset(name: str, ranks: TorchrunRanks, world: World) -> Dataset:
    """An embedded dataset is built once on every machine."""
    world.stage("opening the dataset")
    found = open_dataset(name) if ranks.local_rank == 0 else None
    world.any(False)
    return found if found is not None else open_dataset(name)


def _observers(folder: Path, quiet: bool, world: World) -> list[Observer]:
    from hotbed.telemetry.trackers import open_writer

    if not world.is_first:
        return [Warnings(err(always=True), f"rank {world.rank}: ")]
    quiet = quiet and (is_quiet() or not is_log_json())  # --json silences lines for people only
    observers: list[Observer] = [] if quiet else [progress_display(err())]
    tensorboard = open_writer(folder)
    return [*observers, tensorboard] if tensorboard is not None else observers


def _is_finished(training: Training) -> bool:
    """Whether the run has ended and no step is left."""
    from hotbed.run.folder import read_json

    summary = training.run / "summary.json"
    if (
        training.reason_to_end() is None or not summary.is_file()
    ):  # a run killed in its last evaluation has no summary yet
        return False
    ended = read_json(summary)
    return bool(ended.get("finished")) and ended.get("steps") == training.progress.step


def _refuse_finished(training: Training) -> None:
    from hotbed.errors import RunError

    course, pace = training.course, training.pace
    epochs = (
        max(pace.epochs, training.progress.epoch) + 1
    )  # more than --epochs, if a resume asked for fewer than were trained
    if course.patience and training.progress.stale >= course.patience:  # the best weights are kept, whatever follows
        more = f"--set train.patience={training.progress.stale + course.patience}"
        more += f" --epochs {epochs}" if training.progress.epoch >= pace.epochs else ""
    elif pace.max_steps and training.progress.step >= pace.max_steps:
        more = f"--set train.max_steps={2 * pace.max_steps}"
    else:
        more = f"--epochs {epochs}"
    raise RunError(
        f"{training.run} is finished: {training.reason_to_end()}. To train longer: "
        f"`hotbed train --resume {shlex.quote(str(training.run))} {more}`."
    )


def _run(built: BuiltTraining, quiet: bool, compiled: CompileReport, as_json: bool) -> None:
    from hotbed.errors import HotbedError, RunError
    from hotbed.report import write_report
    from hotbed.train.run import run

    folder, speaks = built.training.run, built.training.world.is_first
    if not quiet:
        err().print("\n".join([describe_start(built), *built.subject.label_notes]))
    try:
        with report_parallel_choices(built.training.observer.say):
            ending = run(built.training, built.subject)
    except HotbedError:
        with suppress(RunError):  # report the error that ended the run, not this one
            if speaks:
                write_report(folder)
        raise
    if speaks:
        comparison = compare_forecast(ending.summary, folder, built.training.learner.device)
        if as_json:
            write_report(folder)
            print_json({"dry_run": False, "run": str(folder), **ending.summary})
        else:
            print_result(ending.summary, folder)
        after = next_commands(folder) if ending.summary["finished"] else ""
        more = [one for one in (compiled_text(compiled), comparison, after) if one]
        if more and not quiet:
            out().print("\n".join(more))
    if ending.unsaved:
        raise RunError(ending.unsaved)
    if not ending.summary["finished"]:
        raise typer.Exit(ending.exit_code)
