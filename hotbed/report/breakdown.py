"""Metrics beyond those of a whole split in; HTML out: AUC within groups, metrics by slice, metrics of further tasks."""

from __future__ import annotations

from typing import Any

from hotbed.report.curves import headline_split
from hotbed.report.formats import count, decimal, listing, mapping, number, table, text
from hotbed.report.read import RunRecord

_SLICE = ("auc", "log_loss", "calibration")
_TASK = (*_SLICE, "rmse", "mae", "r2")


def breakdowns(run: RunRecord) -> list[str]:
    """Of the split that the page begins with; nothing where nothing was asked for."""
    split = headline_split(run)
    more = mapping(run.more.get(split))
    found = []
    if grouped := mapping(more.get("grouped_auc")):
        found.append(
            f"<p>AUC within {text(grouped.get('feature'), 60)} on {text(split, 60)}: {decimal(number(grouped.get('auc')))}, "
            f"the mean over {count(number(grouped.get('groups')))} groups with both labels "
            f"({count(number(grouped.get('samples')))} samples).</p>"
        )
    for name, slices in mapping(more.get("by")).items():
        rows = [_row(one, text(mapping(one).get("value"), 60), _SLICE) for one in listing(slices)]
        head = [text(name, 60), "samples", "AUC", "log loss", "calibration"]
        found.append(table(f"Metrics by {text(name, 60)}", head, rows, kind="wide"))
    if tasks := mapping(more.get("tasks")):
        rows = [_row(metrics, text(name, 60), _TASK) for name, metrics in tasks.items()]
        head = ["task", "samples", "AUC", "log loss", "calibration", "RMSE", "MAE", "R2"]
        found.append(table("Further tasks", head, rows, kind="wide"))
    return found


def _row(metrics: Any, name: str, wanted: tuple[str, ...]) -> list[str]:
    known = mapping(metrics)
    return [name, count(number(known.get("samples"))), *(decimal(number(known.get(one))) for one in wanted)]
