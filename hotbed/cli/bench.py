"""`hotbed bench`: the embedding step and the whole training step, compared with FBGEMM and torch on the same ids."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli.console import err
from hotbed.cli.options import Device
from hotbed.host.memory import percent_hint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotbed.bench.setting import Setting


class _Usual(NamedTuple):
    """Values of options that are left out; where ids come in bags, `batch` and `cache` are those of bags."""

    dim: str
    dense: str
    batch: str
    cache: str
    warmup: int
    rows_scale: float
    bags: tuple[int, str]  # batch, cache


_ON_GPU = _Usual("128", "0,1024", "16384", "0.015", 80, 1.0, (4096, "0.05"))
_ON_CPU = _Usual("16", "0,128", "4096", "0.05", 20, 0.1, (1024, "0.1"))


def _option(name: str, about: str, bags: str = "") -> Any:
    on_gpu, on_cpu = getattr(_ON_GPU, name), getattr(_ON_CPU, name)
    default = f"[dim]\\[default: {on_gpu}; on the CPU {on_cpu}{bags}][/dim]"
    return typer.Option(None, help=f"{about} {default}", show_default=False)


def bench_command(
    systems: str = typer.Option("", help="By comma; left out: all that run on this device (listed above)."),
    ids: str = typer.Option(
        "single",
        help="What a sample holds, by comma. single: one id of every feature. bags: as many as MLPerf's multi-hot Criteo, 214. "
        "varying: bags of 0 to twice as many. dynamic: single 64-bit ids in tables without a number of rows.",
    ),
    dim: str | None = _option("dim", "Row widths, by comma."),
    optimizer: str = typer.Option("rowwise_adagrad", help="rowwise_adagrad, adam, adagrad, sgd, by comma."),
    dense: str | None = _option(
        "dense",
        "Width of the 4-layer bf16 MLP behind the lookup, by comma: a whole training step. 0: the embedding step alone, "
        "with a given gradient.",
    ),
    output: str = typer.Option("stack", help="Form of hotbed's vectors, by comma: stack, concat, dict."),
    batch: int | None = _option("batch", "Samples of a step.", "; with bags 4096 and 1024"),
    cache: str | None = _option(
        "cache",
        "Share of the rows on the device, where there is a cache. Several by comma are a sweep, which is drawn at the end.",
        "; with bags 0.05 and 0.1",
    ),
    ssd: float | None = typer.Option(
        None,
        help="Share of the rows that memory holds below hotbed's cache; the others are on an ssd. Left out: all in memory.",
    ),
    ssd_folder: Path | None = typer.Option(
        None,
        help="Where that ssd is: files are made there and removed again. Left out: the folder for temporary files.",
    ),
    ranks: int = typer.Option(
        0,
        help="Processes that hotbed's rows and every batch are spread over, on this machine: over Gloo on a CPU or a GPU that "
        "they share, else NCCL. 1: ranks' own code in one process. 0: no ranks. Peers stay as they are.",
    ),
    cold: bool = typer.Option(
        False,
        "--cold",
        help="Start with empty stores: rows seen for the first time are created on the device instead of copied. Left out: "
        "every row is written beforehand, the steady state of a long run.",
    ),
    zipf: float = typer.Option(1.05, help="Exponent of the ids' frequencies; smaller means more misses. Not 1."),
    steps: int = typer.Option(100, help="Timed steps, rounded up to groups of ten."),
    warmup: int | None = _option("warmup", "Steps before them."),
    policy: str | None = typer.Option(None, help="hotbed's cache policy; left out: its default."),
    window: int | None = typer.Option(None, help="Batches hotbed fetches together; left out: chosen by hotbed."),
    look_ahead: int | None = typer.Option(None, help="Batches whose ids hotbed reads ahead; left out: its default."),
    rows_scale: float | None = _option("rows_scale", "Table sizes as a share of Criteo-Kaggle's 33.76 M rows."),
    device: Device = "auto",
    csv: Path | None = typer.Option(None, help="Append one row per result to this file, each as soon as it is known."),
) -> None:
    """Time hotbed's training step, compared with FBGEMM and torch on the same ids.

    26 tables with Criteo-Kaggle's cardinalities, Zipf ids, every row written
    before the clock starts. Every system first trains small tables and must reach
    what float64 arithmetic reaches; one that does not is not timed. Then each is
    built, warmed up, timed (wall clock, median over groups of ten steps; on a GPU
    also how long it works in a step) and freed. Ratios are to FBGEMM with every
    row on the device: below 1 is faster.

    [bold]Systems:[/bold] hotbed-hbm (every row on the device), hotbed-cached (a cache
    under hotbed.prefetch), hotbed-cached-plain (the same cache in a plain loop),
    torch (nn.EmbeddingBag, sparse gradients), fbgemm-hbm, fbgemm-lru-managed,
    fbgemm-lru-mapped, fbgemm-lfu-mapped, fbgemm-lru-managed-prefetch (its caches),
    fbgemm-cpu. A peer that is not installed is left out.

    [bold]For example:[/bold]

    hotbed bench

    hotbed bench --systems fbgemm-hbm,hotbed-cached --dim 128,64,32 --csv bench.csv

    hotbed bench --ids bags,varying --systems fbgemm-hbm,fbgemm-lru-managed,hotbed-hbm,hotbed-cached

    hotbed bench --systems fbgemm-hbm,hotbed-cached --dense 0 --cache 0.005,0.015,0.05

    hotbed bench --systems hotbed-hbm,hotbed-cached --output stack,concat,dict --dense 0

    hotbed bench --systems hotbed-cached --ssd 0.1 --ssd-folder /fast --dim 64

    hotbed bench --systems hotbed-cached --ranks 2

    hotbed bench --device cpu --rows-scale 1 --systems fbgemm-cpu,hotbed-hbm
    """
    from hotbed.run.config import raise_problems

    with err().status("loading torch"):
        from hotbed.bench.setting import Setting, scaled_rows
        from hotbed.bench.systems import choose_systems
        from hotbed.cli.bench_report import report
        from hotbed.host.devices import pick_device
    on = pick_device(device)
    usual = _ON_CPU if on.type == "cpu" else _ON_GPU
    lists = _Lists(*map(_words, (ids, output, optimizer, dim or usual.dim, usual.dense if dense is None else dense)))
    base = Setting(
        device=on,
        batch=int(usual.batch) if batch is None else batch,
        zipf=zipf,
        ssd=ssd,
        ssd_folder="" if ssd_folder is None else str(ssd_folder),
        ranks=ranks,
        cold=cold,
        policy=policy,
        window=window,
        look_ahead=look_ahead,
        steps=steps,
        warmup=usual.warmup if warmup is None else warmup,
    )
    scale = usual.rows_scale if rows_scale is None else rows_scale
    raise_problems([*_wrong_lists(lists), *_wrong_values(base, lists.ids), *_wrong_shares(cache, ssd, scale)])
    base = replace(base, steps=-(-steps // 10) * 10, rows=scaled_rows(scale))
    settings = []
    for kind in lists.ids:
        in_bags = kind in ("bags", "varying")
        size = usual.bags[0] if in_bags and batch is None else base.batch
        shares = _words(cache or (usual.bags[1] if in_bags else usual.cache))
        settings += _settings(replace(base, ids=kind, batch=size), lists, shares)
    if report(settings, choose_systems(_words(systems), on), csv):
        raise typer.Exit(1)


class _Lists(NamedTuple):
    """Options of several values."""

    ids: list[str]
    outputs: list[str]
    optimizers: list[str]
    dims: list[str]
    denses: list[str]


def _settings(base: Setting, lists: _Lists, shares: Sequence[str]) -> list[Setting]:
    """All combinations, those that differ in the cache alone one after the other."""
    every = itertools.product(lists.outputs, lists.optimizers, lists.dims, lists.denses, shares)
    return [
        replace(base, output=output, optimizer=optimizer, dim=int(dim), dense=int(dense), cache=float(share))
        for output, optimizer, dim, dense, share in every
    ]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _wrong_lists(lists: _Lists) -> Iterator[str]:
    from hotbed.bench.setting import IDS, OPTIMIZERS, OUTPUTS

    for option, words, least in (("--dim", lists.dims, 1), ("--dense", lists.denses, 0)):
        bad = [word for word in words if not word.isdecimal() or int(word) < least]
        if bad or not words:
            yield f"{option} takes whole numbers from {least} by comma, not {', '.join(bad) or 'nothing'}"
    named = (
        ("--ids", lists.ids, IDS),
        ("--output", lists.outputs, OUTPUTS),
        ("--optimizer", lists.optimizers, OPTIMIZERS),
    )
    for option, words, known in named:
        unknown = [name for name in words if name not in known]
        if unknown or not words:
            yield f"{option} is one or more of {', '.join(known)}, not {', '.join(unknown) or 'nothing'}"


def _wrong_values(setting: Setting, ids: list[str]) -> Iterator[str]:
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
    if not 0 <= setting.ranks <= setting.batch:
        yield f"--ranks is 0 for none, or up to the {setting.batch:,} samples of a batch, not {setting.ranks}"
    if setting.zipf <= 0 or setting.zipf == 1:
        yield f"--zipf must be above 0 and not 1, not {setting.zipf}"
    if setting.ssd is not None and "dynamic" in ids:
        yield "--ssd is a share of the rows, and dynamic ids have no number of rows; leave one of them out"
    if setting.ssd is None and setting.ssd_folder:
        yield "--ssd-folder says where rows are that memory does not hold; give --ssd too, the share that it does"


def _wrong_shares(cache: str | None, ssd: float | None, rows_scale: float) -> Iterator[str]:
    shares: list[tuple[str, str | float]] = [("--cache", word) for word in _words(cache or "")]
    shares += [("--rows-scale", rows_scale), *([] if ssd is None else [("--ssd", ssd)])]
    for option, given in shares:
        try:
            share = float(given)
        except ValueError:
            yield f"{option} takes shares by comma, not {given}"
            continue
        if not 0 < share <= 1:
            yield f"{option} is a share, above 0 and at most 1, not {given}{percent_hint(share)}"
    if cache is not None and not _words(cache):
        yield "--cache takes shares by comma, not nothing"
