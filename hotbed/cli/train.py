"""`hotbed train`: from a run file, a few flags and `--set` texts to a run folder with a model and a report page."""

from __future__ import annotations

import dataclasses
import json
import shlex
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from hotbed.cli.console import compiled_text, err, is_quiet, out, print_json, report_compiling, waiting
from hotbed.cli.messages import (
    as_run_file,
    compare_forecast,
    describe_start,
    next_commands,
    print_forecast,
    print_result,
    report_parallel_choices,
    warn_about_few_steps,
    warn_about_no_valid,
)
from hotbed.cli.options import (
    AsJson,
    BatchSize,
    CacheBytes,
    CachePolicy,
    CacheShare,
    Data,
    Device,
    Dim,
    DryRun,
    Memory,
    ModelName,
    Out,
    Overwrite,
    Ranks,
    RayCluster,
    ReadCache,
    RowOptimizer,
    RunFile,
    Seed,
    Sets,
    Ssd,
)
from hotbed.cli.progress import Warnings, WatchOptions, open_watchers, progress_display
from hotbed.cli.ranks import RunStart, TorchrunRanks, join_ranks
from hotbed.cli.ray_ranks import train_on_ray
from hotbed.cli.settings import cache_flags, open_dataset, read_config, resumed_config, suited_config, with_source
from hotbed.errors import ConfigError
from hotbed.run.run_file import given_settings

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.host.compiling import CompileReport
    from hotbed.parallel.world import World
    from hotbed.run.config import RunConfig
    from hotbed.telemetry.observer import Observer
    from hotbed.train.build import Built
    from hotbed.train.loop import Training


