"""A small click log by the hour: a dataset that says how its rows are read, and files that arrive later."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare

START = 1_700_000_400 // 3600 * 3600  # the beginning of an hour
SETTINGS = (
    "model.dim=4",
    "model.options.hidden=[8]",
    "model.options.dropout=0.3",
    "data.batch_size=32",
    "train.log_every=3",
    "train.device=cpu",
    "follow.settle_seconds=0",
    "follow.poll_seconds=0.01",
)


def write_hour(path: Path, hour: int, rows: int = 100, users: int = 40) -> Path:
    """Clicks of one hour, in order of time; each hour has users that no earlier one had."""
    rng = np.random.default_rng(hour)
    user, ad = rng.integers(hour, hour + users, rows), rng.integers(0, 8, rows)
    times = START + 3600 * hour + np.sort(rng.integers(0, 3600, rows))
    click = (rng.random(rows) < 1 / (1 + np.exp(2 - ad / 2))).astype(int)
    lines = [f"{t},{c},u{u},a{a},{p:.3f}" for t, c, u, a, p in zip(times, click, user, ad, rng.normal(size=rows))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["ts,click,user,ad,price", *lines]) + "\n")
    return path


def prepare_clicks(folder: Path, ids_mode: str = "vocabulary") -> Dataset:
    """The dataset of hour 0; --time makes ts the time column."""
    raw = write_hour(folder / "raw" / "hour-0.csv", 0, 300)
    split = {"train": 0.8, "valid": 0.2}
    prepare([raw], folder / "clicks", label="click", split=split, time_column="ts", ids_mode=ids_mode)
    return Dataset.open(folder / "clicks")
