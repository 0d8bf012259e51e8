"""What `hotbed train` says of a run: its settings, how it begins, and its result."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hotbed.cli.console import err, out, result_table, waiting
from hotbed.host.memory import in_words

if TYPE_CHECKING:
    import torch

    from hotbed.data.dataset import Dataset
    from hotbed.run.config import RunConfig
    from hotbed.train.build import Built
    from hotbed.train.loop import Training

MOST_TABLES = 12
COLUMNS = ("seen", "admitted", "rejected", "expired", "rows")
_FEW_STEPS = 40
_SMALL_BATCH = 256


def warn_of_few_steps(training: Training, batch_size: int) -> None:
    """A small log in large batches learns nothing, and nothing else would say so."""
    if training.total_steps < _FEW_STEPS and not training.pace.max_steps:
        epochs = f"more epochs (--epochs {10 * training.pace.epochs})"
        smaller = f" or smaller batches (--set data.batch_size={_SMALL_BATCH})" if batch_size > _SMALL_BATCH else ""
        steps = f"{training.total_steps} steps" if training.total_steps > 1 else "1 step"
        err().print(
            f"note: {steps} of {batch_size:,} samples are few to learn from; {epochs}{smaller} help with a small log",
            soft_wrap=True,
        )


def tell(summary: dict[str, Any], folder: Path) -> None:
    """The report page, and the result on the screen."""
    from hotbed.errors import RunError
    from hotbed.report import write_report

    try:
        page = f"report: {write_report(folder)}"
    except RunError as error:
        page = f"no report page: {error}"
    if summary["final"]:
        known = {"best_auc": summary["best_auc"], "gap": summary["gap"]}
        columns = {
            split: {**metrics, **{name: values.get(split) for name, values in known.items()}}
            for split, metrics in summary["final"].items()
        }
        out().print(result_table(f"{summary['model']} on {summary['dataset']}", columns))
    if summary["ids"]:
        out().print(id_table(summary["ids"]))
    if summary["tiers"]:
        out().print(tiers_text(summary["tiers"]), soft_wrap=True)
    rate, seconds = summary["samples_per_s"] or 0, summary["train_seconds"]
    trained = (
        f"{summary['samples']:,} samples in {seconds:,.1f} s of training, {rate:,.0f} samples/s on {summary['device']}"
    )
    kept = [_kept(summary)] if summary["finished"] else []
    out().print("\n".join([trained, *kept, page]), soft_wrap=True)
    if not summary["finished"]:
        err().print(
            f"interrupted at step {summary['steps']:,}; the checkpoint is saved. Resume with: "
            f"hotbed train --resume {shlex.quote(str(folder))}",
            soft_wrap=True,
        )


def _kept(summary: dict[str, Any]) -> str:
    """Which weights the model has, and why."""
    at = f"the weights after step {summary['best_step']:,} of {summary['steps']:,} (epoch {summary['best_epoch']:,})"
    return f"kept: {at}: {summary['kept_because']}"


def next_commands(folder: Path) -> str:
    """What a trained model is for."""
    run, command = shlex.quote(str(folder)), as_typed()
    ways = ("evaluate {run}", "predict {run} FILE --out scores.csv", "serve {run}", "export {run}")
    return "\n".join(f"{'next: ' if not k else '      '}{command} {way.format(run=run)}" for k, way in enumerate(ways))


def as_typed() -> str:
    """`hotbed` as this shell finds it: by its name, else by its path, else as a module of this Python."""
    if shutil.which("hotbed"):
        return "hotbed"
    beside = Path(sys.executable).with_name("hotbed")
    here = Path.cwd()
    if not beside.is_file():
        return f"{shlex.quote(sys.executable)} -m hotbed"
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))


def foretell(config: RunConfig, dataset: Dataset, folder: Path, quiet: bool) -> None:
    """What the run will take, on the screen and in its folder: a few seconds, and nothing is measured."""
    from hotbed.cli.plan import outlook_text
    from hotbed.forecast.comparison import quick_outlook, write_forecast, write_misses
    from hotbed.forecast.request import ForecastRequest

    with nullcontext() if quiet else waiting("forecasting"):
        asked = ForecastRequest(config, dataset)
        forecast = quick_outlook(asked)
        if forecast is None:
            return
        write_forecast(folder, forecast)
        if forecast.traffic is not None:
            write_misses(folder, asked)
    if not quiet:
        from hotbed.host.memory import in_words

        taken = f"{in_words(forecast.bytes_of('device'))} on the device, {in_words(forecast.bytes_of('memory'))} of host memory"
        told = [f"forecast: {taken}", outlook_text(forecast), *(f"may not fit: {one}" for one in forecast.problems)]
        err().print("\n".join(line for line in told if line), soft_wrap=True)


def tell_truth(summary: dict[str, Any], folder: Path, device: torch.device) -> str:
    """What was forecast beside what happened; "" where nothing was."""
    from hotbed.forecast.comparison import write_truth
    from hotbed.host.memory import in_words

    words = {"hit_rate": "rows hit", "lookup_hit_rate": "lookups hit", "bytes_in": "to device", "bytes_out": "back"}
    words |= {"cache_bytes": "cache", "peak_device_bytes": "peak device memory", "samples_per_s": "samples/s"}

    def shown(name: str, value: float | None) -> str:
        if value is None:
            return "?"
        if name.endswith("hit_rate"):
            return f"{100 * value:.2f} %"
        return in_words(value) if "bytes" in name else f"{value:,.0f}"

    found = write_truth(folder, summary, device)
    parts = [f"{words[one.name]} {shown(one.name, one.forecast)} / {shown(one.name, one.truth)}" for one in found]
    hint = " (?: only `hotbed plan` measures it)" if any(one.forecast is None for one in found) else ""
    return f"forecast / truth: {', '.join(parts)}{hint}" if any(one.forecast is not None for one in found) else ""


def opening(built: Built) -> str:
    from hotbed.host.memory import in_words
    from hotbed.train.run import cache_sizes

    training, subject = built.training, built.subject
    tables = training.learner.tables
    given = tables.tables.values()
    rows = f"{sum(table.rows or 0 for table in given):,} rows"
    cached, device = cache_sizes(tables), training.learner.device
    if training.world.size > 1:
        rows = f"{rows} over {training.world.size} ranks"
    if any(table.rows is None for table in given):
        assert cached is not None, "dynamic ids are looked up in a cache"
        rows = "dynamic ids" if all(table.rows is None for table in given) else f"{rows} and dynamic ids"
        place = f"with a cache of {cached['slots']:,} rows on {device}"
    elif cached is None:
        place = f"({in_words(tables.num_bytes)}), {device}"
    else:
        # what they take there is known when windows are planned: the forecast and the end tell it
        place = f"({in_words(cached['table_bytes'])}), {cached['slots']:,} of them at a time on {device}"
    return (
        f"{subject.model} on {subject.dataset_name}: {training.loaders.train.num_rows:,} train samples, {rows} in "
        f"{len(tables.tables)} tables {place}; writing to {training.run}"
    )


@contextmanager
def told_of_ways(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, what parallel.mode=auto chooses for the tables of ranks, and why, is said."""
    log, told = logging.getLogger("hotbed.parallel"), _LogLines(say)
    level = log.level
    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(told)


