"""`hotbed simulate` from the outside."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotbed as package
from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from tests.data.small import make_dataset


@pytest.fixture
def data(tmp_path):
    make_dataset(tmp_path / "data", {"train": [300, 120], "valid": [50]})
    return tmp_path / "data"


def test_a_table_with_a_line_for_every_cache_and_policy(hotbed, data):
    result = hotbed("simulate", data, "--cache", "0.05,0.5", "--batch-size", 16)
    assert result.code == 0, result.err
    assert "27 batches, 840 lookups of 470 rows of 1,050" in result.out
    assert [len(re.findall(name, result.out)) for name in ("oracle", "lfu", "lru", "static")] == [2, 2, 2, 3]
    assert "static: rows loaded before the first batch count as misses" in result.out
    assert re.search(r"5 % .*52.*oracle", result.out)
    assert re.search(r"50 % .*525.*oracle", result.out)


@pytest.mark.parametrize("ahead", [{}, {"window": 3, "look_ahead": 7}])
def test_the_counts_are_those_of_training(hotbed, data, ahead):
    options = [text for name, value in ahead.items() for text in (f"--{name.replace('_', '-')}", value)]
    asked = ("--cache", "0.06", "--batch-size", 16, "--policy", "oracle", "--seed", 3, "--json", *options)
    (figures,) = json.loads(hotbed("simulate", data, *asked).out)["caches"]
    dataset = Dataset.open(data)
    tables = package.EmbeddingTables(
        {f.name: package.Table(rows=f.rows, dim=2, hashing=f.mode == "hash") for f in dataset.schema.features},
        cache=0.06,
        policy="oracle",
    )
    loader = Loader(dataset, "train", batch_size=16, shuffle=True, seed=3)
    for batch in package.prefetch(loader.epoch(0), tables, **ahead):
        tables(batch.ids).sum().backward()
    counts = tables.counters()
    for name in ("windows", "batches", "keys", "hits", "misses", "created", "evictions", "written_back", "lookups"):
        assert figures[name] == getattr(counts, name), name
    assert figures["missed_lookups"] == counts.missed_lookups
    assert figures["lookup_hit_rate"] == counts.lookup_hit_rate
    assert 0 < figures["optimum"] <= figures["misses"]


def test_order_length_and_split_can_be_chosen(hotbed, data):
    def misses(*options):
        asked = ("--cache", "0.05", "--batch-size", 16, "--policy", "lru", "--json", *options)
        return json.loads(hotbed("simulate", data, *asked).out)["caches"][0]

    assert misses("--max-batches", 4)["batches"] == 4
    assert misses("--split", "valid")["lookups"] == 100
    assert misses()["misses"] != misses("--no-shuffle")["misses"]
    assert misses("--look-ahead", 0)["windows"] == 27


def test_a_cache_that_holds_no_batch_is_left_out_with_the_way_out(hotbed, data):
    result = hotbed("simulate", data, "--cache", "0.001,0.9", "--batch-size", 16)
    assert result.code == 0
    assert re.search(
        r"left out: --cache 0\.001: one batch needs \d+ rows at once, but the cache has 1 slots", result.err
    )
    assert "90 %" in result.out
    assert "0.1 %" not in result.out


def test_no_cache_holds_a_batch(hotbed, data):
    result = hotbed("simulate", data, "--cache", "0.001,0.002", "--batch-size", 16)
    assert result.code == 3
    assert re.search(r"error: one batch needs \d+ rows at once", result.err)
    assert "smaller batches (--batch-size)" in result.err
    share = re.search(r"--cache (\S+) of the 1,050 rows", result.err)[1]
    assert hotbed("simulate", data, "--cache", share, "--batch-size", 16).code == 0


def test_all_mistakes_at_once(hotbed, data):
    result = hotbed("simulate", data, "--cache", "2,x", "--policy", "lru,best")
    assert result.code == 2
    assert "3 settings are wrong" in result.err
    for part in ("not 'x'", "at most 1, not 2; 2 % is 0.02", "not best"):
        assert part in result.err
    assert hotbed("simulate", data, "--cache", ",").code == 2
    assert "look_ahead is 999" in hotbed("simulate", data, "--cache", "0.5", "--look-ahead", 999, "--batch-size", 8).err


def test_settings_are_spelled_as_for_train(hotbed, data):
    asked = ("--policy", "oracle,lru", "--json")
    options = ("--cache", "0.06", "--batch-size", 16, "--seed", 3, "--look-ahead", 5)
    sets = ("data.batch_size=16", "tables.cache=0.06", "train.seed=3", "tables.look_ahead=5", "tables.window=0")
    one = hotbed("simulate", data, *asked, *options)
    other = hotbed("simulate", data, *asked, *(text for path in sets for text in ("--set", path)))
    assert json.loads(one.out) == json.loads(other.out)
    result = hotbed("simulate", data, "--set", "model.dim=4")
    assert result.code == 2
    assert "--set model.dim: has no effect on a simulation; these do: data.batch_size" in result.err
    assert "data.batch_size: must be" in hotbed("simulate", data, "--set", "data.batch_size=some").err


def test_fewer_misses_are_more_hits_whatever_the_policy_and_its_windows(hotbed, data):
    """A static cache loads rows before the first batch, and large caches plan several batches together."""
    asked = ("--cache", "0.06,0.2,0.5,0.9", "--batch-size", 16, "--json")
    found = json.loads(hotbed("simulate", data, *asked).out)["caches"]
    assert len({figures["windows"] for figures in found}) > 2
    for one in found:
        assert one["rows_hit"] == pytest.approx(max(0.0, 1 - one["misses"] / found[0]["keys_of_batches"]))
        for other in found:
            assert (one["misses"] < other["misses"]) == (one["rows_hit"] > other["rows_hit"]) or not one["rows_hit"]


def test_help_says_what_comes_out(hotbed):
    result = hotbed("simulate", "--help")
    assert result.code == 0
    for word in ("optimum", "--look-ahead", "For example"):
        assert word in result.out


def test_a_file_of_ids(hotbed, tmp_path):
    rng = np.random.default_rng(0)
    ids = (rng.random((2000, 3)) ** 3 * 900).astype(np.int64) * 1_000_003
    np.save(tmp_path / "ids.npy", ids)
    columns = {f"f{f}": ids[:, f] for f in range(3)}
    pq.write_table(pa.table({**columns, "label": rng.random(2000)}), tmp_path / "ids.parquet")
    asked = ("--batch-size", 64, "--cache", "0.1", "--json")
    one, other = (
        json.loads(hotbed("simulate", tmp_path / name, *asked).out)["caches"] for name in ("ids.npy", "ids.parquet")
    )
    assert one == other
    assert [figures["lookups"] for figures in one][:3] == [6000] * 3
    assert one[0]["num_slots"] == round(0.1 * sum(np.unique(ids[:, f]).size for f in range(3)))


def test_lists_and_padding_of_a_parquet_file(hotbed, tmp_path):
    pq.write_table(pa.table({"a": [[1, 2], [], None, [2, 7]], "b": [5, None, -1, 5]}), tmp_path / "bags.parquet")
    result = hotbed(
        "simulate", tmp_path / "bags.parquet", "--batch-size", 2, "--cache", "1", "--policy", "lru", "--json"
    )
    (figures,) = json.loads(result.out)["caches"]
    assert (figures["lookups"], figures["misses"]) == (6, 4)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("text.csv", "1,2", "not a file of ids"),
        ("torn.npy", "nothing", "not a readable .npy"),
        ("torn.parquet", "nothing", "not a readable Parquet"),
    ],
)
def test_files_that_hold_no_ids(hotbed, tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    result = hotbed("simulate", tmp_path / name)
    assert result.code in (1, 2)
    assert said in result.err


def test_arrays_that_hold_no_ids(hotbed, tmp_path):
    for number, array in enumerate([np.zeros(0, np.int64), np.ones(5), np.ones((2, 2, 2), np.int64)]):
        np.save(tmp_path / f"{number}.npy", array)
        assert hotbed("simulate", tmp_path / f"{number}.npy").code == 1
    pq.write_table(pa.table({"x": ["a"]}), tmp_path / "x.parquet")
    assert "no integer column" in hotbed("simulate", tmp_path / "x.parquet").err


def test_curves_on_the_terminal_and_as_a_page(hotbed, data, tmp_path):
    result = hotbed("simulate", data, "--cache", "0.2", "--batch-size", 16, "--html", tmp_path / "curves.html")
    assert result.code == 0, result.err
    assert "* lru, no look-ahead" in result.out
    assert "share of the rows in the cache" in result.out
    page = (tmp_path / "curves.html").read_text()
    assert page.count('<svg class="chart"') == 2
    assert "http" not in page.replace("http-equiv", "")
    found = json.loads(hotbed("simulate", data, "--cache", "0.2", "--batch-size", 16, "--curve", "--json").out)
    assert next(one["name"] for one in found["curves"]) == "lru, no look-ahead"
    assert found["curves"][-1]["name"] == "optimum"
    assert hotbed("simulate", data, "--cache", "0.2", "--batch-size", 16, "--html", tmp_path / "no" / "x").code == 1