def train_command(
    context: typer.Context,
    run_file: RunFile = None,
    data: Data = None,
    model: ModelName = None,
    folder: Out = None,
    device: Device = None,
    epochs: int | None = typer.Option(None, help="Passes over the train split."),
    batch_size: BatchSize = None,
    dim: Dim = None,
    optimizer: RowOptimizer = None,
    lr: float | None = typer.Option(None, help="Learning rate of the rows. Left out: the optimizer's default."),
    dense_lr: float | None = typer.Option(None, help="Learning rate of the dense weights. Left out: the default."),
    cache: CacheShare = None,
    hbm: CacheBytes = None,
    memory: Memory = None,
    ssd: Ssd = None,
    policy: CachePolicy = None,
    dynamic: bool | None = typer.Option(
        None,
        "--dynamic",
        help="No vocabularies: any 64-bit id gets a row when it is first trained. "
        "For some features only: --set 'tables.dynamic=\\[user, ad]'.",
    ),
    admit: str | None = typer.Option(
        None,
        metavar="RULE",
        help="Which dynamic ids get a row; all others of a table share one. 'after 3': at the third occurrence. "
        "'after 3, sketch 64MiB': counted approximately, in that much memory. 'probability 0.1': at each occurrence "
        "with that probability.",
    ),
    expire: str | None = typer.Option(
        None,
        metavar="RULE",
        help="When dynamic ids lose their row: 'unused 100000 steps', 'unused 7d', or 'score below 0.5, half-life 10000', "
        "a decaying count of uses. ', every 500' sets how often to check, in steps.",
    ),
    seed: Seed = None,
    sets: Sets = [],  # noqa: B006  never changed
    resume: Path | None = typer.Option(None, help="Continue this run, as if it had never stopped."),
    warm_start: Path | None = typer.Option(
        None, "--warm-start", help="Start from the rows and weights of a run or checkpoint that fit this model."
    ),
    follow: str | None = typer.Option(
        None,
        metavar="FOLDER",
        help="Train the files of this folder as they arrive, each once, instead of the train split. --data is the dataset "
        "that says how their rows are read.",
    ),
    checkpoint_minutes: float | None = typer.Option(
        None, help="With --follow: minutes between checkpoints. 10 by default."
    ),
    stop_when_idle: float | None = typer.Option(
        None, metavar="SECONDS", help="With --follow: end when nothing has arrived for so long. Left out: never."
    ),
    checkpoint_every: int | None = typer.Option(None, help="Steps between checkpoints; 0 saves at the end only."),
    k_step: int | None = typer.Option(
        None,
        min=1,
        help="With torchrun: steps between merges of the dense weights; 1 averages gradients at every step.",
    ),
    merge: str | None = typer.Option(
        None,
        help="What is merged with them: frozen_v, shared_v, moments or params. Left out: frozen_v; for SGD params.",
    ),
    scale_lr: bool | None = typer.Option(
        None, help="Between merges, multiply Adam's steps by the square root of the number of ranks. On by default."
    ),
    overlap: bool | None = typer.Option(None, help="Overlap merges with the next steps. On by default."),
    delay: int | None = typer.Option(None, min=0, help="Steps until such a merge is used; 0, the default, is k / 4."),
    across_only: bool | None = typer.Option(
        None, help="Average gradients inside a machine at every step, and merge across machines only."
    ),
    ray: RayCluster = False,
    ranks: Ranks = None,
    restarts: int = typer.Option(3, min=0, help="With --ray: how often all ranks start again after one is lost."),
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    read_cache: ReadCache = None,
    forecast: bool = typer.Option(True, help="Print a forecast first, and compare it with the measurement at the end."),
    metrics_port: int | None = typer.Option(
        None, min=0, max=65535, help="Serve the metrics of the log to Prometheus on this port; 0: any free port."
    ),
    metrics_host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 accepts other machines."),
    track: list[str] = typer.Option(
        [], metavar="NAME", help="Send the metrics of the log to wandb, mlflow or otel too; may be repeated."
    ),
    trace: Path | None = typer.Option(None, help="Write a trace of all threads to this file, for ui.perfetto.dev."),
    trace_steps: str | None = typer.Option(
        None, metavar="FIRST:STOP", help="Steps to trace, e.g. 50:100. Left out: 50 steps after the first ten."
    ),
    watch_rows: str | None = typer.Option(
        None, metavar="TABLE=ID,...", help="Record the gradient of these rows at every use, for `hotbed explain`."
    ),
    show: bool = typer.Option(False, "--show", help="Print all settings as a run file and exit."),
    as_json: AsJson = False,
) -> None:
    r"""Train a model. Without arguments: the default model on the embedded click log.

    Everything is written to a run folder: --out, or runs/MODEL-DATA-N. --memory is for the rows below the cache.
    A setting that is left out is that of the run file, else the default of docs/configuration.md; the optimizer of the
    dense weights is dense.optimizer. Ctrl-C saves and prints how to resume.

    [bold]For example:[/bold]

    hotbed train

    hotbed train --data adult --model dcnv2 --epochs 5

    hotbed train --cache 1.5%

    hotbed train --data mydata --batch-size 64 --cache 90%

    hotbed train --memory 32MiB --ssd /tmp/rows:1GiB

    hotbed train --dynamic --admit "after 3" --expire "unused 100000 steps" --hbm 1GiB

    hotbed train run.yaml --set model.dim=32 --set model.options.dropout=0.2 --out runs/wide

    hotbed train --resume runs/wide

    hotbed train --metrics-port 9100 --trace trace.json --trace-steps 50:100

    torchrun --nproc-per-node 2 -m hotbed train --out runs/two

    torchrun --nproc-per-node 4 -m hotbed train --k-step 16 --out runs/merged

    hotbed train --ray --ranks 8 --out /shared/runs/eight

    hotbed train --data clicks --follow logs/ --warm-start runs/wide --out runs/live

    hotbed train --warm-start runs/wide --data new-clicks --set tables.optimizer=adam --out runs/next
    """
    from hotbed.files import is_remote, shown_path
    from hotbed.files.settings import set_read_cache
    from hotbed.run.remote_run import working_copy

    flags = {
        "data.path": data,
        "model.name": model,
        "train.device": device,
        "train.epochs": epochs,
        "data.batch_size": batch_size,
        "model.dim": dim,
        "tables.optimizer": optimizer,
        "tables.lr": lr,
        "dense.lr": dense_lr,
        "train.seed": seed,
        **cache_flags(cache, hbm),
        "tables.memory": memory,
        "tables.ssd": ssd,
        "tables.policy": policy,
        "tables.dynamic": dynamic,
        "tables.admit": admit,
        "tables.expire": expire,
        "train.checkpoint_every": checkpoint_every,
        "follow.source": follow,
        "follow.checkpoint_minutes": checkpoint_minutes,
        "follow.idle_seconds": stop_when_idle,
        "parallel.k_step": k_step,
        "parallel.merge": merge,
        "parallel.scale_lr": scale_lr,
        "parallel.overlap": overlap,
        "parallel.delay": delay,
        "parallel.across_only": across_only,
    }
    given = {path: value for path, value in flags.items() if value is not None}
    if show:
        typer.echo(as_run_file(read_config(run_file, given, sets)), nl=False)
        return
    if ray:
        on_gpu = None if resume else _asks_for_gpu(read_config(run_file, given, sets))
        raise typer.Exit(train_on_ray(context.obj, ranks, restarts, on_gpu))
    if ranks is not None:
        raise ConfigError(
            f"--ranks {ranks} belongs to --ray. With torchrun: torchrun --nproc-per-node {ranks} -m hotbed train"
        )
    quiet = is_quiet() or as_json
    watching = WatchOptions(metrics_port, metrics_host, trace, trace_steps, tuple(track))
    watching.check()
    set_read_cache(read_cache)
    place = resume or folder
    with join_ranks() as world, working_copy(place, resume=resume is not None, overwrite=overwrite) as here:
        folder, resume = (here, None) if resume is None else (folder, here)
        if resume is None:
            asked = None if folder is None else RunStart(folder, overwrite=overwrite)
            config = read_config(run_file, given, sets)
            settings = given_settings(run_file, given, sets)
            manner = StartOptions(quiet, warm_start, forecast, watching, watch_rows, dry_run, as_json, settings)
        else:
            refused = {"RUNFILE": run_file, "--out": folder, "--overwrite": overwrite, "--warm-start": warm_start}
            manner = StartOptions(quiet, watching=watching, rows=watch_rows, dry_run=dry_run, as_json=as_json)
            config, asked = resumed_config(resume, given, sets, refused), RunStart(resume, resume=True)
        with report_compiling(quiet or world.rank > 0) as compiled:
            train_run(config, asked, world, manner, compiled)
    if place is not None and is_remote(place) and world.rank == 0:
        out().print(f"the run is in {shown_path(place)}", soft_wrap=True)


