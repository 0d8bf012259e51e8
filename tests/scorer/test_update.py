"""Newer checkpoints while others score: every batch by one version as a whole, to the bit, in every way a version can come."""

import json
import os
import shutil
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

import hotbed
from hotbed.checkpoint.chain import find
from hotbed.checkpoint.layouts import entries_of
from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import RunError, StoreError
from hotbed.export.write import ExportOptions, export
from hotbed.host.atomic import exchange
from hotbed.scorer import Scorer, kernels, live
from hotbed.scorer.checkpoints import source_of
from hotbed.scorer.source import open_source
from hotbed.train.run import run
from tests.scorer.conftest import start
from tests.scorer.test_scorer import batches
from tests.train.small import write_dataset

STEPS = range(3, 25, 3)
KINDS = {
    "plain": (),
    "dynamic": ("tables.dynamic=true",),
    "shared": ("tables.dynamic=[user, site]", "tables.admit=after 2", "tables.expire=unused 4 steps, every 1"),
    "ssd": ("tables.memory=16KiB", "tables.ssd={run}/ssd:16MiB"),
    "dynamic ssd": (
        "tables.dynamic=true",
        "tables.expire=unused 4 steps, every 1",
        "tables.memory=256KiB",
        "tables.ssd={run}/ssd:16MiB",
    ),
}


