"""A scorer that follows a run by what its checkpoints change: rows and ids that come, go and move, scored to the bit meanwhile.

Every version is compared with the tables that wrote it and with a scorer that opens the checkpoint fresh.
"""

import dataclasses
import json
import logging
import os
import shutil
import signal
import threading
import warnings

import numpy as np
import pytest
import torch

from hotbed.checkpoint.chain import Entry, find
from hotbed.checkpoint.files import dense_tensors
from hotbed.checkpoint.layouts import entries_of, steps_of
from hotbed.checkpoint.manifest import read_manifest
from hotbed.checkpoint.saver import Policy, Saver
from hotbed.checkpoint.write import State
from hotbed.errors import HotbedError
from hotbed.scorer import Scorer, live
from hotbed.scorer.checkpoints import source_of
from hotbed.scorer.owners import RowOwners
from hotbed.types import Batch, Jagged
from tests.distributed.test_train import arguments
from tests.distributed.train_ranks import TrainRanks, every_checkpoint
from tests.scorer.conftest import start

EDGES = np.array([0, -1, -2, 1, -(2**63), 2**63 - 1, -(2**63) + 1, 2**62, -(2**40)])  # those below 0 are from 2^63 on
EXPIRE = ("tables.dynamic=true", "tables.expire=unused 6 steps, every 1")
KINDS = {
    "preset": (),
    "dynamic": EXPIRE,
    "admitted": (*EXPIRE, "tables.admit=after 2", "tables.precision=bf16"),
    "ssd": ("tables.memory=16KiB", "tables.ssd={run}/ssd:16MiB"),
    "dynamic ssd": (*EXPIRE, "tables.admit=after 2", "tables.memory=4MiB", "tables.ssd={run}/ssd:64MiB"),
}
BATCH = 24
MEMORY = "4MB"


class Stream:
    """A run on made-up batches, with a checkpoint wherever the test wants one."""

    def __init__(self, folder, dataset, kind, full_every=1000):
        self.folder, self.kind, self.rng = folder, kind, np.random.default_rng(7)
        self.built = start(folder, dataset, *KINDS[kind])
        self.learner = self.built.training.learner
        self._saver = Saver(folder / "checkpoints", self.learner.tables, Policy(full_every=full_every, keep=1000))
        config = json.loads((folder / "config.json").read_text())
        self._document = {"config": config, "progress": {"data": dataset.fingerprint}}
        self.step = 0
        self.probe = self.batch(edges=True)

    def batch(self, *, edges=False):
        rng, rows = self.rng, (50, 20, 31)
        if self.kind in ("preset", "ssd"):
            ids, tags = np.stack([rng.integers(0, one, BATCH) for one in rows], 1), rng.integers(0, 9, 2 * BATCH)
        else:  # a window over ids that moves: they come, stay for a while, and some come back
            new = (rng.integers(0, 40, (BATCH, 3)) + 7 * self._step_now) % 300 * 2_654_435_761
            old = rng.choice(EDGES, (BATCH, 3))
            ids = np.where(rng.random((BATCH, 3)) < (0.5 if edges else 0.15), old, new)
            tags = rng.choice(EDGES, 2 * BATCH) if edges else rng.integers(-5, 5, 2 * BATCH) * 97
        offsets = torch.arange(0, 2 * BATCH + 1, 2)
        labels = torch.from_numpy(rng.integers(0, 2, BATCH).astype(np.float32))
        dense = torch.from_numpy(rng.normal(size=(BATCH, 2)).astype(np.float32))
        return Batch(labels, dense, torch.from_numpy(ids), {"tags": Jagged(torch.from_numpy(tags), offsets)})

    @property
    def _step_now(self):
        return getattr(self, "step", 0)

    def train(self, steps=1):
        for _ in range(steps):
            self.step += 1
            self.learner.step(self.batch())

    def save(self):
        self._saver.save(State(self.step, dense_tensors(self.learner.model, None), self._document), wait=True)
        return find(self.folder)

    def probes(self):
        """What is asked: ids of now, ids that have gone, and the edges."""
        return [self.probe, self.batch(), self.batch(edges=True)]

    @staticmethod
    def every_id():
        """All ids that a stream of dynamic ids may train."""
        ids = torch.from_numpy(np.concatenate([np.arange(300) * 2_654_435_761, EDGES]))
        count = ids.shape[0]
        tags = Jagged(ids, torch.arange(count + 1))
        return Batch(torch.zeros(count), torch.zeros(count, 2), ids[:, None].repeat(1, 3), {"tags": tags})

    def close(self):
        self.built.training.close()


