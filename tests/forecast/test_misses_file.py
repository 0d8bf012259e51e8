"""misses.json beside a forecast: misses of the run's own batches with a cache of every size."""

import json

import pytest

from hotbed.data.dataset import Dataset
from hotbed.forecast.comparison import MISSES, quick_forecast, write_misses
from hotbed.forecast.replay import LookAhead, Replay
from hotbed.forecast.request import ForecastRequest
from hotbed.run.run_file import compose
from tests.train.small import write_dataset


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = write_dataset(tmp_path_factory.mktemp("misses") / "data")
    sets = ("data.batch_size=16", "tables.cache=0.7", "tables.policy=lru", "train.device=cpu")
    config, problems = compose(None, {"data.path": str(folder)}, sets)
    assert problems == []
    return ForecastRequest(config, Dataset.open(folder))


def test_a_cache_of_every_size(asked, tmp_path):
    assert quick_forecast(asked) is not None
    write_misses(tmp_path, asked)
    found = json.loads((tmp_path / MISSES).read_text())
    missed, sizes = found["missed_lookups"], found["sizes"]
    assert len(missed) == len(sizes) == len(found["misses"])
    assert sizes[-1] == found["num_rows"]
    assert missed == sorted(missed, reverse=True)
    replay = Replay(asked.given.trace)
    largest = replay.run(found["num_rows"], "lru", LookAhead(1, 1)).counts
    assert missed[-1] == pytest.approx(1 - largest.lookup_hit_rate)


def test_a_folder_that_is_full_ends_no_run(asked, tmp_path):
    write_misses(tmp_path / "nowhere", asked)
    assert not (tmp_path / "nowhere").exists()