def _asks_for_gpu(config: RunConfig) -> bool | None:
    """None: if there is one."""
    return None if config.train.device == "auto" else config.train.device.startswith("cuda")


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
    config: RunConfig, asked: RunStart | None, ranks: TorchrunRanks, manner: StartOptions, compiled: CompileReport
) -> Path:
    """Start or continue a run, train it to the end and print its result; returns its folder."""
    from hotbed.data.dataset import describe
    from hotbed.run.files import write_text
    from hotbed.run.folder import alone, default_run, find_data_or_say, make_run, read_json
    from hotbed.run.remote_folder import local_copy
    from hotbed.telemetry.trackers import open_trackers
    from hotbed.train.build import build, compare
    from hotbed.train.disk_room import check_room
    from hotbed.train.warm_start import source_of, start_from

    config = with_source(config)
    world = ranks.connect(config.train.device, config.parallel.timeout)
    fresh = default_run(config.model.name, config.data.path)
    start = world.from_first(ranks.start(asked, fresh) if world.is_first else None)
    run_folder, quiet = start.run, manner.quiet or not world.is_first
    if ranks.cores is not None and not quiet:
        _say(str(ranks.cores))
    entries = None if manner.source is None or start.resume else source_of(local_copy(manner.source), run_folder)
    data = find_data_or_say(config.data.path, run_folder) if start.resume else config.data.path
    dataset = _dataset(data, ranks, world)
    if manner.given is not None and not start.resume and not config.follow.source:
        config = suited_config(config, manner.given, dataset, (lambda _: None) if quiet else _say)
    compare(config, dataset.fingerprint, world)
    wanted = manner.watching if world.is_first else WatchOptions()
    with alone(run_folder) if world.is_first else nullcontext(), open_watchers(wanted, _say) as watchers:
        with nullcontext() if quiet else waiting("building tables and model"):
            world.stage("building tables and model", alone=True)
            trackers = open_trackers(wanted.trackers, run_folder, dataclasses.asdict(config), _say)
            observers = [*_observers(run_folder, quiet, world), *watchers.observers, *trackers]
            built = build(config, dataset, run_folder, observers, world)
            watchers.watch(built.training.learner.tables.clock, built.training.observer.say)
            if manner.rows is not None:
                _watch_rows(built.training, manner.rows)
            if start.resume:
                built.training.resume()
                if _is_finished(built.training):
                    if not ranks.has_begun(run_folder):
                        _refuse_finished(built.training)
                    if world.is_first:  # a rank was lost after the run had ended
                        print_result(read_json(run_folder / "summary.json"), run_folder)
                    return run_folder
            if world.is_first:
                check_room(built.training, start.overwrite)
            if manner.dry_run:
                if world.is_first:
                    _print_dry_run(built, start, manner.as_json)
                return run_folder
            if world.is_first:
                if not start.resume:
                    make_run(run_folder, start.overwrite)
                ranks.begin(run_folder)
                write_text(run_folder / "config.json", config.to_json())
                if not start.resume:
                    noted = {"path": str(dataset.path.resolve()), **describe(dataset)}
                    write_text(run_folder / "data.json", json.dumps(noted) + "\n")
            world.stage("waiting for the run folder")
            world.any(False)
            carried = None if entries is None else start_from(entries, run_folder, built.training.learner, dataset)
        if carried is not None and not quiet:
            err().print(f"warm start {carried.text()}", soft_wrap=True)
        if world.is_first:
            warn_about_few_steps(built.training, config.data.batch_size)
            warn_about_no_valid(built.training)
        if manner.forecast and world.size == 1 and not config.follow.source:
            print_forecast(config, dataset, run_folder, quiet)
        _run(built, quiet, compiled, manner.as_json)
    return run_folder