@pytest.fixture
def streams(tmp_path, dataset):
    made = []

    def open_stream(kind, **given):
        made.append(Stream(tmp_path / f"run{len(made)}", dataset, kind, **given))
        return made[-1]

    yield open_stream
    for one in made:
        one.close()


def scorer_of(entries, folder, memory=MEMORY):
    return Scorer(source_of(entries), memory, "cpu", folder, updated=True)


def fresh_logits(entries, folder, probes):
    with Scorer(source_of(entries), MEMORY, "cpu", folder) as scorer:
        return [scorer.logits(one).logits for one in probes]


def equal(found, wanted):
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_version_is_that_of_a_scorer_opened_fresh(streams, kind):
    stream = streams(kind, full_every=7)
    stream.train(3)
    ways = []
    with scorer_of([stream.save()], stream.folder) as scorer:
        for number in range(11):
            stream.train((1, 4, 0, 9, 2)[number % 5])  # none: an empty delta
            entry = stream.save()
            ways.append((scorer.update([entry]), entry.manifest.kind))
            probes = stream.probes()
            found = [scorer.logits(one).logits for one in probes]
            assert equal(found, [stream.learner.score(one) for one in probes])
            assert equal(found, fresh_logits([entry], stream.folder, probes))
            assert scorer.num_bytes <= 4_000_000
    assert all(way == kind for way, kind in ways), ways
    assert [way for way, _ in ways].count("incremental") >= 6


@pytest.mark.parametrize("kind", ["dynamic", "dynamic ssd"])
def test_an_id_that_expires_and_comes_back_between_two_checkpoints(streams, kind, monkeypatch):
    """Its row of training may be another one, and another id may have got the one it had."""
    stream, freed, real = streams(kind), [], RowOwners.free

    def free(*given):
        had = real(*given)
        freed.extend(had.tolist())
        return had

    monkeypatch.setattr(RowOwners, "free", free)
    stream.train(2)
    gone, back = stream.batch(edges=True), stream.batch(edges=True)
    once = dataclasses.replace(back, ids=10**15 + torch.arange(3 * BATCH).view(BATCH, 3))
    for _ in range(2):
        stream.learner.step(once)  # ids that no other batch has
    ways = []
    with scorer_of([stream.save()], stream.folder) as scorer:
        for number in range(3):
            stream.step += 1
            stream.learner.step(gone if number % 2 else back)
            stream.train(900 if number == 0 else 12)  # past the quarantine: rows are given to others
            stream.learner.step(gone)
            ways.append(scorer.update([stream.save()]))
            probes = [*stream.probes(), gone, back, once, stream.every_id()]
            assert equal([scorer.logits(one).logits for one in probes], [stream.learner.score(one) for one in probes])
    assert ways[0] == "incremental"
    assert freed


def test_a_row_that_is_back_at_its_initial_value(streams):
    stream = streams("preset")
    tables = stream.learner.tables
    first = tables.weight("user").clone()
    stream.train(2)
    with scorer_of([stream.save()], stream.folder) as scorer:
        for weights in (first + 1, first, torch.zeros_like(first), -torch.zeros_like(first)):
            tables.load_weight("user", weights)
            stream.step += 1
            entry, probes = stream.save(), stream.probes()
            assert scorer.update([entry]) == entry.manifest.kind
            found = [scorer.logits(one).logits for one in probes]
            assert equal(found, [stream.learner.score(one) for one in probes])
            assert equal(found, fresh_logits([entry], stream.folder, probes))


