"""The gate lets right systems through and stops wrong ones."""

from dataclasses import replace

import pytest
import torch

from hotbed.bench import check as gate
from hotbed.bench.systems import EXACT_TWIN, KINDS, Kind, missing
from hotbed.bench.workload import OPTIMIZERS
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
    if missing(name):
        pytest.skip(missing(name))
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
    assert "to the bit" in gate.check("one", setting)


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
