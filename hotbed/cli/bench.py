"""`hotbed bench`: the embedding step and the whole training step, compared with FBGEMM and torch on the same ids."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli import options as opt
from hotbed.cli.console import err
from hotbed.cli.options import share, words
from hotbed.host.memory import parse_share, percent_hint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotbed.bench.setting import Setting


class _Defaults(NamedTuple):
    """Defaults of options; `bags` replaces `batch` and `cache` where ids come in bags."""

    dim: str
    dense: str
    batch: str
    cache: str
    warmup: int
    rows_scale: float
    bags: tuple[int, str]  # batch, cache


_ON_GPU = _Defaults("128", "0,1024", "16384", "0.015", 80, 1.0, (4096, "0.05"))
_ON_CPU = _Defaults("16", "0,128", "4096", "0.05", 20, 0.1, (1024, "0.1"))


def _option(name: str, about: str, *names: str) -> Any:
    on_gpu, on_cpu = getattr(_ON_GPU, name), getattr(_ON_CPU, name)
    default = f"[dim]\\[default: {on_gpu}; on the CPU {on_cpu}][/dim]"
    return typer.Option(None, *names, help=f"{about} {default}", show_default=False)


def bench_command(
    systems: str = typer.Option("", help="Separated by commas. Default: all that run on this device (listed above)."),
    ids: str = typer.Option(
        "single",
        "--id-kind",
        help="What a sample holds, separated by commas. single: one id per feature. bags: as in MLPerf's multi-hot Criteo, 214 "
        "ids a sample. varying: bags of 0 to twice that size. dynamic: single 64-bit ids in tables without a fixed size.",
    ),
    dim: opt.Dims = None,
    optimizer: opt.RowOptimizers = None,
    dense: str | None = _option(
        "dense",
        "Widths of the 4-layer bf16 MLP after the lookup, separated by commas: a whole training step. 0: the embedding step "
        "alone, with a given gradient.",
        "--mlp",
    ),
    output: str = typer.Option("stack", help="Form of hotbed's vectors, separated by commas: stack, concat, dict."),
    batch_size: opt.BatchSize = None,
    cache: opt.CacheShares = None,
    ssd: float | None = typer.Option(
        None,
        "--memory-share",
        parser=share,
        metavar="SHARE",
        help="Share of the rows in memory below hotbed's cache; the others are on an ssd. Default: all in memory.",
    ),
    ssd_folder: Path | None = typer.Option(
        None,
        help="Folder on that ssd for temporary files. Default: the system's folder for temporary files.",
    ),
    ranks: opt.Ranks = None,
    cold: bool = typer.Option(
        False,
        "--cold",
        help="Start with empty stores: a new row is created on the device instead of copied. Default: every row is written "
        "beforehand, the steady state of a long run.",
    ),
    zipf: float = typer.Option(
        1.05, help="Zipf exponent of the id frequencies; smaller means more misses. Must not be 1."
    ),
    steps: opt.Steps = None,
    warmup: int | None = _option("warmup", "Steps before them."),
    policy: opt.CachePolicy = None,
    window: opt.Window = None,
    look_ahead: opt.LookAhead = None,
    rows_scale: float | None = _option("rows_scale", "Table sizes as a share of Criteo-Kaggle's 33.76 M rows."),
    device: opt.Device = None,
    csv: Path | None = typer.Option(None, help="Append one row per result to this file, as soon as it is measured."),
    as_json: opt.AsJson = False,
) -> None:
    """Time hotbed's training step, compared with FBGEMM and torch on the same ids.

    26 tables with Criteo-Kaggle's cardinalities, Zipf ids, every row written
    before the clock starts. Every system first trains small tables and must agree
    with float64 arithmetic; a system that does not is not timed. Then each is
    built, warmed up, timed (wall clock, median over groups of ten steps; on a GPU
    also its busy time per step) and freed. Ratios are to FBGEMM with every row on
    the device: below 1 is faster.

    [bold]Defaults:[/bold] dim 128, batches of 16,384 and a cache of 1.5%, on a CPU dim 16, 4,096 and 5%; with bags batches
    of 4,096 and a cache of 5%, on a CPU 1,024 and 10%. rowwise_adagrad; 100 timed steps, in groups of ten; policy, window and
    look-ahead of hotbed. Without --ranks nothing is sharded; with it the rows and batches of hotbed are, with Gloo on a CPU
    or one shared GPU, else NCCL. Several caches are a sweep, which is plotted at the end.

    [bold]Systems:[/bold] hotbed-hbm (every row on the device), hotbed-cached (a cache
    under hotbed.prefetch), hotbed-cached-plain (the same cache in a plain loop),
    torch (nn.EmbeddingBag, sparse gradients), fbgemm-hbm, fbgemm-lru-managed,
    fbgemm-lru-mapped, fbgemm-lfu-mapped, fbgemm-lru-managed-prefetch (its caches),
    fbgemm-cpu. A peer that is not installed is left out.

    [bold]For example:[/bold]

    hotbed bench

    hotbed bench --systems fbgemm-hbm,hotbed-cached --dim 128,64,32 --csv bench.csv

    hotbed bench --id-kind bags,varying --systems fbgemm-hbm,fbgemm-lru-managed,hotbed-hbm,hotbed-cached

    hotbed bench --systems fbgemm-hbm,hotbed-cached --mlp 0 --cache 0.5%,1.5%,5%

    hotbed bench --systems hotbed-hbm,hotbed-cached --output stack,concat,dict --mlp 0

    hotbed bench --systems hotbed-cached --memory-share 10% --ssd-folder /tmp --dim 64

    hotbed bench --systems hotbed-cached --ranks 2

    hotbed bench --device cpu --rows-scale 1 --systems fbgemm-cpu,hotbed-hbm

    hotbed bench --device cpu --rows-scale 0.001 --batch-size 64 --dim 8 --mlp 0 --cache 30% --steps 10
    """
    from hotbed.run.config_check import raise_problems

    with err().status("loading torch"):
        from hotbed.bench.setting import Setting, scaled_rows
        from hotbed.bench.systems import choose_systems
        from hotbed.cli.bench_report import report
        from hotbed.host.devices import pick_device
    opt.local_only(csv=csv, ssd_folder=ssd_folder)
    on = pick_device(device or "auto")
    num_steps = steps or 100
    usual = _ON_CPU if on.type == "cpu" else _ON_GPU
    lists = _OptionLists(
        *map(
            words,
            (
                ids,
                output,
                "rowwise_adagrad" if optimizer is None else optimizer,
                usual.dim if dim is None else dim,
                usual.dense if dense is None else dense,
            ),
        )
    )
    base = Setting(
        device=on,
        batch=int(usual.batch) if batch_size is None else batch_size,
        zipf=zipf,
        ssd=ssd,
        ssd_folder="" if ssd_folder is None else str(ssd_folder),
        ranks=ranks or 0,
        cold=cold,
        policy=policy,
        window=window,
        look_ahead=look_ahead,
        steps=num_steps,
        warmup=usual.warmup if warmup is None else warmup,
    )
    scale = usual.rows_scale if rows_scale is None else rows_scale
    raise_problems([*_wrong_lists(lists), *_wrong_values(base, lists.ids), *_wrong_shares(cache, ssd, scale)])
    base = replace(base, steps=-(-num_steps // 10) * 10, rows=scaled_rows(scale))
    settings = []
    for kind in lists.ids:
        in_bags = kind in ("bags", "varying")
        size = usual.bags[0] if in_bags and batch_size is None else base.batch
        shares = words(cache or (usual.bags[1] if in_bags else usual.cache))
        settings += _settings(replace(base, ids=kind, batch=size), lists, shares)
    if report(settings, choose_systems(words(systems), on), csv, as_json):
        raise typer.Exit(1)


class _OptionLists(NamedTuple):
    """Options that take several values."""

    ids: list[str]
    outputs: list[str]
    optimizers: list[str]
    dims: list[str]
    denses: list[str]


def _settings(base: Setting, lists: _OptionLists, shares: Sequence[str]) -> list[Setting]:
    """All combinations; those that differ only in the cache are adjacent."""
    every = itertools.product(lists.outputs, lists.optimizers, lists.dims, lists.denses, shares)
    return [
        replace(base, output=output, optimizer=optimizer, dim=int(dim), dense=int(dense), cache=parse_share(one))
        for output, optimizer, dim, dense, one in every
    ]


def _wrong_lists(lists: _OptionLists) -> Iterator[str]:
    from hotbed.bench.setting import IDS, OPTIMIZERS, OUTPUTS

    for option, given, least in (("--dim", lists.dims, 1), ("--mlp", lists.denses, 0)):
        bad = [word for word in given if not word.isdecimal() or int(word) < least]
        if bad or not given:
            yield f"{option} takes whole numbers from {least}, separated by commas, not {', '.join(bad) or 'nothing'}"
    named = (
        ("--id-kind", lists.ids, IDS),
        ("--output", lists.outputs, OUTPUTS),
        ("--optimizer", lists.optimizers, OPTIMIZERS),
    )
    for option, given, known in named:
        unknown = [name for name in given if name not in known]
        if unknown or not given:
            yield f"{option} is one or more of {', '.join(known)}, not {', '.join(unknown) or 'nothing'}"


def _wrong_values(setting: Setting, ids: list[str]) -> Iterator[str]:
    from hotbed.cache import POLICIES
    from hotbed.run.config import MOST_AHEAD, MOST_WINDOW

    most = {"window": MOST_WINDOW, "look_ahead": MOST_AHEAD}

    if setting.policy is not None and setting.policy not in POLICIES:
        yield f"--policy is one of {', '.join(POLICIES)}, not {setting.policy}"
    for name in ("batch_size", "steps", "warmup", "window", "look_ahead"):
        value = getattr(setting, name.removesuffix("_size"))
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} must be at least 1, not {value}"
        if name in most and value is not None and value > most[name]:
            yield f"--{name.replace('_', '-')} is at most {most[name]}, not {value}"
    if not 0 <= setting.ranks <= setting.batch:
        yield f"--ranks is 0 for none, or up to the {setting.batch:,} samples of a batch, not {setting.ranks}"
    if setting.zipf <= 0 or setting.zipf == 1:
        yield f"--zipf must be above 0 and not 1, not {setting.zipf}"
    if setting.ssd is not None and "dynamic" in ids:
        yield "--memory-share is a share of the rows, and dynamic ids have no number of rows; leave one of them out"
    if setting.ssd is None and setting.ssd_folder:
        yield "--ssd-folder is for rows that memory does not hold; give --memory-share too, the share of rows in memory"


def _wrong_shares(cache: str | None, ssd: float | None, rows_scale: float) -> Iterator[str]:
    shares: list[tuple[str, str | float]] = [("--cache", word) for word in words(cache or "")]
    shares += [("--rows-scale", rows_scale), *([] if ssd is None else [("--memory-share", ssd)])]
    for option, given in shares:
        try:
            found = parse_share(given) if isinstance(given, str) else float(given)
        except ValueError:
            yield f"{option} takes shares separated by commas, not {given}"
            continue
        if not 0 < found <= 1:
            yield f"{option} is a share, above 0 and at most 1, not {given}{percent_hint(found)}"
    if cache is not None and not words(cache):
        yield "--cache takes shares separated by commas, not nothing"