class _LogLines(logging.Handler):
    """Lines of a log, said."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(record.getMessage())


def as_run_file(config: RunConfig) -> str:
    """YAML with one comment per setting."""
    from hotbed.run.config import FIELDS

    lines, open_section = [], ""
    for path, one in FIELDS.items():
        section, name = path.split(".")
        if section != open_section:
            lines.append(f"{section}:")
            open_section = section
        value = getattr(getattr(config, section), name)
        lines.append(f"  {name}: {json.dumps(value)}".ljust(36) + f"  # {one.metadata['about']}")
    return "\n".join(lines) + "\n"


def tiers_text(tiers: Mapping[str, Any]) -> str:
    """The `tiers` of a summary in words."""
    asked, rate = tiers["from_memory"] + tiers["from_ssd"], tiers["memory_hit_rate"]
    found = (
        f"{100 * rate:.1f} % of {asked:,} rows requested below the device were in memory; " if rate is not None else ""
    )
    return (
        f"memory: {found}{in_words(tiers['memory_bytes'])} of {in_words(tiers['memory_budget'])} taken\n"
        f"ssd: {tiers['from_ssd']:,} rows ({in_words(tiers['bytes_read'])}) read, {tiers['to_ssd']:,} written; in all "
        f"{in_words(tiers['wear'])} written by this process, with {_times(tiers['compactions'])}; "
        f"{in_words(tiers['ssd_bytes'])} of {in_words(tiers['ssd_cap'])} taken, {100 * tiers['live_share']:.0f} % live"
    )


def id_table(ids: Mapping[str, Mapping[str, int]]) -> Table:
    """The `ids` of a summary: one row per table, most rows first, and their sum."""
    table = Table(title="dynamic ids", title_justify="left")
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    order = sorted(ids, key=lambda name: -ids[name]["rows"])
    for name in order[:MOST_TABLES]:
        table.add_row(name, *(f"{ids[name][column]:,}" for column in COLUMNS))
    if len(order) > MOST_TABLES:
        rest = order[MOST_TABLES:]
        table.add_row(f"{len(rest)} more", *_sums(ids, rest))
    if len(order) > 1:
        table.add_row("all", *_sums(ids, order), style="bold")
    return table


def _sums(ids: Mapping[str, Mapping[str, int]], names: list[str]) -> list[str]:
    return [f"{sum(ids[name][column] for name in names):,}" for column in COLUMNS]


def _times(compactions: int) -> str:
    return "1 compaction" if compactions == 1 else f"{compactions:,} compactions"
