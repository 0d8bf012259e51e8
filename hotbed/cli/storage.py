"""What `train` says at its end of the tiers below the device, and of dynamic ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from hotbed.host.memory import in_words

MOST_TABLES = 12
COLUMNS = ("seen", "admitted", "rejected", "expired", "rows")


def tiers_text(tiers: Mapping[str, Any]) -> str:
    """The `tiers` of a summary in words."""
    asked, rate = tiers["from_memory"] + tiers["from_ssd"], tiers["memory_hit_rate"]
    found = f"{100 * rate:.1f} % of {asked:,} rows asked below the device were there; " if rate is not None else ""
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