@pytest.fixture(scope="module", params=list(KINDS))
def history(request, dataset, tmp_path_factory):
    """A run's checkpoints, full and incremental, and what its tables scored at each of them."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "-")) / "run"
    sets = ("train.checkpoint_every=1000", "train.checkpoint_full_every=4", "train.keep_checkpoints=100")
    built = start(folder, dataset, "train.epochs=3", *sets, *KINDS[request.param])
    learner, saved = built.training.learner, {}
    for step in STEPS:
        built.training.train(lambda: built.training.progress.step >= step)  # noqa: B023
        saved[find(folder).name] = [learner.score(batch) for batch in batches(dataset)]
    built.training.close()
    return request.param, folder, saved


def scorer_of(folder, name, memory="200KB", *, mapped=False):
    source = source_of([find(folder / "checkpoints" / name)])
    return Scorer(source, memory, "cpu", folder, updated=True, mapped=mapped)


def test_every_version_in_its_turn(history, dataset):
    _, folder, saved = history
    first, *rest = saved
    with scorer_of(folder, first, "2MB") as scorer:
        ways = []
        for name in rest:
            ways.append(scorer.update([find(folder / "checkpoints" / name)]))
            for batch, logits in zip(batches(dataset), saved[name], strict=True):
                assert torch.equal(scorer.logits(batch).logits, logits)
            assert scorer.num_bytes <= 2_000_000
        assert scorer.update([find(folder)]) == "same"
    assert ways == [find(folder / "checkpoints" / name).manifest.kind for name in rest]
    assert ways.count("incremental") >= 3
    assert "full" in ways


@pytest.mark.parametrize("mapped", [False, True])
def test_files_that_are_shared_are_never_written(history, dataset, mapped):
    """Forked processes read them, each at a version of its own."""
    _, folder, saved = history
    first, *rest = saved
    with scorer_of(folder, first, mapped=mapped) as scorer:
        scorer.share()
        handles = scorer.live.rows.files.handles[:, kernels.IN_SHARED]
        shared = [os.dup(handle) for handle in handles if handle >= 0]  # a whole update closes its own
        before = [os.pread(handle, 1 << 24, 0) for handle in shared]
        assert before
        for name in (*rest, first, rest[-1]):
            scorer.update([find(folder / "checkpoints" / name)])
            for batch, logits in zip(batches(dataset), saved[name], strict=True):
                assert torch.equal(scorer.logits(batch).logits, logits)
            assert scorer.num_bytes <= 200_000
            assert [os.pread(handle, 1 << 24, 0) for handle in shared] == before
    for handle in shared:
        os.close(handle)


def test_several_steps_at_once_and_back(history, dataset):
    _, folder, saved = history
    names = list(saved)
    with scorer_of(folder, names[0]) as scorer:
        for name in (names[2], names[-1], names[1]):
            scorer.update([find(folder / "checkpoints" / name)])
            for batch, logits in zip(batches(dataset), saved[name], strict=True):
                assert torch.equal(scorer.logits(batch).logits, logits)


@pytest.mark.parametrize("mapped", [False, True])
def test_batches_are_of_one_version_while_versions_change(history, dataset, mapped):
    kind, folder, saved = history
    every = batches(dataset)
    known = {name: saved[name] for name in saved}
    stop, wrong, seen = threading.Event(), [], set()

    def score(scorer):
        while not stop.is_set():
            for batch, number in zip(every, range(len(every))):
                found = scorer.logits(batch)
                name = next((one for one in known if torch.equal(known[one][number], found.logits)), None)
                seen.add(name)
                if name is None or f"step-{int(name)}-" not in found.version:
                    wrong.append((number, name, found.version))

    with scorer_of(folder, next(iter(saved)), "30KB" if kind in ("plain", "ssd") else "200KB", mapped=mapped) as scorer:
        threads = [threading.Thread(target=score, args=(scorer,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        rounds = 0
        while rounds < 3 or (len(seen) < 2 and rounds < 1000):
            rounds += 1
            for name in saved:
                scorer.update([find(folder / "checkpoints" / name)])
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(seen) > 1


def test_damage_leaves_the_old_version(history, dataset, tmp_path):
    _, folder, saved = history
    names = list(saved)
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    with scorer_of(copy, names[0]) as scorer:
        damaged = [
            *(copy / "checkpoints" / names[1]).glob("rows/*"),
            *(copy / "checkpoints" / names[1]).rglob("*.rows"),
        ]
        for file in damaged:
            content = np.fromfile(file, dtype=np.uint8)
            content[64:] ^= 1  # after the header of a segment
            content.tofile(file)
        with pytest.raises((RunError, StoreError), match="checksum"):
            scorer.update([find(copy / "checkpoints" / names[1])])
        for batch, logits in zip(batches(dataset), saved[names[0]], strict=True):
            assert torch.equal(scorer.logits(batch).logits, logits)


def test_a_disk_that_refuses_leaves_the_old_version(history, dataset, monkeypatch):
    kind, folder, saved = history
    first, second, third, *_ = saved
    with scorer_of(folder, first) as scorer:
        real, calls = scorer.live.rows.write, []

        def refuse(*given):
            calls.append(given)
            if len(calls) > 1:  # some of the rows are written by then
                raise StoreError("full")
            real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(scorer.live.rows, "write", refuse)
            with pytest.raises(StoreError, match="full"):
                scorer.update([find(folder / "checkpoints" / second)])
        for name in (first, second, third):
            if name != first:
                way = scorer.update([find(folder / "checkpoints" / name)])
                kept = find(folder / "checkpoints" / name).manifest.kind
                anew = name == second and any("dynamic" in one for one in KINDS[kind])
                assert way == ("whole" if anew else kept)
            for batch, logits in zip(batches(dataset), saved[name], strict=True):
                assert torch.equal(scorer.logits(batch).logits, logits)


def test_from_a_model_to_a_checkpoint(trained, dataset):
    folder = trained("plain")
    with Scorer(open_source(folder), "64KB", "cpu", folder, updated=True) as scorer:
        before = [scorer.logits(batch).logits for batch in batches(dataset)]
        assert scorer.update([find(folder)]) == "whole"
        after = [scorer.logits(batch).logits for batch in batches(dataset)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("dims", [(4, 8), (8, 4)])
def test_replaced_by_a_model_of_another_width(dims, dataset, tmp_path):
    for dim in dims:
        built = start(tmp_path / str(dim), dataset, f"model.dim={dim}")
        run(built.training, built.subject)
    old, new = (tmp_path / str(dim) for dim in dims)
    with Scorer(open_source(new), "64KB", "cpu", tmp_path) as scorer:
        wanted = [scorer.logits(batch).logits for batch in batches(dataset)]
    with Scorer(open_source(old), "64KB", "cpu", tmp_path, updated=True) as scorer:
        before = scorer.live
        [scorer.logits(batch) for batch in batches(dataset)]
        assert scorer.replace(open_source(new)) == "whole"
        for live in (before, scorer.live):
            assert live.rows.cache.rows.shape[1] == live.rows.dim
        for _ in range(2):
            found = [scorer.logits(batch).logits for batch in batches(dataset)]
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert scorer.num_bytes <= 64_000


def test_a_replacement_by_larger_tables_stays_within_memory(trained, dataset, tmp_path):
    """The marks of more rows leave less for the cache."""
    old = trained("plain")
    write_dataset(tmp_path / "large")
    tree = json.loads((tmp_path / "large" / "schema.json").read_text())
    next(one for one in tree["features"] if one["name"] == "site")["rows"] = 20_000
    (tmp_path / "large" / "schema.json").write_text(json.dumps(tree))
    built = start(tmp_path / "run", Dataset.open(tmp_path / "large"))
    run(built.training, built.subject)
    with Scorer(open_source(old), "9KB", "cpu", tmp_path, updated=True) as scorer:
        scorer.replace(open_source(tmp_path / "run"))
        assert scorer.num_bytes <= 9_000


def retrained(root, day, *, dense):
    """A run on the log of a day, in the same folders every day; frequent users become rare ones, so ids are renumbered."""
    rng = np.random.default_rng(3)
    user = np.minimum(rng.geometric(0.12, 800) - 1, 20)
    user[:21] = np.arange(21)
    columns = {
        "click": (rng.random(800) < 0.1 + 0.8 * (user % 2)).astype(np.int64),
        "price": rng.normal(size=800).round(3) * (1 + day) + 5 * day,
        "user": [f"u{one}" for one in (user + 7 * day) % 21],
    }
    names = ("price",) if dense else ()
    kept = pa.table({name: columns[name] for name in ("click", *names, "user")})
    prepare(kept, root / "clicks", label="click", dense=names, ids=("user",), workers=1, overwrite=True)
    shutil.rmtree(root / "run", ignore_errors=True)
    built = start(root / "run", Dataset.open(root / "clicks"), "train.epochs=2")
    run(built.training, built.subject)
    return {name: columns[name] for name in (*names, "user")}


def test_a_checkpoint_of_a_dataset_that_was_prepared_again_is_loaded_whole(tmp_path):
    retrained(tmp_path, 0, dense=True)
    shutil.rmtree(tmp_path / "run" / "model")
    with Scorer(open_source(tmp_path / "run"), "1MB", "cpu", tmp_path, updated=True) as scorer:
        asked = retrained(tmp_path, 1, dense=True)
        shutil.rmtree(tmp_path / "run" / "model")
        assert scorer.update(entries_of(tmp_path / "run")) == "whole"
        with hotbed.load(tmp_path / "run") as fresh:
            np.testing.assert_array_equal(scorer.score(asked), fresh.score(asked))


@pytest.mark.parametrize("exported", [False, True])
def test_a_model_whose_ids_are_numbered_anew_under_an_equal_schema(tmp_path, exported):
    def written(day):
        asked = retrained(tmp_path, day, dense=False)
        if exported:
            export(tmp_path / "run", tmp_path / "export", ExportOptions(onnx=False, overwrite=True))
        return asked

    written(0)
    place = tmp_path / "export" if exported else tmp_path / "run"
    with Scorer(open_source(place), "1MB", "cpu", tmp_path, updated=True) as scorer:
        schema = scorer.live.schema
        asked = written(1)
        scorer.replace(open_source(place))
        assert scorer.live.schema == schema
        with hotbed.load(place) as fresh:
            np.testing.assert_array_equal(scorer.score(asked), fresh.score(asked))


@pytest.fixture(scope="module")
def two_models(dataset, tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    for name, *sets in (("a",), ("b", "train.seed=7", "tables.lr=0.5")):
        built = start(root / name, dataset, *sets)
        run(built.training, built.subject)
        export(root / name, root / f"export-{name}", ExportOptions(onnx=False))
    return root


@pytest.mark.parametrize("places", [("a/model", "b/model"), ("export-a", "export-b")])
def test_a_folder_that_is_replaced_while_it_is_opened(two_models, dataset, monkeypatch, places):
    old, new = (two_models / place for place in places)
    with hotbed.load(new) as scorer:
        version, wanted = scorer.version, [scorer.logits(batch).logits for batch in batches(dataset)]
    with hotbed.load(old) as scorer:
        assert scorer.version != version
    real = live.build_dense

    def replaced(source, device):
        monkeypatch.setattr(live, "build_dense", real)
        built = real(source, device)
        assert exchange(old, new)
        return built

    monkeypatch.setattr(live, "build_dense", replaced)
    with hotbed.load(old) as scorer:
        found = [scorer.logits(batch).logits for batch in batches(dataset)]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert scorer.version == version
    assert exchange(old, new)


def test_a_folder_that_is_replaced_all_the_time_is_refused(two_models, monkeypatch):
    old, new = two_models / "a" / "model", two_models / "b" / "model"
    real = live.build_dense
    monkeypatch.setattr(live, "build_dense", lambda *given: (real(*given), exchange(old, new))[0])
    with pytest.raises(RunError, match="replaced 5 times while it was opened"):
        hotbed.load(old)
