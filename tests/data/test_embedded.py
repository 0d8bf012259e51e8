"""Named datasets: built once, whole, under a lock, again when damaged."""

import os
import shutil

import numpy as np
import pytest

import hotbed.data
from hotbed.data import embedded
from hotbed.data.dataset import Dataset
from hotbed.data.embedded import resolve
from hotbed.data.loader.loader import Loader
from hotbed.errors import ConfigError, DataError, SchemaError
from tests.data.small import make_dataset
from tests.distributed.ranks import _context

NAME = "criteo-like:300"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache that holds NAME and adult."""
    cache = tmp_path_factory.mktemp("cache")
    resolve(NAME, cache)
    resolve("adult", cache)
    return cache


@pytest.fixture
def cache(built, tmp_path):
    return shutil.copytree(built, tmp_path / "cache")


def forbid_building(monkeypatch):
    def build(*args, **kwargs):
        raise AssertionError("built again")

    monkeypatch.setattr(embedded, "write_dataset", build)
    monkeypatch.setattr(embedded, "prepare", build)


def files_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_sizes_follow_the_name(built):
    splits = resolve(NAME, built).schema.splits
    assert {name: split.rows for name, split in splits.items()} == {"train": 300, "valid": 300, "test": 300}
    seen = {}
    for rows in (1, 9_999, 250_000, 2_000_000):
        recipe = embedded._build_plan(f"criteo-like:{rows}", None)
        seen[rows] = recipe.build.keywords["valid"]
    assert seen == {1: 1, 9_999: 9_999, 250_000: 25_000, 2_000_000: 200_000}
    assert (
        embedded._build_plan("criteo-like", None).folders == embedded._build_plan("criteo-like:2_000_000", None).folders
    )


def test_a_built_dataset_is_reused(cache, monkeypatch):
    forbid_building(monkeypatch)
    assert resolve(NAME, cache).path.parent == cache
    assert resolve("adult", cache).path.parent == cache
    assert {path.name for path in cache.iterdir() if not path.name.startswith(".")} == {
        resolve(NAME, cache).path.name,
        resolve("adult", cache).path.name,
    }


def test_the_environment_names_the_cache(cache, monkeypatch):
    forbid_building(monkeypatch)
    monkeypatch.setenv("HOTBED_CACHE", str(cache))
    assert resolve(NAME).path.parent == cache
    monkeypatch.delenv("HOTBED_CACHE")
    assert embedded.cache_root().parts[-2:] == (".cache", "hotbed")


def damage_truncate(directory):
    part = directory / "train" / "part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-20])


def damage_remove_counts(directory):
    (directory / "counts" / "C3.parquet").unlink()


def damage_mix_counts(directory):
    shutil.copy(directory / "counts" / "C1.parquet", directory / "counts" / "C3.parquet")


def damage_schema(directory):
    (directory / "schema.json").write_text("{")


def damage_replace_by_file(directory):
    shutil.rmtree(directory)
    directory.write_text("not a directory")


@pytest.mark.parametrize(
    "damage", [damage_truncate, damage_remove_counts, damage_mix_counts, damage_schema, damage_replace_by_file]
)
def test_a_damaged_copy_is_built_again(cache, damage):
    directory = resolve(NAME, cache).path
    before = files_of(directory)
    damage(directory)
    assert resolve(NAME, cache).path == directory
    assert files_of(directory) == before


def test_a_killed_build_is_built_again(cache):
    directory = resolve(NAME, cache).path
    left = directory.with_name(f".{directory.name}.partial")
    directory.rename(left)
    (left / "schema.json").unlink()
    (left / "junk").write_text("half a file")
    found = resolve(NAME, cache)
    assert not (found.path / "junk").exists()
    assert not left.exists()


def _resolve_and_log(cache, ready, log):
    real = embedded.write_dataset

    def build(*args, **kwargs):
        log.put("built")
        return real(*args, **kwargs)

    embedded.write_dataset = build
    ready.wait()
    log.put(resolve(NAME, cache).schema.splits["train"].rows)


def test_two_processes_build_once(tmp_path):
    ready, log = _context.Barrier(2), _context.Queue()
    processes = [_context.Process(target=_resolve_and_log, args=(tmp_path, ready, log)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [log.get(timeout=120) for _ in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(found, key=str) == [300, 300, "built"]


def test_an_unwritable_cache_names_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.*cannot be written.*HOTBED_CACHE"):
        resolve(NAME, tmp_path / "file")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    with pytest.raises(DataError, match=r"No space left on device.*HOTBED_CACHE"):
        resolve(NAME, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_names_the_variable(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(DataError, match="HOTBED_CACHE"):
        resolve(NAME, tmp_path / "cache")


@pytest.mark.parametrize("named", ["", "~no-such-user/cache"])
def test_a_user_without_a_home_is_told_the_variable(monkeypatch, named):
    def unknown(*_):
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("HOTBED_CACHE", named)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(ConfigError, match="Set HOTBED_CACHE"):
        embedded.cache_root()


@pytest.mark.parametrize(
    "name", ["criteo-like:", "criteo-like:0", "criteo-like:-5", "criteo-like:many", "criteo-like:1e6"]
)
def test_wrong_sizes(name, tmp_path):
    with pytest.raises(ConfigError, match="positive integer"):
        resolve(name, tmp_path)


def test_paths(tmp_path):
    make_dataset(tmp_path / "d", {"train": [3]})
    assert resolve(tmp_path / "d").schema == Dataset.open(tmp_path / "d").schema
    assert resolve(str(tmp_path / "d")).path == tmp_path / "d"
    with pytest.raises(SchemaError, match=r"no schema\.json"):
        resolve(tmp_path)
    with pytest.raises(
        SchemaError, match=r"neither an embedded dataset .criteo-like, .*adult.* nor an existing directory"
    ):
        resolve("criteo-lik")


def test_adult_is_the_census(built):
    dataset = resolve("adult", built)
    splits = dataset.schema.splits
    rows = {name: split.rows for name, split in splits.items()}
    assert sum(rows.values()) == 48_842
    assert rows["test"] > 4_500
    assert sum(split.positives for split in splits.values()) == 11_687
    assert {"workclass", "age_bucket", "capital-gain_bucket"} <= {feature.name for feature in dataset.schema.features}
    (batch,) = Loader(dataset, "test", batch_size=10_000).epoch(0)
    assert batch.dense.shape[1] == 6
    assert float(np.abs(batch.dense.numpy()).max()) < 20
    assert embedded.ADULT_FILE.with_name("ADULT-LICENCE.md").read_text().count("CC BY 4.0")


def test_the_room_offers_its_names():
    assert hotbed.data.resolve is resolve
    assert hotbed.data.Dataset is Dataset
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hotbed.data.nothing  # noqa: B018 looking it up is the test


def test_a_dataset_that_an_older_version_built_is_used(cache, monkeypatch, tmp_path):
    """A run that resumes needs the files that it began with."""
    found = resolve(NAME, cache)
    old = embedded._build_plan(NAME, None).folders[-1]
    shutil.copytree(found.path, tmp_path / old)
    forbid_building(monkeypatch)
    assert resolve(NAME, tmp_path).path == tmp_path / old
