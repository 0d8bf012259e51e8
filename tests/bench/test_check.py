"""The gate lets right systems through and stops wrong ones."""

from dataclasses import replace

import pytest
import torch

from hotbed.bench import check as gate
from hotbed.bench.setting import OPTIMIZERS, BrokenRankError, in_ranks
from hotbed.bench.systems import EXACT_TWIN, KINDS, Kind, why_missing
from hotbed.errors import ConfigError
from tests.bench.fakes import FakeSystem


@pytest.fixture
def fake(monkeypatch):
    def add(name, **options):
        kind = Kind("fake", lambda setting: FakeSystem(setting, **options), ("cpu",), "device")
        monkeypatch.setitem(KINDS, name, kind)

    return add


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["hotbed-hbm", "torch", "fbgemm-cpu"])
def test_right_systems_pass(setting, name, optimizer):
    if why_missing(name):
        pytest.skip(why_missing(name))
    if name == "fbgemm-cpu" and optimizer == "adam":
        pytest.skip("FBGEMM has no Adam on the CPU")
    assert gate.check(name, replace(setting, optimizer=optimizer)) is None


def test_a_right_fake_passes(setting, fake):
    fake("right")
    assert gate.check("right", setting) is None


@pytest.mark.parametrize("wrong", ["neighbours", "nan", "rate", "drops duplicates"])
def test_wrong_vectors_are_stopped(setting, fake, wrong):
    fake("wrong", wrong=wrong)
    assert "its vectors are" in gate.check("wrong", setting)


@pytest.mark.parametrize("wrong", ["rate", "drops duplicates"])
def test_rows_that_no_look_up_shows_are_checked_too(setting, fake, wrong, monkeypatch):
    monkeypatch.setattr(gate, "_STEPS", 1)
    fake("wrong", wrong=wrong)
    assert "its updates are" in gate.check("wrong", setting)


def test_a_wrong_rule_is_stopped(setting, monkeypatch):
    """hotbed's Adam counts the steps of a row, which is not the rule of a table's steps."""
    made = KINDS["hotbed-hbm"].make(replace(setting, optimizer="adam", rows=gate._ROWS, batch=gate._BATCH))
    made.rule = "adam_by_table"
    monkeypatch.setitem(KINDS, "other rule", KINDS["hotbed-hbm"]._replace(make=lambda _: made))
    assert "reference" in gate.check("other rule", replace(setting, optimizer="adam"))


def test_an_exact_twin_must_be_equal_to_the_bit(setting, fake, monkeypatch):
    fake("one")
    fake("two")
    monkeypatch.setitem(EXACT_TWIN, "one", "two")
    assert gate.check("one", setting) is None
    step = FakeSystem._update

    def nearly(self, ids, grad):
        step(self, ids, grad)
        if self.wrong == "a bit":
            self.tables[1][7, 0] = torch.nextafter(self.tables[1][7, 0], torch.tensor(9.0))

    monkeypatch.setattr(FakeSystem, "_update", nearly)
    fake("one", wrong="a bit")
    assert "differ from those of" in gate.check("one", setting)


@pytest.mark.parametrize("policy", [None, "lru"])
@pytest.mark.parametrize("name", EXACT_TWIN)
def test_hotbeds_caches_pass_though_they_evict(setting, name, policy, monkeypatch):
    made = []
    kind = KINDS[name]
    monkeypatch.setitem(KINDS, name, kind._replace(make=lambda small: made.append(kind.make(small)) or made[-1]))
    assert gate.check(name, replace(setting, policy=policy, optimizer="adam")) is None
    counts = made[0].counts()
    assert counts.evictions > 0
    assert counts.bytes_in > 0  # rows came back that had left


@pytest.mark.parametrize("ids", ["bags", "varying", "dynamic"])
@pytest.mark.parametrize("name", ["hotbed-hbm", "hotbed-cached", "hotbed-cached-plain", "torch", "fbgemm-cpu"])
def test_every_kind_of_ids_is_checked(setting, name, ids, monkeypatch):
    if why_missing(name):
        pytest.skip(why_missing(name))
    made, kind = [], KINDS[name]
    monkeypatch.setitem(KINDS, name, kind._replace(make=lambda small: made.append(kind.make(small)) or made[-1]))
    if (name, ids) == ("hotbed-hbm", "dynamic"):
        with pytest.raises(ConfigError, match="looked up in a cache"):
            gate.check(name, replace(setting, ids=ids))
        return
    assert gate.check(name, replace(setting, ids=ids, optimizer="adagrad")) is None
    if "cached" in name:
        assert made[0].counts().evictions > 0
        assert made[0].counts().created == 0  # every row was written beforehand


@pytest.mark.parametrize("name", ["hotbed-hbm", "hotbed-cached"])
@pytest.mark.parametrize("output", ["concat", "dict"])
def test_every_output_is_checked(setting, name, output):
    assert gate.check(name, replace(setting, output=output)) is None


@pytest.mark.parametrize("ids", ["single", "varying"])
def test_rows_on_an_ssd_are_checked_and_leave_no_file(setting, ids, tmp_path, monkeypatch):
    made, kind = [], KINDS["hotbed-cached"]
    monkeypatch.setitem(
        KINDS, "hotbed-cached", kind._replace(make=lambda small: made.append(kind.make(small)) or made[-1])
    )
    assert gate.check("hotbed-cached", replace(setting, ids=ids, ssd=0.3, ssd_folder=str(tmp_path))) is None
    tiers = made[0].tables.tiers()
    assert tiers.counts.from_ssd > 0
    assert tiers.counts.from_memory > 0
    assert tiers.sizes.memory_slots == pytest.approx(0.3 * sum(gate._ROWS), abs=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "ids"), [("hotbed-hbm", "varying"), ("hotbed-cached", "single")])
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_are_checked(setting, name, ids):
    assert gate.check(name, replace(setting, ids=ids, ranks=2)) is None


def test_a_rank_that_refuses_or_breaks_is_told(setting):
    with pytest.raises(ConfigError, match="looked up in a cache"):
        gate.check("hotbed-hbm", replace(setting, ids="dynamic", ranks=2))
    with pytest.raises(BrokenRankError, match=r"rank 0: Traceback(.|\n)*KeyError"):
        in_ranks(gate.check_rank, replace(setting, ranks=1), "no such system")
