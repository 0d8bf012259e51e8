"""The table at the end of `train` and `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.table import Table

ROWS = (
    ("AUC", "auc"),
    ("best possible AUC", "best_auc"),
    ("gap to it", "gap"),
    ("log loss", "log_loss"),
    ("normalized entropy", "normalized_entropy"),
    ("calibration", "calibration"),
)


def result_table(title: str, metrics_of_split: Mapping[str, Mapping[str, Any]]) -> Table:
    """One column per split; a row appears when some split knows it."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for split in metrics_of_split:
        table.add_column(split, justify="right")
    for label, name in ROWS:
        values = [metrics.get(name) for metrics in metrics_of_split.values()]
        if any(value is not None for value in values):
            table.add_row(label, *map(in_digits, values), style="bold" if name == "auc" else None)
    table.add_row("samples", *(f"{metrics['samples']:,}" for metrics in metrics_of_split.values()))
    return table


def in_digits(value: float | None) -> str:
    """Four digits; a dash for what is not known or not defined."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"
