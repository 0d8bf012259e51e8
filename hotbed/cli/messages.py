"""What `hotbed train` prints: the settings of a run, its start and its result."""

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

from hotbed.cli.console import err, out, print_calibration, print_more, result_table, table_of_numbers, waiting
from hotbed.host.memory import in_words

if TYPE_CHECKING:
    import torch

    from hotbed.data.dataset import Dataset
    from hotbed.data.schema import Schema
    from hotbed.run.config import RunConfig
    from hotbed.train.build import BuiltTraining
    from hotbed.train.loop import Training

MOST_TABLES = 12
COLUMNS = ("seen", "admitted", "rejected", "expired", "rows")
_TOO_GOOD = 0.999


def warn_about_few_steps(training: Training, batch_size: int, *, chosen: bool) -> None:
    """Warn if there are too few steps to learn from; `chosen`: for the size of the log, as nobody gave a batch size."""
    from hotbed.report.advice import FEW_STEPS

    if 0 < training.total_steps < FEW_STEPS and not training.pace.max_steps:
        steps = f"{training.total_steps} steps" if training.total_steps > 1 else "1 step"
        way_out = (
            "Leave out data.batch_size (--batch-size) and train.epochs (--epochs): they are then chosen for the size of the "
            "log"
        )
        if chosen:
            way_out = (
                f"The log is small: {training.loaders.train.described}. --batch-size and --epochs make more steps of it"
            )
        err(always=True).print(f"note: {steps} of {batch_size:,} samples are too few to learn much from. {way_out}")


def warn_about_one_class(schema: Schema) -> None:
    """Warn if the label is the same in all rows of train."""
    train = schema.splits.get("train")
    if train is not None and train.rows and train.positives in (0, train.rows):
        err(always=True).print(
            f"WARNING {schema.label}: this label is {int(train.positives > 0)} in every row of train, so nothing can be "
            "learned and there is no AUC. Prepare the data again: --label names another column",
        )


def warn_about_no_valid(training: Training) -> None:
    """Warn if several epochs are trained and nothing says which of them is the best."""
    if training.pace.epochs > 1 and "valid" not in training.loaders.held_out:
        err(always=True).print(
            f"note: there is no valid split to choose the best of {training.pace.epochs} epochs by; the last weights are kept, "
            "and may have memorized train. Prepare the data with one: --splits valid=0.1 takes a tenth of train files",
        )


def print_result(summary: dict[str, Any], folder: Path) -> None:
    """Write the report page and print the result."""
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
        config = json.loads((folder / "config.json").read_text())
        print_calibration(summary["final"], base_rate=bool(config["train"].get("base_rate")))
        print_suspicion(summary["final"], summary.get("leaks", {}))
    for split, more in summary.get("more", {}).items():
        print_more(more, split)
    if summary["ids"]:
        out().print(id_table(summary["ids"]))
    if summary["tiers"]:
        out().print(tiers_text(summary["tiers"]))
    rate, seconds = summary["samples_per_s"] or 0, summary["train_seconds"]
    steady = summary.get("steady_samples_per_s")
    after_start = f" ({steady:,.0f} after the start)" if steady else ""
    trained = (
        f"{summary['samples']:,} samples in {seconds:,.1f} s of training, {rate:,.0f} samples/s{after_start} "
        f"on {summary['device']}"
    )
    kept = [_kept_weights(summary)] if summary["finished"] else []
    out().print("\n".join([trained, *kept, page]))
    if not summary["finished"]:
        err().print(
            f"interrupted at step {summary['steps']:,}; the checkpoint is saved. Resume with: "
            f"hotbed train --resume {shlex.quote(str(folder))}",
        )


def print_suspicion(metrics_of_split: Mapping[str, Mapping[str, Any]], leaks: Mapping[str, float]) -> None:
    """Say that a model is too good to be true, and which columns make it so."""
    shown = metrics_of_split.get("test") or metrics_of_split.get("valid") or {}
    area = shown.get("auc")
    if not leaks and not (area is not None and area >= _TOO_GOOD):  # the AUC of one class is nan
        return
    named = ", ".join(leaks)
    why = f"{named} alone gives the label away" if leaks else "look for a column that is filled in after the event"
    drop = shlex.quote(",".join(leaks)) if leaks else "COLUMN"
    err().print(
        f"WARNING this AUC is too good to be true: {why}. Prepare the data again with --drop {drop}",
        highlight=False,
    )


def _kept_weights(summary: dict[str, Any]) -> str:
    """Which weights were kept, and why."""
    at = f"the weights after step {summary['best_step']:,} of {summary['steps']:,} (epoch {summary['best_epoch']:,})"
    return f"kept: {at}: {summary['kept_because']}"


