"""A run directory as train/ leaves it, small, with every file; tests take away or damage what they are about."""

import json
import math
from itertools import accumulate

import pytest


def curve_of(size):
    sums = list(accumulate(1 / rank for rank in range(1, size + 1)))
    return [[rank / size, sums[rank - 1] / sums[-1]] for rank in range(1, size + 1, max(1, size // 30))]


def train_line(step, **changes):
    line = {
        "kind": "train",
        "epoch": step // 60,
        "step": step,
        "samples": step * 100,
        "loss": 0.4 + 0.3 * math.exp(-step / 20) + 0.01 * math.sin(step),
        "lr": 0.001,
        "auc": 0.75 - 0.2 * math.exp(-step / 20),
        "samples_per_s": 20_000 + step,
        "seconds": step / 10,
        "times": times_of(step),
        "memory": memory_of(step),
    }
    return {**line, **changes}


def cache_of(step, **changes):
    """The `cache` of a train line: the cache fills, so misses become fewer."""
    missing = 100 + 300 * math.exp(-step / 20)
    made = {
        "batches": 1,
        "hit_rate": 1 - missing / 1000,
        "lookup_hit_rate": 1 - missing / 4000,
        "keys": 1000,
        "misses": missing,
        "created": missing / 2,
        "evictions": 80,
        "written_back": 60,
        "bytes_in": missing / 2 * 64,
        "bytes_out": 60 * 64,
        "stall_share": 0.02,
    }
    return {**made, **changes}


def tiers_of(step, **changes):
    """The `tiers` of a train line: memory holds more and more of what is asked; all that is written stays written."""
    rate = 1 - 0.5 * math.exp(-step / 30)
    made = {
        "memory_hit_rate": rate,
        "from_memory": 200 * rate,
        "from_ssd": 200 * (1 - rate),
        "to_ssd": 100,
        "bytes_from_memory": 200 * rate * 64,
        "bytes_read": 200 * (1 - rate) * 80,
        "bytes_written": 100 * 80,
        "bytes_compacted": 1000,
        "wear": step * 8000,
        "compactions": step // 10,
        "memory_slots": 5000,
        "memory_rows": 4000,
        "memory_bytes": 3 << 20,
        "memory_budget": 4 << 20,
        "ssd_bytes": 10_000 * step,
        "ssd_cap": 2 << 20,
        "ssd_live_bytes": 7_500 * step,
        "ssd_stale_bytes": 2_500 * step,
        "ssd_segments": 3,
        "live_share": 0.75,
        "resident_bytes": (200 << 20) + 1000 * step,
    }
    return {**made, **changes}


def times_of(step, **changes):
    """The `times` of a train line; the first takes longer."""
    slow = 20 if step == 1 else 1
    parts = {"reader": 1e-4, "plan": 3e-4, "wait": 0, "copy": 2e-4, "look_up": 1e-3, "model": 5e-3 * slow}
    return {"steps": 1, **parts, "update": 8e-4, "dense": 3e-4, "other": 1e-4, "ready": 6.5, **changes}


def memory_of(step, **changes):
    """The `memory` of a train line."""
    return {"resident_bytes": (300 << 20) + 1000 * step, **changes}


def ids_of(step, **changes):
    """The `ids` of a train line."""
    user = {"seen": 100 * step, "admitted": 10 * step, "rejected": 20 * step, "expired": 2 * step, "rows": 8 * step}
    ad = {"seen": 100 * step, "admitted": 3, "rejected": 0, "expired": 0, "rows": 3}
    return {"user": user, "ad": ad, **changes}


def eval_line(step, split="valid", **changes):
    line = {"kind": "eval", "epoch": 0, "step": step, "samples": step * 100, "split": split, "seconds": step / 10}
    metrics = {"auc": 0.74, "log_loss": 0.45, "normalized_entropy": 0.83, "calibration": 1.02, "positives": 250}
    return {**line, **metrics, **changes}


def skew(name, size, **changes):
    return {"name": name, "rows": size + 1, "distinct": size, "top_share": 0.5, "curve": curve_of(size), **changes}


def full_run():
    """File name -> what it holds."""
    score = {
        "auc": 0.7741,
        "pr_auc": 0.3517,
        "log_loss": 0.4533,
        "normalized_entropy": 0.8012,
        "calibration": 1.018,
        "positives": 253,
    }
    return {
        "config.json": {
            "data": {"path": "criteo-like", "batch_size": 4096},
            "model": {"name": "deepfm", "dim": 10, "options": {"hidden": [64, 32]}},
        },
        "data.json": {
            "splits": {
                "train": {"rows": 12_000, "positive_rate": 0.25},
                "test": {"rows": 1_000, "positive_rate": 0.253},
            },
            "features": [skew("C1", 50), skew("C2", 300), skew("C3", 3)],
            "total": skew("total", 353, top_share=0.7625),
        },
        "metrics.jsonl": [
            *(train_line(step) for step in range(1, 121)),
            eval_line(60),
            eval_line(120, auc=0.7759),
            eval_line(120, "test", auc=0.7741),
        ],
        "summary.json": {
            "model": "deepfm",
            "dataset": "criteo-like",
            "device": "cpu",
            "parameters": {"dense": 5_000, "rows": 356, "row_values": 3_916},
            "final": {"valid": {**score, "auc": 0.7759}, "test": score},
            "best_auc": {"test": 0.7889},
            "gap": {"test": 0.0148},
            "seconds": 141.2,
            "train_seconds": 118.3,
            "samples": 12_000,
            "samples_per_s": 20_312.2,
            "bad_rows": 3,
            "calibration_curve": [[k / 20, k / 20 + 0.01, 50] for k in range(1, 19)],
            "versions": {"hotbed": "0.1.0", "torch": "2.13.0"},
            "finished": True,
            "stopped_because": "all epochs done",
        },
    }


@pytest.fixture
def make_run(tmp_path):
    """make_run(**{"summary.json": None, ...}): the full run with some files replaced; None leaves a file out."""

    def make(**changes):
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        for name, content in {**full_run(), **changes}.items():
            if isinstance(content, bytes):
                (run / name).write_bytes(content)
            elif isinstance(content, list):
                (run / name).write_text("".join(json.dumps(line) + "\n" for line in content))
            elif content is not None:
                (run / name).write_text(json.dumps(content))
        return run

    return make


@pytest.fixture
def whole_run():
    return full_run()


@pytest.fixture
def lines():
    """The makers of single lines of metrics.jsonl."""
    return train_line, eval_line


@pytest.fixture
def cached_run():
    """Changes that make the full run one with a cache."""
    whole = full_run()
    metrics = [
        {**line, "cache": cache_of(line["step"])} if line["kind"] == "train" else line
        for line in whole["metrics.jsonl"]
    ]
    sizes = {"slots": 6, "device_bytes": 2048, "table_bytes": 3 << 20}
    return {
        "metrics.jsonl": metrics,
        "summary.json": {**whole["summary.json"], "cache": sizes},
        "config.json": {**whole["config.json"], "tables": {"cache": 0.015, "policy": "oracle"}},
    }


@pytest.fixture
def tiered_run(cached_run):
    """Changes that make the full run one with three tiers and dynamic ids."""
    metrics = [
        {**line, "tiers": tiers_of(line["step"]), "ids": ids_of(line["step"])} if line["kind"] == "train" else line
        for line in cached_run["metrics.jsonl"]
    ]
    return {**cached_run, "metrics.jsonl": metrics}


@pytest.fixture
def feature():
    return skew
