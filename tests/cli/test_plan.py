"""`hotbed plan` from the outside."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.forecast.replay import simulate
from hotbed.forecast.trace import read_trace
from hotbed.host.memory import in_words
from tests.data.small import make_dataset


@pytest.fixture(autouse=True)
def _own_cache(hotbed, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    make_dataset(tmp_path / "data", {"train": [300, 120], "valid": [50]})
    return tmp_path / "data"


SMALL = ("--batch-size", 16, "--dim", 4, "--set", "model.options.hidden=[8]", "--device", "cpu")
NO_SPEED = (*SMALL, "--calibrate", "no")


def test_hit_rates_are_those_of_the_simulator(hotbed, data):
    found = json.loads(hotbed("plan", data, "--cache", "0.2", *NO_SPEED, "--json").out)
    trace = read_trace(Dataset.open(data), batch_size=16, shuffle=True)
    counts = simulate(trace, round(0.2 * trace.num_rows))
    assert found["fits"]
    assert found["traffic"]["hit_rate"] == pytest.approx(counts.hit_rate)
    assert found["bytes_in"] * trace.num_batches == pytest.approx(
        (counts.misses - counts.created) * found["setting"]["record_bytes"]
    )
    assert found["bytes_out"] * trace.num_batches == pytest.approx(
        counts.written_back * found["setting"]["record_bytes"]
    )
    assert [one["name"] for one in found["curves"]] == ["lru, no look-ahead", "oracle", "optimum"]
    assert found["recommendation"]["num_slots"] <= found["setting"]["slots"]


@pytest.mark.parametrize("size", [("--cache", "0.05"), ("--cache", "0.9"), ("--hbm", "8KiB")])
def test_rows_and_index_of_a_cache_are_told_apart(hotbed, data, size):
    found = json.loads(hotbed("plan", data, *size, *NO_SPEED, "--no-curve", "--json").out)
    said = hotbed("plan", data, *size, *NO_SPEED, "--no-curve").out
    parts = {one["name"]: one["num_bytes"] for one in found["bytes"]}
    rows, index = parts["rows in the cache"], parts["index of the cache"]
    assert f"cache: {in_words(rows)} of rows, {in_words(index)} of index" in said
    whole = found["setting"]["rows"] * found["setting"]["record_bytes"]
    assert ("take less, " + in_words(whole) in said) == (rows + index > whole)
    assert (size[1] == "0.9") <= (rows + index > whole)
    assert (size[0] == "--hbm") <= (rows + index <= whole)


def test_a_speed_is_measured_once_and_kept(hotbed, data, tmp_path):
    first = hotbed("plan", data, "--cache", "0.2", *SMALL, "--no-curve")
    assert first.code == 0, first.err
    assert re.search(r"speed: [\d,]+ samples/s", first.out)
    (entry,) = json.loads((tmp_path / "cache" / "calibration.json").read_text()).values()
    hotbed("plan", data, "--cache", "0.3", *SMALL, "--no-curve")
    kept = json.loads((tmp_path / "cache" / "calibration.json").read_text())
    assert list(kept.values()) == [entry]
    hotbed("plan", data, "--cache", "0.3", *SMALL, "--no-curve", "--calibrate", "again")
    (again,) = json.loads((tmp_path / "cache" / "calibration.json").read_text()).values()
    assert again["measured_at"] > entry["measured_at"]


def test_what_if_tables_and_a_page(hotbed, data, tmp_path):
    asked = (
        "--cache",
        "0.2",
        *NO_SPEED,
        "--what-if",
        "cache=0.1,0.5",
        "--what-if",
        "dim=4,8",
    )
    result = hotbed("plan", data, *asked, "--html", tmp_path / "plan.html")
    assert result.code == 0, result.err
    assert "what if cache were" in result.out
    assert re.search(
        r"recommended: no cache: all rows take .* With a cache: --cache 0\.\d+: [\d,]+ slots miss [\d,]+ rows a step",
        result.out,
    )
    page = (tmp_path / "plan.html").read_text()
    assert "What it needs" in page
    assert page.count('<svg class="chart"') == 2
    found = json.loads(hotbed("plan", data, *asked, "--json").out)["what_if"]
    small, large = found["cache"]["0.1"], found["cache"]["0.5"]
    assert small["setting"]["slots"] < large["setting"]["slots"]
    assert small["traffic"]["misses"] >= large["traffic"]["misses"]
    assert small["bytes_out"] > large["bytes_out"]
    assert found["dim"]["4"]["bytes_out"] < found["dim"]["8"]["bytes_out"]


def test_ranks_share_rows_and_send_bytes(hotbed, tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},{int(rng.random() ** 3 * 200)},{rng.integers(30)}" for _ in range(600)]
    (tmp_path / "log.csv").write_text("\n".join(["label,user,ad", *lines]))
    prepare([tmp_path / "log.csv"], tmp_path / "log", ids=["user", "ad"])
    asked = ("--cache", "0.5", "--batch-size", 32, "--dim", 4, "--calibrate", "no", "--no-curve", "--device", "cpu")
    found = json.loads(hotbed("plan", tmp_path / "log", *asked, "--what-if", "ranks=1,2", "--json").out)["what_if"][
        "ranks"
    ]
    one, two = found["1"], found["2"]
    assert one["network"] is None
    assert two["network"]["in_node"] > 0
    assert two["setting"]["slots"] < 0.6 * one["setting"]["slots"]


@pytest.mark.parametrize("more", [[], ["--choose"]])
@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["dense.optimizer=adagrad"], "dense.optimizer: must be adam or sgd with 2 ranks"),
        (["parallel.local_ranks=3"], "parallel.local_ranks: must divide the 2 ranks, not 3"),
        (["parallel.placement=column"], "2 does not divide dim=5"),
    ],
)
def test_what_training_refuses_of_ranks_is_refused(hotbed, data, sets, said, more):
    given = [word for one in sets for word in ("--set", one)]
    result = hotbed("plan", data, "--cache", "0.5", *given, *NO_SPEED, "--no-curve", "--ranks", 2, *more)
    assert result.code == 2
    assert said in " ".join(result.err.split())
    assert hotbed("plan", data, "--cache", "0.5", *given, *NO_SPEED, "--no-curve").code == 0, "one rank"


def test_ranks_of_what_if_that_training_refuses(hotbed, data):
    asked = ("--cache", "0.5", "--set", "dense.optimizer=adagrad", "--what-if", "ranks=1,2")
    result = hotbed("plan", data, *asked, *NO_SPEED, "--no-curve")
    assert "ranks=2 does not fit, because dense.optimizer: must be adam or sgd" in " ".join(result.out.split())


def test_a_mode_whose_traffic_is_not_forecast_is_named(hotbed, data):
    asked = ("--ranks", 2, "--set", "parallel.mode=replicated", *NO_SPEED, "--no-curve", "--json")
    notes = json.loads(hotbed("plan", data, *asked).out)["notes"]
    assert "network: bytes and times are those of parallel.mode=sharded, not of replicated" in notes


def test_a_narrow_terminal_cuts_nothing_and_a_plot_has_round_numbers(hotbed, data, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = hotbed("plan", data, "--cache", "0.3", *NO_SPEED, "--what-if", "cache=0.2,0.5,0.001")
    assert result.code == 0, result.err
    assert "…" not in result.out
    assert "e+0" not in result.out
    assert re.search(r"0\.5 +\d+ +[\d.]+ \w+ +[\d.]+ \w+ +\d+ +[\d.]+ \w+ +- +-", result.out)
    assert re.search(r"cache=0\.001 does not fit, because the cache is too small", result.out)
    legend = result.out[result.out.index("* lru") :]
    plotted = result.out[result.out.index("misses, of the distinct rows") : result.out.index("* lru")]
    for sign, name in (("o", "oracle"), ("+", "optimum")):
        drawn = sum(line.count(sign) for line in plotted.splitlines() if "|" in line)
        assert drawn or f"{sign} {name} (under the others)" in legend


def test_a_cache_that_holds_no_batch_does_not_fit(hotbed, data):
    result = hotbed("plan", data, "--cache", "0.001", *NO_SPEED, "--no-curve")
    assert result.code == 3
    assert re.search(r"does not fit, because the cache is too small: .* needs \d+ rows at once", result.err)
    assert re.search(r"Without a cache all rows take [\d.]+ KiB\.", result.err)
    share = re.search(r"Take --cache (\S+) or --hbm", result.err)[1]
    assert hotbed("plan", data, "--cache", share, *NO_SPEED, "--no-curve").code == 0


def test_memory_and_ssd_that_are_too_small(hotbed, data, tmp_path):
    result = hotbed("plan", data, "--cache", "0.2", "--memory", "10KiB", *NO_SPEED, "--no-curve")
    assert result.code == 3
    assert "of host memory once all are used" in result.err.replace("\n", " ")
    small = ("--cache", "0.2", "--memory", "30KiB", "--ssd", f"{tmp_path}:4MiB", *NO_SPEED, "--no-curve")
    result = hotbed("plan", data, *small)
    assert result.code == 0, result.err
    assert "of the rows requested below the device" in result.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hbm", "2 parsecs"), "must be an amount of memory"),
        (("--what-if", "colour=red"), "--what-if takes NAME=VALUE"),
        (("--calibrate", "often"), "--calibrate is one of auto, again, no"),
        (("--optimizer", "magic"), "tables.optimizer"),
    ],
)
def test_wrong_options(hotbed, data, options, said):
    result = hotbed("plan", data, *options)
    assert result.code == 2
    assert said in result.err


def test_a_dataset_without_counts(hotbed, data):
    for file in (data / "counts").iterdir():
        file.unlink()
    result = hotbed("plan", data, "--cache", "0.2", *NO_SPEED)
    assert result.code == 1
    assert "counts" in result.err
    assert "hotbed prepare" in result.err


@pytest.mark.parametrize("more", [[], ["--choose"]])
def test_a_dataset_without_rows(hotbed, tmp_path, more):
    make_dataset(tmp_path / "empty", {"train": [0], "valid": [5]})
    result = hotbed("plan", tmp_path / "empty", *NO_SPEED, *more)
    assert result.code == 2
    assert "no rows to train on" in result.err


def _count_ids_of_b(data):
    """The ids of the hashed feature, one of each, as `prepare` counts them."""
    ids = pa.table({"id": np.arange(420) + (1 << 40), "count": np.ones(420, np.int64)})
    pq.write_table(ids, data / "counts" / "b.parquet")


@pytest.mark.parametrize("dynamic", ["a", "b"])
def test_some_features_with_dynamic_ids(hotbed, data, tmp_path, dynamic):
    if dynamic == "b":
        _count_ids_of_b(data)
    some = ("--hbm", "40KiB", "--set", f"tables.dynamic=[{dynamic}]")
    found = json.loads(hotbed("plan", data, *some, *NO_SPEED, "--no-curve", "--json").out)
    assert found["fits"], found["problems"]
    assert any("a cache of their own" in note for note in found["notes"])
    run = ("--out", tmp_path / "run", "--set", "data.batch_size=16", "--set", "model.dim=4", "--quiet")
    trained = hotbed("train", "--data", data, *some, *run, "--set", "model.options.hidden=[8]", "--device", "cpu")
    assert trained.code == 0, trained.err
    both = json.loads((tmp_path / "run" / "forecast.json").read_text())
    assert both["forecast"]["traffic"]["hit_rate"] == pytest.approx(both["truth"]["hit_rate"], abs=0.02)
