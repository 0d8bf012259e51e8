"""What explain tells of rows, against a training run in which every window was recorded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.errors import ConfigError, IdError, RunError
from hotbed.forecast.explain import explain, top_rows
from hotbed.forecast.explain.history import census_of, history_of
from hotbed.forecast.explain.run import open_run
from hotbed.run.config import RunConfig
from hotbed.run.run_file import compose
from hotbed.tables.group.cached import CachedRows
from hotbed.train.build import build
from hotbed.train.loop import Training
from tests.data.small import make_dataset

BATCH = 16


class Seen(NamedTuple):
    """What a cache held after a window was decided."""

    learns: bool
    num_batches: int
    keys: set[int]


class Recorded(NamedTuple):
    """A run, and all that its cache did before its last checkpoint."""

    folder: Path
    windows: list[Seen]
    start: set[int]  # keys before the first window
    training: Training


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "data"
    make_dataset(path, {"train": [300, 120], "valid": [50]})
    return path


def settings(data, **changes) -> RunConfig:
    sets = [f"data.batch_size={BATCH}", "data.eval_batch_size=16", "model.dim=4", "model.options.hidden=[8]"]
    sets += [
        "train.device=cpu",
        "train.epochs=3",
        "tables.cache=0.3",
        "train.keep_best=false",
        "tables.optimizer=adagrad",
    ]
    sets += [f"{name}={value}" for name, value in changes.items()]
    config, problems = compose(None, {"data.path": str(data)}, sets)
    assert not problems, problems
    return config


def train(config: RunConfig, folder, monkeypatch, until: int = 10**9) -> Recorded:
    """Train so many steps, and write down what the cache holds whenever it has decided."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    windows: list[Seen] = []
    start: set[int] = set()
    begin, finish = CachedRows.begin, CachedRows.finish
    learning = []

    def noted_begin(group, window, learns):
        learning.append(learns)
        return begin(group, window, learns)

    def noted_finish(group, window, decision, ticket):
        found = finish(group, window, decision, ticket)
        keys = set(group.cache.resident()[0].tolist())
        windows.append(Seen(learning.pop(0), len(window), keys))
        return found

    monkeypatch.setattr("hotbed.train.loop.load_kernels", lambda *_: None)  # its twin is no row of the run
    monkeypatch.setattr(CachedRows, "begin", noted_begin)
    monkeypatch.setattr(CachedRows, "finish", noted_finish)
    built = build(config, Dataset.open(config.data.path), folder)
    training = built.training
    training.train(lambda: training.progress.step >= until)
    training.close()
    monkeypatch.undo()
    if config.tables.policy == "static":
        start = windows.pop(0).keys
    return Recorded(folder, windows, start, training)


def moves_of(recorded: Recorded, key: int) -> list[tuple[int, bool, bool]]:
    """By the record: (step, into the cache, while training)."""
    found, here = [], key in recorded.start
    if here:
        found.append((0, True, False))
    trained = 0
    for window in recorded.windows:
        step = trained + 1 if window.learns else trained
        if (key in window.keys) != here:
            here = not here
            found.append((step, here, window.learns))
        trained += window.num_batches if window.learns else 0
    return found


@pytest.mark.parametrize("policy", ["oracle", "lfu", "lru", "static"])
def test_every_event_of_every_row(data, tmp_path, monkeypatch, policy):
    recorded = train(settings(data, **{"tables.policy": policy}), tmp_path / "run", monkeypatch)
    opened = open_run(tmp_path / "run")
    num_rows = sum(shape.rows for shape in opened.tables.values())
    admissions, evictions = np.zeros(num_rows, int), np.zeros(num_rows, int)
    before = set()
    for held in [recorded.start, *(window.keys for window in recorded.windows)]:
        for key in held - before:
            admissions[key] += 1
        for key in before - held:
            evictions[key] += 1
        before = held
    assert evictions.sum() > 100
    census = census_of(opened)
    assert census.agreement == 1.0
    np.testing.assert_array_equal(census.admissions, admissions)
    np.testing.assert_array_equal(census.evictions, evictions)
    busy = np.argsort(-evictions)[:3].tolist()
    for key in [*busy, int(np.argmax(census.lookups)), int(np.argmin(census.lookups))]:
        found = history_of(opened, key)
        assert [tuple(move) for move in found.moves] == moves_of(recorded, key)
        assert found.agreement == 1.0


