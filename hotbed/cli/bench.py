"""`hotbed bench`: the embedding step and the whole training step, compared with FBGEMM and torch on the same ids."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli.console import err, out
from hotbed.cli.options import Device
from hotbed.host.memory import percent_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.table import Table

    from hotbed.bench.results import Result
    from hotbed.bench.run import Skip
    from hotbed.bench.workload import Setting

_WIDE = 170  # columns of a table that goes to a file


class _Usual(NamedTuple):
    """Values of options that are left out."""

    dim: str
    dense: str
    batch: int
    cache: float
    warmup: int
    rows_scale: float


_ON_GPU = _Usual("128", "0,1024", 16384, 0.015, 80, 1.0)
_ON_CPU = _Usual("16", "0,128", 4096, 0.05, 20, 0.1)


def _option(name: str, about: str) -> Any:
    default = f"[dim]\\[default: {getattr(_ON_GPU, name)}; on the CPU {getattr(_ON_CPU, name)}][/dim]"
    return typer.Option(None, help=f"{about} {default}", show_default=False)


def bench_command(
    systems: str = typer.Option("", help="By comma; left out: all that run on this device (listed above)."),
    dim: str | None = _option("dim", "Row widths, by comma."),
    optimizer: str = typer.Option("rowwise_adagrad", help="rowwise_adagrad, adam, adagrad, sgd, by comma."),
    dense: str | None = _option(
        "dense",
        "Width of the 4-layer bf16 MLP behind the lookup, by comma: a whole training step. 0: the embedding step alone, "
        "with a given gradient.",
    ),
    batch: int | None = _option("batch", "Samples of a step."),
    cache: float | None = _option("cache", "Share of the rows on the device, where there is a cache."),
    steps: int = typer.Option(100, help="Timed steps, rounded up to groups of ten."),
    warmup: int | None = _option("warmup", "Steps before them."),
    policy: str | None = typer.Option(None, help="hotbed's cache policy; left out: its default."),
    window: int | None = typer.Option(None, help="Batches hotbed fetches together; left out: chosen by hotbed."),
    look_ahead: int | None = typer.Option(None, help="Batches whose ids hotbed reads ahead; left out: its default."),
    warm_store: bool = typer.Option(
        False,
        "--warm-store",
        help="Write every row to hotbed's store first: no first-time rows, the steady state of a long run.",
    ),
    rows_scale: float | None = _option("rows_scale", "Table sizes as a share of Criteo-Kaggle's 33.76 M rows."),
    device: Device = "auto",
    csv: Path | None = typer.Option(None, help="Append one row per result to this file, each as soon as it is known."),
) -> None:
    """Time hotbed's training step, compared with FBGEMM and torch on the same ids.

    26 tables with Criteo-Kaggle's cardinalities, one Zipf 1.05 id per feature.
    Every system first trains small tables and must reach what float64 arithmetic
    reaches; one that does not is not timed. Then each is built, warmed up, timed
    (wall clock, median over groups of ten steps) and freed. Ratios are to FBGEMM
    with every row on the device: below 1 is faster.

    [bold]Systems:[/bold] hotbed-hbm (every row on the device), hotbed-cached (a cache
    under hotbed.prefetch), hotbed-cached-plain (the same cache in a plain loop),
    torch (nn.EmbeddingBag, sparse gradients), fbgemm-hbm, fbgemm-lru-managed,
    fbgemm-lru-mapped, fbgemm-lfu-mapped, fbgemm-lru-managed-prefetch (its caches),
    fbgemm-cpu. A peer that is not installed is left out.

    [bold]For example:[/bold]

    hotbed bench

    hotbed bench --systems fbgemm-hbm,hotbed-cached --dim 128,64,32 --csv bench.csv

    hotbed bench --optimizer rowwise_adagrad,adam --cache 0.05 --warm-store

    hotbed bench --device cpu --rows-scale 1 --systems fbgemm-cpu,hotbed-hbm
    """
    from hotbed.run.config import raise_problems

    with err().status("loading torch"):
        from hotbed.bench.systems import choose_systems
        from hotbed.bench.workload import Setting, scaled_rows
        from hotbed.host.devices import pick_device
    on = pick_device(device)
    usual = _ON_CPU if on.type == "cpu" else _ON_GPU
    asked = (
        _words(usual.dim if dim is None else dim),
        _words(optimizer),
        _words(usual.dense if dense is None else dense),
    )
    base = Setting(
        device=on,
        dim=0,
        batch=usual.batch if batch is None else batch,
        optimizer="",
        dense=0,
        cache=usual.cache if cache is None else cache,
        policy=policy,
        window=window,
        look_ahead=look_ahead,
        warm_store=warm_store,
        steps=steps,
        warmup=usual.warmup if warmup is None else warmup,
    )
    scale = usual.rows_scale if rows_scale is None else rows_scale
    raise_problems([*_wrong_lists(*asked), *_wrong_values(base, scale)])
    base = replace(base, steps=-(-steps // 10) * 10, rows=scaled_rows(scale))
    dims, optimizers, denses = asked
    settings = [
        replace(base, optimizer=name, dim=int(d), dense=int(w))
        for name, d, w in itertools.product(optimizers, dims, denses)
    ]
    if _report(settings, choose_systems(_words(systems), on), csv):
        raise typer.Exit(1)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _wrong_lists(dims: list[str], optimizers: list[str], denses: list[str]) -> Iterator[str]:
    from hotbed.bench.workload import OPTIMIZERS

    for option, words, least in (("--dim", dims, 1), ("--dense", denses, 0)):
        bad = [word for word in words if not word.isdecimal() or int(word) < least]
        if bad or not words:
            yield f"{option} takes whole numbers from {least} by comma, not {', '.join(bad) or 'nothing'}"
    unknown = [name for name in optimizers if name not in OPTIMIZERS]
    if unknown or not optimizers:
        yield f"--optimizer is one or more of {', '.join(OPTIMIZERS)}, not {', '.join(unknown) or 'nothing'}"


def _wrong_values(setting: Setting, rows_scale: float) -> Iterator[str]:
    from hotbed.cache import POLICIES
    from hotbed.run.config import MOST_AHEAD, MOST_WINDOW

    most = {"window": MOST_WINDOW, "look_ahead": MOST_AHEAD}

    if setting.policy is not None and setting.policy not in POLICIES:
        yield f"--policy is one of {', '.join(POLICIES)}, not {setting.policy}"
    for name in ("batch", "steps", "warmup", "window", "look_ahead"):
        value = getattr(setting, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} must be at least 1, not {value}"
        if name in most and value is not None and value > most[name]:
            yield f"--{name.replace('_', '-')} is at most {most[name]}, not {value}"
    for option, share in (("--cache", setting.cache), ("--rows-scale", rows_scale)):
        if not 0 < share <= 1:
            yield f"{option} is a share, above 0 and at most 1, not {share}{percent_hint(share)}"


def _report(settings: list[Setting], systems: list[str], csv: Path | None) -> bool:
    """Run, print and write; whether a system was wrong or broke."""
    from hotbed.bench.results import CsvFile, columns, environment
    from hotbed.bench.run import Skip, run

    device = settings[0].device
    file = None if csv is None else CsvFile(csv, [*columns(settings[0]), *environment(device)])
    told: set[str] = set()
    faults = False
    outcomes = run(settings, systems)
    for setting, group in itertools.groupby(outcomes, key=lambda outcome: outcome.setting):
        results: list[Result] = []
        for outcome in group:
            if isinstance(outcome, Skip):
                faults |= outcome.is_fault
                _tell(outcome, told)
                continue
            results.append(outcome)
            err().print(f"{outcome.system}, {_title(setting)}: {outcome.ms:.3f} ms a step", soft_wrap=True)
            if file is not None:
                file.add({**outcome.row(), **environment(device)})
        if results:
            _print(_table(setting, results))
    out().print(", ".join(f"{name} {value}" for name, value in environment(device).items() if value), soft_wrap=True)
    return faults


def _tell(skip: Skip, told: set[str]) -> None:
    """A line for what was skipped and the trace of what broke, once where they are the same for all settings."""
    peer = skip.reason.startswith("fbgemm_gpu:")
    line = f"{skip.reason}, skipped" if peer else f"{skip.system}, {_title(skip.setting)}: skipped, {skip.reason}"
    for text in (line, skip.trace):
        if text and text not in told:
            told.add(text)
            err().print(text, soft_wrap=True)


def _title(setting: Setting) -> str:
    behind = f"MLP {setting.dense}" if setting.dense else "embedding step"
    return f"{setting.optimizer}, dim {setting.dim}, batch {setting.batch:,}, {behind}"


def _print(table: Table) -> None:
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(table)
    console.file.flush()  # a run that is cut off later keeps this table


def _table(setting: Setting, results: Iterable[Result]) -> Table:
    from rich.table import Table

    share = f"{100 * setting.cache:g} % cached of {sum(setting.rows):,} rows"
    table = Table(title=f"{_title(setting)}, {share}", title_justify="left")
    table.add_column("system", no_wrap=True)
    headings = ["ms p50", "p20 to p80", "samples/s", "to FBGEMM", "device GiB", "GB/s", "of copy"]
    for heading in [*headings, "hits", "misses", "created", "written", "window", "stall"]:
        table.add_column(heading, justify="right")
    for result in results:
        row, counts = result.row(), result.timing.counts_per_step
        table.add_row(
            result.system,
            f"{result.ms:.3f}",
            f"{row['ms_p20']:.3f} {row['ms_p80']:.3f}",
            f"{result.samples_per_s:,.0f}",
            _shown(result.ratio, "{:.2f}x"),
            str(row["peak_gib"]) or "-",
            _shown(result.bytes_per_s, "{:,.0f}", 1e9),
            _shown(result.bytes_per_s, "{:.0%}", result.copy_speed),
            *(_shown(counts.get(name), "{:,.0f}") for name in ("hits", "misses", "created", "written_back")),
            f"{1 / counts['windows']:.1f}" if counts.get("windows") else "-",
            _shown(result.timing.stall_share, "{:.1%}"),
        )
    return table


def _shown(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value / unit)