def next_commands(folder: Path) -> str:
    """The commands that use a trained model."""
    run, command = shlex.quote(str(folder)), hotbed_command()
    ways = ("evaluate {run}", "predict {run} FILE --out scores.csv", "serve {run}", "export {run}")
    return "\n".join(f"{'next: ' if not k else '      '}{command} {way.format(run=run)}" for k, way in enumerate(ways))


def hotbed_command() -> str:
    """How this shell can call hotbed: by name, else by path, else as a module of this Python."""
    if shutil.which("hotbed"):
        return "hotbed"
    candidate = Path(sys.executable).with_name("hotbed")
    here = Path.cwd()
    if not candidate.is_file():
        return f"{shlex.quote(sys.executable)} -m hotbed"
    return shlex.quote(str(candidate.relative_to(here) if candidate.is_relative_to(here) else candidate))


def print_forecast(config: RunConfig, dataset: Dataset, folder: Path, quiet: bool) -> None:
    """Forecast what the run will need; print it and write it to the run folder. Takes a few seconds; measures nothing."""
    from hotbed.cli.plan import forecast_text
    from hotbed.forecast.comparison import quick_forecast, write_forecast, write_misses
    from hotbed.forecast.request import ForecastRequest

    with nullcontext() if quiet else waiting("forecasting"):
        request = ForecastRequest(config, dataset)
        forecast = quick_forecast(request)
        if forecast is None:
            return
        write_forecast(folder, forecast)
        if forecast.traffic is not None:
            write_misses(folder, request)
    if not quiet:
        taken = f"{in_words(forecast.bytes_of('device'))} on the device, {in_words(forecast.bytes_of('memory'))} of host memory"
        lines = [f"forecast: {taken}", forecast_text(forecast), *(f"may not fit: {one}" for one in forecast.problems)]
        err().print("\n".join(line for line in lines if line))


def compare_forecast(summary: dict[str, Any], folder: Path, device: torch.device) -> str:
    """The forecast and the measured values; "" without a forecast."""
    from hotbed.forecast.comparison import write_truth

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


def describe_start(built: BuiltTraining) -> str:
    from hotbed.train.run import cache_sizes

    training, subject = built.training, built.subject
    tables = training.learner.tables
    given = tables.tables.values()
    rows = f"{sum(table.rows or 0 for table in given):,} rows"
    cached, device = cache_sizes(tables), training.learner.device
    if training.world.size > 1:
        rows = f"{rows} over {training.world.size} ranks"
    if any(table.rows is None for table in given):
        assert cached is not None, "dynamic ids need a cache"
        rows = "dynamic ids" if all(table.rows is None for table in given) else f"{rows} and dynamic ids"
        place = f"with a cache of {cached['slots']:,} rows on {device}"
    elif cached is None:
        place = f"({in_words(tables.num_bytes)}), {device}"
    else:
        # the bytes they take are known once windows are planned: the forecast and the final summary report them
        place = f"({in_words(cached['table_bytes'])}), {cached['slots']:,} of them at a time on {device}"
    return (
        f"{subject.model} on {subject.dataset_name}: {training.loaders.train.described}, {rows} in "
        f"{len(tables.tables)} tables {place}; writing to {training.run}"
    )


@contextmanager
def report_parallel_choices(say: Callable[[str], None]) -> Iterator[None]:
    """Print what parallel.mode=auto chooses, and why."""
    log, handler = logging.getLogger("hotbed.parallel"), _LogLines(say)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


class _LogLines(logging.Handler):
    """A log handler that passes lines to `say`."""

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
    requested, rate = tiers["from_memory"] + tiers["from_ssd"], tiers["memory_hit_rate"]
    found = (
        f"{100 * rate:.1f} % of {requested:,} rows requested below the device were in memory; "
        if rate is not None
        else ""
    )
    return (
        f"memory: {found}{in_words(tiers['memory_bytes'])} of {in_words(tiers['memory_budget'])} taken\n"
        f"ssd: {tiers['from_ssd']:,} rows ({in_words(tiers['bytes_read'])}) read, {tiers['to_ssd']:,} written; in all "
        f"{in_words(tiers['wear'])} written by this process, with {_times(tiers['compactions'])}; "
        f"{in_words(tiers['ssd_bytes'])} of {in_words(tiers['ssd_cap'])} taken, {100 * tiers['live_share']:.0f} % live"
    )


def id_table(ids: Mapping[str, Mapping[str, int]]) -> Table:
    """The `ids` of a summary: one row per table, most rows first, and their sum."""
    table = table_of_numbers("dynamic ids", "", *COLUMNS, left=("",))
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