def test_uses_are_those_of_the_batches(data, tmp_path, monkeypatch):
    train(settings(data), tmp_path / "run", monkeypatch)
    opened = open_run(tmp_path / "run")
    loader = Loader(opened.dataset, "train", batch_size=BATCH, shuffle=True, seed=opened.config.train.seed)
    table = next(feature.name for feature in opened.dataset.schema.features if not feature.multi)
    singles = [feature.name for feature in opened.dataset.schema.features if not feature.multi]
    column, steps, lookups, step = singles.index(table), [], 0, 0
    for epoch in range(3):
        for batch in loader.epoch(epoch):
            step += 1
            times = int((batch.ids[:, column] == 1).sum())
            lookups += times
            steps += [step] if times else []
    found = explain(tmp_path / "run", table, id=1)
    assert (found.uses.lookups, found.uses.batches) == (lookups, len(steps))
    assert (found.uses.first_step, found.uses.last_step) == (steps[0], steps[-1])
    assert found.next_use.step is None
    assert found.next_use.every == pytest.approx(step / len(steps))
    assert found.norms.weight > 0
    assert list(found.norms.states) == ["sum_of_squares"]
    first, *_ = top_rows(tmp_path / "run", table, 3)[0]
    assert first.lookups >= lookups


@pytest.mark.parametrize("policy", ["oracle", "lru"])
def test_a_run_that_stands_in_an_epoch(data, tmp_path, monkeypatch, policy):
    recorded = train(settings(data, **{"tables.policy": policy}), tmp_path / "run", monkeypatch, until=40)
    opened = open_run(tmp_path / "run")
    assert (opened.epoch, opened.batch) == (1, 40 - opened.num_batches)
    census = census_of(opened)
    assert census.agreement == 1.0
    assert set(np.flatnonzero(census.admissions - census.evictions).tolist()) == recorded.windows[-1].keys
    loader = Loader(opened.dataset, "train", batch_size=BATCH, shuffle=True, seed=opened.config.train.seed)
    coming = [batch.ids[:, 0] for epoch in (1, 2) for batch in loader.epoch(epoch)][opened.batch :]
    for row in (3, 7, 11):
        steps = [41 + number for number, ids in enumerate(coming) if bool((ids == row).any())]
        found = explain(tmp_path / "run", "a", id=row)
        assert found.next_use.step == (steps[0] if steps else None)
        assert any("step 40 of 81" in note for note in found.notes)
    held = sorted(key for key in recorded.windows[-1].keys if key < 1000)
    for row in held[:3]:
        score = explain(tmp_path / "run", "a", id=row).score
        assert score.num_rows == len(recorded.windows[-1].keys)
        assert score.lowest <= score.score
        assert 0 <= score.rank < score.num_rows


def test_errors_name_what_there_is(data, tmp_path, monkeypatch):
    train(settings(data), tmp_path / "run", monkeypatch)
    table = open_run(tmp_path / "run").dataset.schema.features[0].name
    with pytest.raises(ConfigError, match=rf"no such table\. Its tables are: .*{table}"):
        explain(tmp_path / "run", "colour", id=1)
    with pytest.raises(IdError, match=r"--id 99999999: table .* has the rows 0 to"):
        explain(tmp_path / "run", table, id=99_999_999)
    with pytest.raises(ConfigError, match="give one of --id"):
        explain(tmp_path / "run", table)
    with pytest.raises(ConfigError, match="listed by uses or evictions"):
        top_rows(tmp_path / "run", table, 3, "beauty")
    with pytest.raises(RunError, match="is not a folder"):
        explain(tmp_path / "nothing", table, id=1)


def test_a_run_without_a_cache(data, tmp_path, monkeypatch):
    train(settings(data, **{"tables.cache": 0.0}), tmp_path / "run", monkeypatch)
    table = open_run(tmp_path / "run").dataset.schema.features[0].name
    found = explain(tmp_path / "run", table, id=1)
    assert found.place.where == "device"
    assert found.history.moves == []
    assert any("no cache" in note for note in found.notes)
    with pytest.raises(ConfigError, match="has no cache"):
        top_rows(tmp_path / "run", table, 3, "evictions")