@pytest.mark.parametrize("kind", list(KINDS))
def test_scores_while_versions_change_are_of_one_version(streams, kind):
    """Two threads score while versions come; every score is that of the version it names."""
    stream, updates = streams(kind), int(os.environ.get("HOTBED_UPDATES", "12"))
    stream.train(2)
    first = stream.save()
    probes = stream.probes()
    wanted = {source_of([first]).version: [stream.learner.score(one) for one in probes]}
    stop, wrong, seen = threading.Event(), [], {}

    def score(scorer):
        number = 0
        while not stop.is_set():
            number = (number + 1) % len(probes)
            found = scorer.logits(probes[number])
            seen[found.version] = seen.get(found.version, 0) + 1
            if not torch.equal(found.logits, wanted[found.version][number]):
                wrong.append((found.version, number))

    with scorer_of([first], stream.folder) as scorer:
        threads = [threading.Thread(target=score, args=(scorer,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(updates):
            stream.train(2)
            entry = stream.save()
            wanted[source_of([entry]).version] = [stream.learner.score(one) for one in probes]
            assert scorer.update([entry]) in ("incremental", "full", "whole")
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(seen) > updates // 3


def test_an_update_that_stops_anywhere_leaves_the_old_version(streams, monkeypatch):
    stream = streams("dynamic")
    stream.train(3)
    first, probes = stream.save(), stream.probes()
    old = [stream.learner.score(one) for one in probes]
    stream.train(3)
    second = stream.save()
    new = [stream.learner.score(one) for one in probes]
    assert not equal(old, new)
    for place in ("write", "differs"):
        calls = 0
        while True:  # stop at the next write each time, until an update needs no more
            with scorer_of([first], stream.folder) as scorer:
                real, left = getattr(scorer.live.rows, place), [calls]

                def stopping(*given, real=real, left=left):
                    left[0] -= 1
                    if left[0] < 0:
                        raise KeyboardInterrupt
                    return real(*given)

                monkeypatch.setattr(scorer.live.rows, place, stopping)
                try:
                    scorer.update([second])
                    done = True
                except KeyboardInterrupt:
                    done = False
                monkeypatch.undo()
                assert equal([scorer.logits(one).logits for one in probes], new if done else old)
                if not done:
                    assert scorer.update([second]) == "whole"
                    assert equal([scorer.logits(one).logits for one in probes], new)
            if done:
                break
            calls += 1
        assert calls > 3 or place == "differs"


def test_a_chain_that_breaks_is_read_anew_and_said(streams, caplog):
    stream, other = streams("dynamic", full_every=3), streams("preset")
    for one in (stream, other):
        one.train(3)
    caplog.set_level(logging.INFO, logger="hotbed.scorer")
    with scorer_of([stream.save()], stream.folder) as scorer:
        before = find(stream.folder).folder
        entry = None
        while (
            entry is None or entry.manifest.kind != "full"
        ):  # after three, or earlier if what has changed is more than all
            stream.train(2)
            entry = stream.save()
        shutil.rmtree(before)  # pruned
        probes = stream.probes()
        assert scorer.update([entry]) == "full"
        assert "does not add to" in caplog.text
        assert equal([scorer.logits(one).logits for one in probes], [stream.learner.score(one) for one in probes])
        assert scorer.update([other.save()]) == "whole"
        assert "read anew: it has other tables" in caplog.text
        probes = other.probes()
        assert equal([scorer.logits(one).logits for one in probes], [other.learner.score(one) for one in probes])


@pytest.mark.parametrize(
    ("memory", "reason"), [(60_000, "are reserved for them"), (4_000_000, "ids that had a row no longer have one")]
)
def test_ids_that_do_not_fit_or_are_mostly_gone_are_read_anew(streams, caplog, monkeypatch, memory, reason):
    monkeypatch.setattr(live, "_MOST_GONE", 64)
    stream = streams("dynamic")
    stream.train(3)
    caplog.set_level(logging.INFO, logger="hotbed.scorer")
    with scorer_of([stream.save()], stream.folder, memory) as scorer:
        for _ in range(12):
            stream.train(9)
            scorer.update([stream.save()])
            probes = stream.probes()
            assert equal([scorer.logits(one).logits for one in probes], [stream.learner.score(one) for one in probes])
            assert scorer.num_bytes <= memory
    assert reason in caplog.text


def test_a_process_that_is_killed_while_it_updates_changes_nothing(streams):
    """Files are unnamed: another process, and the next start, see nothing of it."""
    stream = streams("dynamic")
    stream.train(3)
    first = stream.save()
    stream.train(3)
    second, probes = stream.save(), stream.probes()
    there = {path.relative_to(stream.folder): path.stat().st_size for path in stream.folder.rglob("*")}
    scorer = scorer_of([first], stream.folder)
    old = [scorer.logits(one).logits for one in probes]
    scorer.share()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where tests before have left threads
        child = os.fork()
    if not child:
        try:
            scorer.live.rows.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            scorer.update([second])
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert equal([scorer.logits(one).logits for one in probes], old)
    assert scorer.update([second]) == "incremental"
    assert equal([scorer.logits(one).logits for one in probes], [stream.learner.score(one) for one in probes])
    scorer.close()
    assert {path.relative_to(stream.folder): path.stat().st_size for path in stream.folder.rglob("*")} == there


@pytest.mark.parametrize("below", ["memory", "ssd"])
def test_checkpoints_of_two_ranks(tmp_path, below, caplog):
    run = tmp_path / "run"
    given = ("--set", "tables.dynamic=[C3, C4, C7]", "--admit", "after 2", "--expire", "unused 20 steps, every 5")
    if below == "ssd":
        given += ("--memory", "1MiB", "--ssd", f"{tmp_path / 'ssd'}:64MiB")
    sets = (
        "train.keep_checkpoints=99",
        "train.checkpoint_every=6",
        "train.keep_best=false",
        "train.checkpoint_full_every=5",
    )
    given += tuple(one for name in sets for one in ("--set", name))
    ranks = TrainRanks(arguments(run, *given, epochs=1), run, prepare=every_checkpoint)
    assert ranks.ended() == [0, 0], ranks.texts()
    shutil.rmtree(run / "model", ignore_errors=True)
    first, *rest = steps_of(run / "checkpoints", 2).values()
    assert len(rest) == 8
    rng = np.random.default_rng(3)
    ways = []
    with scorer_of([Entry(one, read_manifest(one)) for one in first.folders], run) as scorer:
        probe = probe_of(scorer, rng)
        for saved in rest:
            entries = [Entry(one, read_manifest(one)) for one in saved.folders]
            ways.append(scorer.update(entries))
            assert torch.equal(scorer.logits(probe).logits, fresh_logits(entries, run, [probe])[0])
        assert scorer.update(entries_of(run)) == "same"
    assert "incremental" in ways


def probe_of(scorer, rng):
    """Ids that the model knows, and others."""
    schema, count = scorer.live.schema, 200
    columns = []
    for feature in schema.features:
        table = scorer.source.tables[feature.table]
        known = scorer.live.id_maps.get(feature.table)
        if known is None:
            columns.append(rng.integers(0, table.rows, count))
        else:
            columns.append(rng.choice(np.concatenate([known._arrays[0][: known.num_ids], EDGES]), count))
    dense = torch.from_numpy(rng.normal(size=(count, len(schema.dense))).astype(np.float32))
    return Batch(torch.zeros(count), dense, torch.from_numpy(np.stack(columns, 1)), {})


def test_a_refused_update_is_a_hotbed_error(streams):
    stream = streams("dynamic")
    stream.train(3)
    with scorer_of([stream.save()], stream.folder) as scorer:
        stream.train(2)
        entry = stream.save()
        (entry.folder / "dense.safetensors").write_bytes(b"")
        with pytest.raises(HotbedError):
            scorer.update([entry])
