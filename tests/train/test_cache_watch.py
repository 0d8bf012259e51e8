"""What a line of metrics.jsonl says of the cache, from counters that only rise."""

import pytest

from hotbed.cache import CacheCounts
from hotbed.train.watch import CacheWatch


class Tables:
    """Adds up what the test says happened."""

    def __init__(self):
        self.total = CacheCounts()

    def counters(self):
        return self.total

    def spend(self, **amounts):
        self.total = self.total._replace(**{name: getattr(self.total, name) + n for name, n in amounts.items()})


WINDOW = {
    "windows": 1,
    "batches": 4,
    "keys": 100,
    "hits": 75,
    "misses": 25,
    "created": 10,
    "evictions": 20,
    "written_back": 16,
    "lookups": 800,
    "missed_lookups": 40,
    "bytes_in": 15 * 64,
    "bytes_out": 16 * 64,
    "stall_seconds": 0.5,
}


@pytest.fixture
def tables():
    return Tables()


def test_an_interval_is_a_difference(tables):
    tables.spend(**WINDOW)  # before anyone watched
    watch = CacheWatch(tables)
    expected = {
        "batches": 4,
        "hit_rate": 0.75,
        "lookup_hit_rate": 0.95,
        "keys": 25,
        "misses": 6.25,
        "created": 2.5,
        "evictions": 5,
        "written_back": 4,
        "bytes_in": 240,
        "bytes_out": 256,
        "stall_share": 0.25,
    }
    for windows in (1, 2):
        for _ in range(windows):
            tables.spend(**WINDOW)
        assert watch.interval(2.0 * windows) == {**expected, "batches": 4 * windows}
    tables.spend(**{**WINDOW, "hits": 50, "misses": 50})
    assert watch.interval(2.0)["hit_rate"] == 0.5


def test_without_a_cache_there_is_nothing_to_say(tables):
    assert CacheWatch(tables).interval(1.0) is None


def fail_after(_):
    raise ZeroDivisionError


def test_evaluations_do_not_count(tables):
    watch = CacheWatch(tables)
    tables.spend(**WINDOW)
    with watch.aside():
        tables.spend(**{**WINDOW, "misses": 1000, "stall_seconds": 100.0})
    with pytest.raises(ZeroDivisionError), watch.aside():
        fail_after(tables.spend(**{**WINDOW, "misses": 1000}))
    found = watch.interval(2.0)
    assert (found["batches"], found["misses"], found["stall_share"]) == (4, 6.25, 0.25)
    with watch.aside():
        tables.spend(**WINDOW)
    assert watch.interval(1.0) is None


def test_batches_without_ids_and_an_interval_without_time(tables):
    watch = CacheWatch(tables)
    tables.spend(windows=1, batches=1)
    found = watch.interval(0.0)
    assert (found["hit_rate"], found["lookup_hit_rate"], found["stall_share"]) == (1.0, 1.0, None)


def test_a_clock_that_is_a_little_off_gives_no_share_beyond_one(tables):
    watch = CacheWatch(tables)
    tables.spend(**WINDOW)
    assert watch.interval(0.4)["stall_share"] == 1.0
