"""A small dataset directory with everything in it: numbers, ids of every mode, bags, three splits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.checkpoint.chain import find
from hotbed.data.schema import DenseColumn, IdFeature, Schema, Split

ROWS = {"train": 1000, "valid": 400, "test": 300}


def write_dataset(directory: Path, rows: dict[str, int] = ROWS, seed: int = 0) -> Path:
    """Ids carry the signal: a hidden weight per id of `user` and `ad`."""
    rng = np.random.default_rng(seed)
    weights = {"user": rng.normal(size=50), "ad": rng.normal(size=20)}
    splits = {}
    for split, count in rows.items():
        user, ad = rng.integers(1, 50, count), rng.integers(0, 20, count)
        lengths = rng.integers(0, 4, count)
        tags = [rng.integers(0, 9, length).tolist() for length in lengths]
        price = rng.normal(size=count)
        logit = 1.5 * (weights["user"][user] + weights["ad"][ad]) + price
        label = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        table = pa.table(
            {
                "click": pa.array(label, pa.float32()),
                "price": pa.array(price, pa.float32()),
                "age": pa.array(rng.normal(size=count), pa.float32()),
                "user": pa.array(user, pa.int32()),
                "tags": pa.array(tags, pa.list_(pa.int64())),
                "ad": pa.array(ad, pa.int64()),
                "site": pa.array(rng.integers(-(2**62), 2**62, count), pa.int64()),
            }
        )
        (directory / split).mkdir(parents=True)
        pq.write_table(table, directory / split / "part-00000.parquet", row_group_size=170)
        splits[split] = Split((f"{split}/part-00000.parquet",), (count,), int(label.sum()))
    features = (
        IdFeature("user", 50),
        IdFeature("tags", 9, mode="direct", multi=True),
        IdFeature("ad", 20, mode="direct"),
        IdFeature("site", 31, mode="hash"),
    )
    (directory / "counts").mkdir()
    for feature in features:
        ids = np.arange(feature.rows - 1, dtype=np.int64) * 7
        pq.write_table(pa.table({"id": ids, "count": ids[::-1] + 1}), directory / "counts" / f"{feature.name}.parquet")
    dense = (DenseColumn("price"), DenseColumn("age"))
    Schema("click", dense, features, splits, best_auc={"test": 0.95}, notes={"bad_rows": 3}).save(directory)
    return directory


SMALL = (
    "model.dim=4",
    "model.options.hidden=[8]",
    "model.options.dropout=0.3",
    "train.log_every=5",
    "train.device=cpu",
)
TIMING = ("samples_per_s", "seconds", "times", "memory", "cache", "tiers")


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock said, or what cache and tiers did for it."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMING} for line in found]


def model_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of the trained model."""
    files = sorted(path for path in (folder / "model").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def saved_step(folder: Path) -> int:
    """Where the newest checkpoint of a run was taken."""
    return find(folder).manifest.document["progress"]["step"]
