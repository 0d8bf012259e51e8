"""What `hotbed bench` prints: a line as soon as a system is timed, a table per setting, a plot of a sweep."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hotbed.bench.results import CsvFile, Result, columns, environment
from hotbed.bench.run import Skip, run, with_gpu_time
from hotbed.bench.setting import Setting
from hotbed.cli.console import err, out, print_json
from hotbed.cli.plot import PlotLine, percent, plot

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 180  # columns of a table that goes to a file


def report(settings: list[Setting], systems: list[str], csv: Path | None, as_json: bool = False) -> bool:
    """Run all systems, print and write results; returns whether a system was wrong or failed."""
    device = settings[0].device
    file = None if csv is None else CsvFile(csv, [*columns(settings[0]), *environment(device)])
    everything: list[Result] = []
    try:
        faults = _measure(settings, systems, everything)
    finally:  # results so far are printed and written even if this is interrupted
        for setting, group in itertools.groupby(everything, key=lambda result: result.setting):
            results = list(group)
            if not as_json:
                _print(_table(setting, results))
            if file is not None:
                for result in results:
                    file.add({**result.row(), **environment(device)})
    if as_json:
        print_json({"results": [{**one.row(), **environment(device)} for one in everything]})
        return faults
    for drawing in sweeps(everything):
        out().print(drawing)
    out().print(", ".join(f"{name} {value}" for name, value in environment(device).items() if value))
    return faults


def _measure(settings: list[Setting], systems: list[str], results: list[Result]) -> bool:
    """Time all systems, then measure GPU busy time, into `results`; returns whether a system was wrong or failed."""
    printed: set[str] = set()
    faults = False
    for outcome in run(dict.fromkeys(settings, systems)):
        if isinstance(outcome, Skip):
            faults |= outcome.is_fault
            _print_skip(outcome, printed)
            continue
        results.append(outcome)
        found = outcome.timing.where_rows_were
        err().print(f"{outcome.system}, {_title(outcome.setting)}: {outcome.ms:.3f} ms a step{found}")
    for place, result in enumerate(with_gpu_time(results)):
        results[place] = result
        if result.timing.gpu_ms is not None:
            line = f"{result.system}, {_title(result.setting)}: the GPU is busy {result.timing.gpu_ms:.3f} ms of a step"
            err().print(line)
    return faults


def sweeps(results: Sequence[Result]) -> Iterable[str]:
    """A plot for every setting with several cache sizes: ms a step over the share of the rows."""
    for setting, group in itertools.groupby(results, key=lambda result: replace(result.setting, cache=1.0)):
        some = list(group)
        if len({result.setting.cache for result in some}) < 2:
            continue
        names = dict.fromkeys(result.system for result in some)
        points = {
            name: sorted((result.setting.cache, result.ms) for result in some if result.system == name)
            for name in names
        }
        lines = [PlotLine(name, points[name]) for name in names]
        drawn = plot(lines, "share of the rows on the device", percent, lambda ms: f"{ms:.3g}")
        yield f"{_title(setting)}: ms a step\n{drawn}"


def _print_skip(skip: Skip, printed: set[str]) -> None:
    """Print a line for a skipped system and its traceback, once if they are the same for all settings."""
    peer = skip.reason.startswith("fbgemm_gpu:")
    line = f"{skip.reason}, skipped" if peer else f"{skip.system}, {_title(skip.setting)}: skipped, {skip.reason}"
    for text in (line, skip.trace):
        if text and text not in printed:
            printed.add(text)
            err().print(text)


def _title(setting: Setting) -> str:
    words = [setting.optimizer, f"dim {setting.dim}", f"batch {setting.batch:,}"]
    words += [f"{setting.ids} ids" if setting.ids == "dynamic" else setting.ids] * (setting.ids != "single")
    words += [f"Zipf {setting.zipf:g}"] * (setting.zipf != Setting.zipf)
    words += [f"output {setting.output}"] * (setting.output != "stack")
    words += [f"{setting.ranks} rank{'s' * (setting.ranks > 1)}"] * (setting.ranks > 0)
    words += ["cold"] * setting.cold
    return ", ".join([*words, f"MLP {setting.dense}" if setting.dense else "embedding step"])


def _print(table: Table) -> None:
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(table)
    console.file.flush()  # a run that is cut off later keeps this table


def _table(setting: Setting, results: Iterable[Result]) -> Table:
    from rich.table import Table

    share = f"{100 * setting.cache:g} % cached of {sum(setting.rows):,} rows"
    if setting.ssd is not None:
        share += f", {100 * setting.ssd:g} % in memory"
    table = Table(title=f"{_title(setting)}, {share}", title_justify="left")
    table.add_column("system", no_wrap=True)
    headings = ["ms p50", "p20 to p80", "GPU ms", "samples/s", "to FBGEMM", "device GiB", "GB/s", "of copy"]
    for heading in [*headings, "hits", "misses", "created", "written", "window", "stall"]:
        table.add_column(heading, justify="right")
    for result in results:
        row, counts = result.row(), result.timing.counts_per_step
        table.add_row(
            result.system,
            f"{result.ms:.3f}",
            f"{row['ms_p20']:.3f} {row['ms_p80']:.3f}",
            _shown(result.timing.gpu_ms, "{:.3f}"),
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
