"""A run with a table of a given size and a chain of checkpoints, and bodies of requests: what the benchmark serves and sends.

Nothing is trained for long: rows are drawn, written by one full checkpoint, then changed by a few training steps for every
further one. Made once and kept.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import torch

from hotbed.checkpoint.chain import folders_in
from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.run.run_file import compose
from hotbed.train.build import build

NUMBERS, IDS = 13, 26
DIM = 16
DISTINCT = (
    1460,
    583,
    10131227,
    2202608,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8351593,
    3194,
)  # values of Criteo's features
DISTINCT += (27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
SKEW = 1.05
_LOG_ROWS = 200_000


def names() -> tuple[list[str], list[str]]:
    """(number columns, id columns)."""
    return [f"I{n + 1}" for n in range(NUMBERS)], [f"C{n + 1}" for n in range(IDS)]


def make_run(folder: Path, gigabytes: float, updates: int) -> Path:
    """FOLDER/run with 1 + updates checkpoints, or more."""
    marker = folder / "made.json"
    settings = {"gigabytes": gigabytes, "updates": updates, "format": 2}
    if marker.is_file():
        made = json.loads(marker.read_text())
        if made["updates"] >= updates and made == {**settings, "updates": made["updates"]}:
            return folder / "run"
        marker.unlink()  # what is made below may fail half way
    rows = int(gigabytes * 1e9 / (4 * (DIM + 1)) / IDS)
    numbers, ids = names()
    prepare(
        _log(), folder / "data", label="click", dense=numbers, ids=ids, ids_mode="hash", hash_rows=rows, overwrite=True
    )
    dataset, run = Dataset.open(folder / "data"), folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    sets = [
        f"model.dim={DIM}",
        "tables.optimizer=sgd",
        "tables.lr=0.05",
        "train.checkpoint_full_every=8",
        "train.epochs=1000",
    ]
    sets += ["train.keep_checkpoints=1000", "train.checkpoint_every=1000000", "train.device=cpu"]
    config, problems = compose(None, {"data.path": str(dataset.path), "data.batch_size": 4096}, sets)
    assert problems == [], problems
    (run / "config.json").write_text(config.to_json())
    built = build(config, dataset, run)
    tables = built.training.learner.tables
    generator = torch.Generator().manual_seed(1)
    with tables.snapshot(touched=True):  # from here on it is known which rows were written
        pass
    for name in tables.tables:
        tables.load_weight(name, torch.randn(rows, DIM + 1, generator=generator) * 0.05)
    for step in range(1, updates + 2):
        built.training.train(lambda step=step: built.training.progress.step >= step)
    built.training.close()
    assert len(folders_in(run / "checkpoints")) == updates + 1
    marker.write_text(json.dumps(settings))
    return run


def make_bodies(count: int, candidates: int, in_context: int, *, spread: bool = False, seed: int = 5) -> list[bytes]:
    """Bodies of requests; `in_context` of the id features hold for all candidates of one.

    Ids are Zipf over the values of Criteo's features, or, spread, uniform: every row of every table is equally likely.
    """
    rng = np.random.default_rng(seed)
    numbers, ids = names()
    half = NUMBERS // 2
    bodies = []
    for _ in range(count):
        if spread:
            drawn = rng.integers(0, 1 << 32, (IDS, candidates)).tolist()
        else:
            drawn = [_zipf(rng, candidates, distinct) for distinct in DISTINCT]
        integers = rng.geometric(0.05, (len(numbers), candidates))
        values = {name: [f"{one:08x}" for one in row] for name, row in zip(ids, drawn)}
        counts = dict(zip(numbers, integers.tolist()))
        context = {name: values.pop(name)[0] for name in ids[:in_context]}
        if in_context:
            context |= {name: counts.pop(name)[0] for name in numbers[:half]}
        bodies.append(orjson.dumps({"context": context, "candidates": counts | values}))
    return bodies


def malformed(good: bytes, candidates: int) -> list[bytes]:
    """Requests that must be refused, one of each kind."""
    tree = orjson.loads(good)
    column = next(iter(tree["candidates"]))

    def changed(**parts: object) -> bytes:
        return orjson.dumps({**tree, **parts})

    return [
        b"",
        good[: len(good) // 2],
        b"[]",
        b"{}",
        b"nonsense \xff\xfe",
        changed(context=[]),
        changed(candidates={}),
        changed(candidates={**tree["candidates"], column: [1]}),
        changed(candidates={**tree["candidates"], "no such feature": [1] * candidates}),
        changed(candidates={name: one for name, one in tree["candidates"].items() if name != column}),
        changed(candidates={**tree["candidates"], column: [{"a": 1}] * candidates}),
        changed(candidates={**tree["candidates"], column: ["x"] * candidates}) if column.startswith("I") else b"7",
        changed(rows=[{}]),
        changed(more=1),
        b'{"candidates": {"a": ' + b"[" * 5000,
    ]


def _log() -> pa.Table:
    """A raw log of Criteo's form."""
    rng = np.random.default_rng(0)
    numbers, ids = names()
    columns: dict[str, object] = {"click": rng.integers(0, 2, _LOG_ROWS)}
    columns |= {name: rng.geometric(0.05, _LOG_ROWS) for name in numbers}
    columns |= {
        name: [f"{one:08x}" for one in _zipf(rng, _LOG_ROWS, distinct)] for name, distinct in zip(ids, DISTINCT)
    }
    return pa.table(columns)


def _zipf(rng: np.random.Generator, count: int, distinct: int) -> list[int]:
    """Ranks by a power law over that many values, by inverting its continuous form."""
    power = 1 - SKEW
    ranks = ((rng.random(count) * ((distinct + 1) ** power - 1)) + 1) ** (1 / power)
    found: list[int] = (np.minimum(ranks.astype(np.int64), distinct) - 1).tolist()
    return found
