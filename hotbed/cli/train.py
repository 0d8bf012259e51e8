"""`hotbed train`: from a run file, a few flags and `--set` texts to a run folder with a model and a report page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hotbed.cli import options as opt
from hotbed.cli.console import is_quiet, out, report_compiling
from hotbed.cli.messages import as_run_file
from hotbed.cli.options import local_only
from hotbed.cli.progress import WatchOptions
from hotbed.cli.ranks import RunStart, join_ranks
from hotbed.cli.ray_ranks import train_on_ray
from hotbed.cli.settings import read_config, refuse_idle, resumed_config, settings_of_flags
from hotbed.cli.train_run import StartOptions, train_run
from hotbed.errors import ConfigError
from hotbed.run.run_file import flat_settings, given_settings

if TYPE_CHECKING:
    from hotbed.run.config import RunConfig


def train_command(
    context: typer.Context,
    run_file: opt.RunFile = None,
    data: opt.Data = None,
    model: opt.ModelName = None,
    folder: opt.Out = None,
    device: opt.Device = None,
    epochs: int | None = typer.Option(None, help="Passes over the train split."),
    batch_size: opt.BatchSize = None,
    dim: opt.Dim = None,
    optimizer: opt.RowOptimizer = None,
    lr: float | None = typer.Option(None, help="Learning rate of the rows. Default: depends on the optimizer."),
    dense_lr: float | None = typer.Option(
        None, help="Learning rate of the dense weights. Default: depends on the optimizer."
    ),
    positive_weight: float | None = typer.Option(
        None,
        help="How many times a sample with the label 1 counts in training; predicted probabilities are corrected for it. For "
        "several labels: --set 'train.positive_weight={click: 10, like: 3}'.",
    ),
    cache: opt.CacheShare = None,
    hbm: opt.CacheBytes = None,
    memory: opt.Memory = None,
    ssd: opt.Ssd = None,
    policy: opt.CachePolicy = None,
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
    seed: opt.Seed = None,
    sets: opt.Sets = [],  # noqa: B006  never changed
    resume: Path | None = typer.Option(None, help="Continue this run, as if it had never stopped."),
    auto_resume: bool = typer.Option(
        False,
        "--auto-resume",
        help="Continue the run in --out if it has a checkpoint, else start it there: one command for a job that Slurm or "
        "Kubernetes repeats.",
    ),
    warm_start: Path | None = typer.Option(
        None, "--warm-start", help="Start from the rows and weights of a run or checkpoint that fit this model."
    ),
    follow: str | None = typer.Option(
        None,
        metavar="FOLDER|URI",
        help="Train the files of this folder, local or s3://..., or the messages of kafka://HOST:PORT/TOPIC, each once as they "
        "arrive, instead of the train split. --data is the dataset that says how rows are read.",
    ),
    checkpoint_minutes: float | None = typer.Option(
        None, help="With --follow: minutes between checkpoints. Default: 10."
    ),
    stop_when_idle: float | None = typer.Option(
        None, metavar="SECONDS", help="With --follow: end when nothing has arrived for this long. Default: never."
    ),
    checkpoint_every: int | None = typer.Option(None, help="Steps between checkpoints; 0 saves at the end only."),
    k_step: int | None = typer.Option(
        None,
        min=1,
        help="With torchrun: steps between merges of the dense weights; 1 averages gradients at every step.",
    ),
    merge: str | None = typer.Option(
        None,
        help="What is merged with them: frozen_v, shared_v, moments or params. Default: frozen_v, or params for SGD.",
    ),
    scale_lr: bool | None = typer.Option(
        None, help="Between merges, multiply Adam's steps by the square root of the number of ranks. On by default."
    ),
    overlap: bool | None = typer.Option(None, help="Overlap merges with the next steps. On by default."),
    delay: int | None = typer.Option(None, min=0, help="Steps until such a merge is used; 0, the default: k / 4."),
    across_only: bool | None = typer.Option(
        None, help="Average gradients inside a machine at every step, and merge across machines only."
    ),
    ray: opt.RayCluster = False,
    ranks: opt.Ranks = None,
    restarts: int | None = typer.Option(
        None, min=0, metavar="N", help="With --ray: how often all ranks start again after one is lost. 3 by default."
    ),
    overwrite: opt.Overwrite = False,
    dry_run: opt.DryRun = False,
    read_cache: opt.ReadCache = None,
    forecast: bool = typer.Option(True, help="Print a forecast first, and compare it with the measurement at the end."),
    metrics_port: int | None = typer.Option(
        None, min=0, max=65535, help="Serve the metrics of the log to Prometheus on this port; 0: any free port."
    ),
    metrics_host: str | None = typer.Option(
        None, metavar="HOST", help="Address to listen on. Left out: 127.0.0.1; 0.0.0.0 accepts other machines."
    ),
    track: list[str] = typer.Option(
        [], metavar="NAME", help="Send the metrics of the log to wandb, mlflow or otel too; may be repeated."
    ),
    trace: Path | None = typer.Option(None, help="Write a trace of all threads to this file, for ui.perfetto.dev."),
    trace_steps: str | None = typer.Option(
        None, metavar="FIRST:STOP", help="Steps to trace, e.g. 50:100. Default: 50 steps after the first ten."
    ),
    watch_rows: str | None = typer.Option(
        None, metavar="TABLE=ID,...", help="Record the gradient of these rows at every use, for `hotbed explain`."
    ),
    show: bool = typer.Option(False, "--show", help="Print all settings as a run file and exit."),
    as_json: opt.AsJson = False,
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

    hotbed train --data mydata --out /shared/runs/a --auto-resume --checkpoint-every 1000

    hotbed train --metrics-port 9100 --trace trace.json --trace-steps 50:100

    torchrun --nproc-per-node 2 -m hotbed train --out runs/two

    torchrun --nproc-per-node 4 -m hotbed train --k-step 16 --out runs/merged

    hotbed train --ray --ranks 8 --out /shared/runs/eight

    hotbed train --data clicks --follow logs/ --warm-start runs/wide --out runs/live

    hotbed train --warm-start runs/wide --data new-clicks --set tables.optimizer=adam --out runs/next
    """
    from hotbed.files import is_remote, shown_path
    from hotbed.files.settings import set_read_cache
    from hotbed.run.remote_run import how_to_continue, working_copy

    given = settings_of_flags(
        data=data, model=model, device=device, epochs=epochs, batch_size=batch_size, dim=dim, optimizer=optimizer, lr=lr,
        dense_lr=dense_lr, positive_weight=positive_weight, seed=seed, cache=cache, hbm=hbm, memory=memory, ssd=ssd,
        policy=policy, dynamic=dynamic, admit=admit, expire=expire, checkpoint_every=checkpoint_every, follow=follow,
        checkpoint_minutes=checkpoint_minutes, stop_when_idle=stop_when_idle, k_step=k_step, merge=merge,
        scale_lr=scale_lr, overlap=overlap, delay=delay, across_only=across_only,
    )  # fmt: skip
    if show:
        typer.echo(as_run_file(read_config(run_file, given, sets)), nl=False)
        return
    if ray:
        on_gpu = None if resume else _asks_for_gpu(read_config(run_file, given, sets))
        raise typer.Exit(train_on_ray(context.obj, ranks, 3 if restarts is None else restarts, on_gpu))
    if ranks is not None:
        raise ConfigError(
            f"--ranks {ranks} belongs to --ray. With torchrun: torchrun --nproc-per-node {ranks} -m hotbed train"
        )
    if restarts is not None:
        raise ConfigError(f"--restarts {restarts} belongs to --ray. torchrun has --max-restarts.")
    quiet = is_quiet() or as_json
    watching = WatchOptions(metrics_port, metrics_host, trace, trace_steps, tuple(track))
    watching.check()
    local_only(trace=trace)
    set_read_cache(read_cache)
    if auto_resume:
        if folder is None or resume is not None or overwrite:
            raise ConfigError(
                "--auto-resume continues or starts the run in --out: give --out, no --resume, no --overwrite."
            )
        is_there, overwrite = how_to_continue(folder)
        folder, resume = (None, folder) if is_there else (folder, None)
    place = resume or folder
    copying = working_copy(place, resume=resume is not None, overwrite=overwrite, dry_run=dry_run)
    with join_ranks() as world, copying as here:
        folder, resume = (here, None) if resume is None else (folder, here)
        if resume is None:
            start = None if folder is None else RunStart(folder, overwrite=overwrite)
            config = read_config(run_file, given, sets)
            settings = given_settings(run_file, given, sets)
            options = StartOptions(quiet, warm_start, forecast, watching, watch_rows, dry_run, as_json, settings)
        else:
            refused = {"RUNFILE": run_file, "--out": folder, "--overwrite": overwrite, "--warm-start": warm_start}
            chosen = given
            if auto_resume:
                read_config(run_file, given, sets)  # names all mistakes
                chosen, sets, refused = flat_settings(run_file, given, sets)[0], [], {}
            options = StartOptions(quiet, watching=watching, rows=watch_rows, dry_run=dry_run, as_json=as_json)
            config, start = resumed_config(resume, chosen, sets, refused), RunStart(resume, True, repeats=auto_resume)
        refuse_idle(config, given)
        with report_compiling(quiet or world.rank > 0) as compiled:
            train_run(config, start, world, options, compiled)
    if place is not None and is_remote(place) and world.rank == 0:
        out().print(f"the run is in {shown_path(place)}")


def _asks_for_gpu(config: RunConfig) -> bool | None:
    """Whether the run needs a GPU; None: it uses one if there is one."""
    return None if config.train.device == "auto" else config.train.device.startswith("cuda")
