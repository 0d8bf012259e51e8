"""`hotbed simulate`: the misses of caches of several sizes on a dataset or a file of ids, compared with the optimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hotbed.cli import options as opt
from hotbed.cli.console import err, out, print_json, table_of_numbers
from hotbed.cli.options import words
from hotbed.cli.plot import curve_text
from hotbed.cli.settings import one_dataset, open_dataset
from hotbed.host.memory import parse_share, percent_hint
from hotbed.run.config import POLICIES
from hotbed.run.config_check import raise_problems

if TYPE_CHECKING:
    from hotbed.cache import CacheCounts
    from hotbed.forecast.curves import Curves
    from hotbed.forecast.replay import LookAhead, Replay
    from hotbed.forecast.trace import Trace, TraceSource

_SETTINGS = {
    "data.batch_size": "batch_size",
    "data.shuffle": "shuffle",
    "train.seed": "seed",
    "tables.cache": "cache",
    "tables.policy": "policy",
    "tables.warmup": "warmup",
    "tables.window": "window",
    "tables.look_ahead": "look_ahead",
}  # of `hotbed train`: the option here


def simulate_command(
    place: opt.DataPlace = None,
    data: opt.Data = None,
    cache: opt.CacheShares = None,
    batch_size: opt.BatchSize = None,
    policy: opt.CachePolicies = None,
    window: opt.Window = None,
    look_ahead: opt.LookAhead = None,
    split: opt.Split = None,
    shuffle: Annotated[bool, typer.Option(help="Read in the order of a run's first epoch, or as on disk.")] = True,
    seed: opt.Seed = None,
    max_batches: Annotated[int | None, typer.Option(min=1, help="Read at most this many batches.")] = None,
    sets: opt.Sets = [],  # noqa: B006  never changed
    curve: opt.Curve = None,
    html: opt.Html = None,
    as_json: opt.AsJson = False,
) -> None:
    """Count a cache's hits and misses on a dataset or a file of ids, without training.

    Without arguments: on the embedded click log, like `hotbed train`. DATA may also be a file of ids (.npy, .parquet).
    Defaults: caches of 0.5%, 1.5% and 5%, all policies, batches of 4,096 of the train split, window and look-ahead of
    training, seed 0, which determines the order.

    The dataset's ids are replayed through the cache, without rows: the counts equal
    those of a run with the same batch size, seed, share, policy, window and
    look-ahead. They are compared with the optimum: the fewest misses of any cache
    of that size, found with the whole trace known.

    The rows of a batch must fit in the cache together. For a share that is too small
    the smallest one that works is printed.

    [bold]For example:[/bold]

    hotbed simulate

    hotbed simulate criteo-like --cache 1.5%,5%

    hotbed simulate mydata --batch-size 64 --cache 30% --policy oracle,lru --max-batches 300

    hotbed simulate mydata --batch-size 64 --cache 30% --look-ahead 0 --policy lfu

    hotbed simulate ids.npy --batch-size 64 --cache 30% --curve --html curves.html
    """
    opt.local_only(html=html)
    data = one_dataset(place, data)
    options: dict[str, Any] = {
        "cache": "0.5%,1.5%,5%" if cache is None else cache,
        "policy": "all" if policy is None else policy,
        "warmup": 0.0,
        "batch_size": batch_size or 4096,
        "shuffle": shuffle,
        "seed": seed or 0,
        "window": window,
        "look_ahead": look_ahead,
    }
    options |= from_sets(sets)
    shares, policies = _read_lists(options["cache"], options["policy"])
    from hotbed.forecast.replay import LookAhead

    source = _TraceInput(
        data, options["batch_size"], max_batches, split or "train", options["shuffle"], options["seed"]
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=err(), transient=True, disable=not err().is_terminal) as bar:
        reading = bar.add_task("reading ids", total=None)
        given = source.read(lambda done, total: bar.update(reading, completed=done, total=total))
        sizes, refused = _sizes_that_fit(given.trace, shares)
        running = bar.add_task("simulating", total=len(sizes) * len(policies) * given.trace.num_batches)
        request = _SimulationRequest(
            given, policies, LookAhead(options["window"], options["look_ahead"]), options["warmup"]
        )
        outcomes = request.run(sizes, lambda done: bar.update(running, completed=done))
        curves = request.curves(outcomes, tables=html is not None or as_json) if curve or html is not None else None
    for message in refused:
        err().print(f"left out: {message}")
    if html is not None and curves is not None:
        from hotbed.forecast.page import write_curves

        write_curves(html, data, curves)
    if as_json:
        figures = [outcome.figures() for outcome in outcomes]
        print_json({"caches": figures, **({} if curves is None else curves.figures())})
    else:
        out().print(_table(given.trace, outcomes))
        if "static" in policies or options["warmup"]:
            which = "" if options["warmup"] else "static: "
            out().print(f"{which}rows loaded before the first batch count as misses")
        if curves is not None:
            out().print(curve_text(curves))


def _read_lists(cache: str, policy: str) -> tuple[list[float], list[str]]:
    """Shares and policies; all mistakes are reported at once."""
    problems, shares = [], []
    for word in words(cache):
        try:
            shares.append(parse_share(word))
        except ValueError:
            problems.append(f"--cache takes shares of the rows separated by commas, not {word!r}")
    problems += [
        f"--cache takes shares above 0 and at most 1, not {share:g}{percent_hint(share)}"
        for share in shares
        if not 0 < share <= 1
    ]
    policies = list(POLICIES) if policy.strip() == "all" else words(policy)
    unknown = [name for name in policies if name not in POLICIES]
    if unknown or not policies:
        problems.append(
            f"--policy is one or more of {', '.join(POLICIES)}, or all, not {', '.join(unknown) or 'nothing'}"
        )
    if not shares and not problems:
        problems.append("--cache takes shares of the rows separated by commas, not nothing")
    raise_problems(problems)
    return shares, policies


def _sizes_that_fit(trace: Trace, shares: list[float]) -> tuple[dict[float, int], list[str]]:
    """({share: slots} of the caches that hold a batch, messages for the others); a BudgetError if none does."""
    from hotbed.errors import BudgetError
    from hotbed.forecast.optimum import check_fits

    sizes: dict[float, int] = {}
    errors: list[tuple[float, BudgetError]] = []
    for share in shares:
        num_slots = max(1, round(share * trace.num_rows))
        try:
            check_fits(trace, num_slots)
            sizes[share] = num_slots
        except BudgetError as error:
            errors.append((share, error))
    if not sizes:
        raise errors[-1][1]
    return sizes, [f"--cache {share:g}: {error}" for share, error in errors]


@dataclass(frozen=True)
class _Outcome:
    """The result of one cache size and policy."""

    share: float
    num_slots: int
    policy: str
    counts: CacheCounts
    optimum: int
    num_keys: int  # distinct rows, batch by batch

    @property
    def rows_hit(self) -> float:
        """Share of the distinct rows of every batch: comparable between sizes and policies, whatever their windows."""
        return 1 - min(1.0, self.counts.misses / max(self.num_keys, 1))

    def figures(self) -> dict[str, Any]:
        moved = ("bytes_in", "bytes_out", "stall_seconds")  # a simulation does not know them
        counts = {name: value for name, value in self.counts._asdict().items() if name not in moved}
        return {
            "cache": self.share,
            "num_slots": self.num_slots,
            "policy": self.policy,
            **counts,
            "hit_rate": self.counts.hit_rate,  # over windows, as training counts
            "lookup_hit_rate": self.counts.lookup_hit_rate,
            "rows_hit": self.rows_hit,
            "optimum": self.optimum,
            "keys_of_batches": self.num_keys,
        }


@dataclass(frozen=True)
class _TraceInput:
    """The dataset or file that ids are read from."""

    name: str
    batch_size: int
    max_batches: int | None
    split: str
    shuffle: bool
    seed: int

    def read(self, progress: Callable[[int, int], None]) -> TraceSource:
        from hotbed.forecast.trace import check_suffix, from_dataset, from_file

        path = Path(self.name)
        if path.is_file():
            check_suffix(path)
            return from_file(path, self.batch_size, self.max_batches)
        return from_dataset(
            open_dataset(self.name),
            batch_size=self.batch_size,
            split=self.split,
            shuffle=self.shuffle,
            seed=self.seed,
            max_batches=self.max_batches,
            progress=progress,
        )


@dataclass(frozen=True)
class _SimulationRequest:
    """What all caches of a simulation have in common."""

    given: TraceSource
    policies: list[str]
    ahead: LookAhead
    warmup: float

    @cached_property
    def replay(self) -> Replay:
        from hotbed.forecast.replay import Replay

        return Replay(self.given.trace)

    def run(self, sizes: dict[float, int], progress: Callable[[int], None]) -> list[_Outcome]:
        from hotbed.data.dataset import num_warm
        from hotbed.forecast.optimum import optimum
        from hotbed.forecast.replay import simulate

        outcomes: list[_Outcome] = []
        for share, num_slots in sizes.items():
            fewest = optimum(self.given.trace, num_slots)
            for policy in self.policies:
                warm = num_warm(num_slots, policy, self.warmup)
                before = len(outcomes) * self.given.trace.num_batches
                counts = simulate(
                    self.replay,
                    num_slots,
                    policy,
                    window=self.ahead.window,
                    look_ahead=self.ahead.look_ahead,
                    hot=self.given.hot(warm) if warm else None,
                    progress=lambda done, before=before: progress(before + done),  # type: ignore[misc]
                )
                num_keys = int(self.given.trace.keys.shape[0])
                outcomes.append(_Outcome(share, num_slots, policy, counts, fewest, num_keys))
        return outcomes

    def curves(self, outcomes: list[_Outcome], tables: bool) -> Curves:
        """LRU at every size, the simulated policies, and the optimum."""
        from hotbed.forecast.curves import curves_of

        sizes = [outcome.num_slots for outcome in outcomes]
        return curves_of(
            self.given,
            self.replay,
            self.policies,
            self.ahead,
            (min(sizes), max(sizes)),
            tables=tables,
            warmup=self.warmup,
        )


def _table(trace: Trace, outcomes: list[_Outcome]) -> Table:
    title = (
        f"{trace.num_batches:,} batches, {trace.num_lookups:,} lookups of {trace.distinct().shape[0]:,} rows "
        f"of {trace.num_rows:,}"
    )
    headings = ("cache", "slots", "policy", "misses a batch", "new rows", "rows hit", "x optimum")
    table = table_of_numbers(title, *headings, left=("policy",))
    shown = None
    for outcome in outcomes:
        counts = outcome.counts
        if shown not in (None, outcome.share):
            table.add_section()
        first = shown != outcome.share
        shown = outcome.share
        table.add_row(
            f"{100 * outcome.share:g} %" if first else "",
            f"{outcome.num_slots:,}" if first else "",
            outcome.policy,
            f"{counts.misses / trace.num_batches:,.0f}",
            f"{100 * counts.created / counts.misses:.0f} %" if counts.misses else "-",
            f"{100 * outcome.rows_hit:.2f} %",
            f"{counts.misses / outcome.optimum:.3f}" if outcome.optimum else "-",
        )
    return table


def from_sets(sets: list[str]) -> dict[str, Any]:
    """{option: value} of settings of `hotbed train`; settings that do not affect a simulation are mistakes."""
    if not sets:
        return {}
    from hotbed.run.run_file import compose

    config, problems = compose(None, {}, sets)
    paths = [text.partition("=")[0].strip() for text in sets]
    if not problems:
        problems = [
            f"--set {path}: has no effect on a simulation; these do: {', '.join(_SETTINGS)}"
            for path in paths
            if path not in _SETTINGS
        ]
    raise_problems(problems)
    found = {}
    for path in paths:
        section, name = path.split(".")
        value = getattr(getattr(config, section), name)
        found[_SETTINGS[path]] = str(value) if path == "tables.cache" else value
    return {name: value or None if name in ("window", "look_ahead") else value for name, value in found.items()}