def _print_dry_run(built: Built, start: RunStart, as_json: bool) -> None:
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
        soft_wrap=True,
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
    err().print(text, soft_wrap=True)


def _dataset(name: str, ranks: TorchrunRanks, world: World) -> Dataset:
    """An embedded dataset is built once on every machine."""
    world.stage("opening the dataset")
    found = open_dataset(name) if ranks.local_rank == 0 else None
    world.any(False)
    return found if found is not None else open_dataset(name)


def _observers(folder: Path, quiet: bool, world: World) -> list[Observer]:
    from hotbed.telemetry.scalars import open_writer

    if not world.is_first:
        return [Warnings(err(always=True), f"rank {world.rank}: ")]
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

    raise RunError(
        f"{training.run} is finished: {training.reason_to_end()}. To train longer: "
        f"`hotbed train --resume {shlex.quote(str(training.run))} --epochs {training.pace.epochs + 1}`."
    )


def _run(built: Built, quiet: bool, compiled: CompileReport, as_json: bool) -> None:
    from hotbed.errors import HotbedError, RunError
    from hotbed.report import write_report
    from hotbed.train.run import run

    folder, speaks = built.training.run, built.training.world.is_first
    if not quiet:
        err().print(describe_start(built), soft_wrap=True)
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
            out().print("\n".join(more), soft_wrap=True)
    if ending.unsaved:
        raise RunError(ending.unsaved)
    if not ending.summary["finished"]:
        raise typer.Exit(ending.exit_code)
