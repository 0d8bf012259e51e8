"""What a line of metrics.jsonl says of tiers and ids, from counters that only rise."""

import pytest
import torch

from hotbed.cache import CacheCounts
from hotbed.ids import IdCounts
from hotbed.store.counts import TierCounts, Tiers, TierSizes
from hotbed.telemetry.clock import MODEL, OTHER, StepClock
from hotbed.train.watch import Watch, ids_of

DONE = TierCounts(30, 10, 20, 30 * 64, 10 * 80, 50 * 80, 30 * 80, 2, 4, 2)
SIZES = TierSizes(
    memory_slots=50,
    memory_rows=40,
    memory_bytes=4000,
    memory_budget=5000,
    ssd_bytes=900,
    ssd_cap=1000,
    ssd_live_bytes=600,
    ssd_stale_bytes=200,
    ssd_segments=3,
)


class Tables:
    """Adds up what the test says happened."""

    def __init__(self, tiers=True, ids=None):
        self.cache, self.below, self.has_tiers, self.sizes = CacheCounts(), TierCounts(), tiers, SIZES
        self.ids = ids or {}
        self.clock, self.device = StepClock(), torch.device("cpu")

    def counters(self):
        return self.cache

    def tiers(self):
        return Tiers(self.below, self.sizes) if self.has_tiers else None

    def id_counts(self):
        return self.ids

    def spend(self, batches=4, below=DONE):
        self.cache = self.cache.plus(CacheCounts(windows=1, batches=batches, keys=100, hits=100))
        self.below = self.below.plus(below)


def test_an_interval_is_a_difference_and_what_stands_is_of_the_end():
    tables = Tables()
    tables.spend()  # before anyone watched
    watch = Watch(tables)
    for number in (2, 3):
        tables.spend()
        tiers = watch.line(1.0)["tiers"]
        assert tiers.pop("resident_bytes") is None or tiers
        assert tiers == {
            "memory_hit_rate": 0.75,
            "from_memory": 7.5,
            "from_ssd": 2.5,
            "to_ssd": 5,
            "bytes_from_memory": 480,
            "bytes_read": 200,
            "bytes_written": 1000,
            "bytes_compacted": 600,
            "ahead": 1,
            "waits": 0.5,
            "wear": 4000 * number,
            "compactions": 2 * number,
            **SIZES._asdict(),
            "live_share": 0.75,
        }


def fail_after(_):
    raise ZeroDivisionError


def test_evaluations_and_checkpoints_wear_but_do_not_train():
    tables = Tables()
    watch = Watch(tables)
    tables.spend()
    with pytest.raises(ZeroDivisionError), watch.aside():
        fail_after(tables.spend(below=DONE._replace(from_memory=0, from_ssd=1000)))
    tiers = watch.line(1.0)["tiers"]
    assert (tiers["memory_hit_rate"], tiers["from_ssd"], tiers["wear"]) == (0.75, 2.5, 8000)
    with watch.aside():
        tables.spend()
    assert watch.line(1.0).keys() == {"memory"}
    tables.spend(below=DONE._replace(from_ssd=50))
    assert watch.line(1.0)["tiers"]["from_ssd"] == 12.5


def test_the_summary_adds_up_training():
    tables = Tables()
    watch = Watch(tables)
    for from_ssd in (10, 60):
        tables.spend(below=DONE._replace(from_ssd=from_ssd))
        watch.line(1.0)
    with watch.aside():
        tables.spend(below=DONE._replace(from_ssd=10**6))
    found = watch.tiers()
    assert (found["from_memory"], found["from_ssd"], found["memory_hit_rate"]) == (60, 70, 60 / 130)
    assert (found["wear"], found["compactions"]) == (12000, 6)
    assert Watch(Tables(tiers=False)).tiers() is None


@pytest.mark.parametrize("change", [{"memory_slots": 0}, {}], ids=["memory is the cache", "nothing asked"])
def test_no_rate_where_there_is_none(change):
    tables = Tables()
    tables.sizes = SIZES._replace(**change)
    watch = Watch(tables)
    tables.spend(below=DONE if change else DONE._replace(from_memory=0, from_ssd=0))
    assert watch.line(1.0)["tiers"]["memory_hit_rate"] is None


def test_without_an_ssd_and_dynamic_ids_there_is_nothing_to_say():
    tables = Tables(tiers=False)
    watch = Watch(tables)
    with watch.aside():
        tables.spend()
    assert watch.line(1.0).keys() == {"memory"}
    tables.spend()
    assert watch.line(1.0).keys() == {"memory", "cache"}
    assert ids_of(tables) is None


def test_ids_are_reported_in_every_line_since_the_beginning():
    tables = Tables(tiers=False, ids={"user": IdCounts(seen=9, admitted=5, rejected=3, expired=2)})
    watch = Watch(tables)
    for _ in range(2):
        assert watch.line(1.0)["ids"] == {"user": {"seen": 9, "admitted": 5, "rejected": 3, "expired": 2, "rows": 3}}


def test_what_ran_beside_training_is_not_in_the_times_of_a_step():
    tables = Tables(tiers=False)
    watch = Watch(tables)
    watch.begin()
    tables.clock.step()
    with watch.aside():
        for _ in range(5):
            tables.clock.step()
        tables.clock.enter(MODEL)
        tables.clock.enter(OTHER)
    times = watch.line(seconds=1.0)["times"]
    assert times["steps"] == 1
    assert times["model"] == 0
    assert "times" not in watch.line(seconds=1.0), "no step since"
