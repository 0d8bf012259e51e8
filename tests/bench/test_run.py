"""One system's trouble is its own."""

import weakref
from dataclasses import replace

import pytest

from hotbed.bench import run as bench_run
from hotbed.bench.results import Result
from hotbed.bench.run import Skip, _release, run
from hotbed.bench.systems import BASELINES, KINDS, Kind, choose_systems, why_missing
from hotbed.errors import ConfigError
from tests.bench.fakes import FakeSystem


@pytest.fixture
def fake(monkeypatch):
    def add(name, holds="device", needs="", **options):
        built = []

        def make(setting):
            built.append(FakeSystem(setting, **options))
            return built[-1]

        monkeypatch.setitem(KINDS, name, Kind("fake", make, ("cpu",), holds, needs))
        return built

    return add


def test_trouble_is_reported_and_the_others_go_on(setting, fake):
    fake("breaks", wrong="raises")
    fake("lies", wrong="rate")
    fake("absent", needs="no_such_module")
    fake("works")
    broken, lying, absent, right = run({setting: ["breaks", "lies", "absent", "works"]})
    assert broken.reason == "failed: RuntimeError: out of luck"
    assert "second line" in broken.trace
    assert lying.reason.startswith("check failed: its vectors")
    assert broken.is_fault
    assert lying.is_fault
    assert absent.reason == "no_such_module: not installed"
    assert not absent.is_fault
    assert isinstance(right, Result)
    assert right.ms > 0
    assert right.ratio is None


def test_a_system_that_lies_is_checked_once_and_never_timed(setting, fake):
    built = fake("lies", wrong="rate")
    outcomes = list(run(dict.fromkeys([setting, replace(setting, dense=8)], ("lies",))))
    assert [outcome.setting.dense for outcome in outcomes] == [0, 8]
    assert all(isinstance(outcome, Skip) for outcome in outcomes)
    assert len(built) == 1


def test_each_optimizer_and_dim_is_checked(setting, fake):
    built = fake("works")
    list(run(dict.fromkeys([setting, replace(setting, dim=4), replace(setting, optimizer="sgd")], ("works",))))
    assert len(built) == 6  # checked and timed, three times


def test_ratios_are_to_the_baseline_of_the_same_setting(setting, fake):
    fake(BASELINES["cpu"])
    fake("works")
    outcomes = list(run(dict.fromkeys([setting, replace(setting, dense=8)], (BASELINES["cpu"], "works"))))
    for base, other in (outcomes[:2], outcomes[2:]):
        assert base.ratio == 1
        assert other.ratio == pytest.approx(other.ms / base.ms)
        assert other.baseline == BASELINES["cpu"]


def test_rows_without_room_are_not_tried(setting, fake, monkeypatch):
    built = fake("works")
    monkeypatch.setattr("hotbed.bench.systems.available_memory", lambda device: 1000)
    (skip,) = run({setting: ["works"]})
    assert "1000 bytes free" in skip.reason
    assert built == []


def test_a_library_that_cannot_be_loaded_is_one_line(monkeypatch, tmp_path, fake):
    (tmp_path / "half_installed.py").write_text("raise OSError('libcudart.so.13: not found\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    fake("half", needs="half_installed")
    assert why_missing("half") == "half_installed: cannot be imported (OSError: libcudart.so.13: not found)"


def test_systems_are_chosen_by_device_with_the_baseline_first(setting):
    cpu = setting.device
    assert choose_systems(["hotbed-cached", "fbgemm-cpu"], cpu) == ["fbgemm-cpu", "hotbed-cached"]
    everything = choose_systems([], cpu)
    assert everything[0] == "fbgemm-cpu"
    assert "fbgemm-hbm" not in everything
    with pytest.raises(ConfigError, match=r"no system 'fbgem'.*fbgemm-hbm does not run on cpu.*there are fbgemm-cpu"):
        choose_systems(["fbgem", "fbgemm-hbm"], cpu)


@pytest.mark.parametrize("wrong", ["", "raises"])
def test_a_system_is_gone_before_the_next_is_built(setting, monkeypatch, wrong):
    monkeypatch.setattr("hotbed.bench.run._release", _release)
    alive = weakref.WeakSet()
    alive_when_built = []

    def make(one):
        alive_when_built.append(len(alive))
        system = FakeSystem(one, wrong=wrong)
        system.itself = system  # only the garbage collector frees it
        alive.add(system)
        return system

    for name in ("first", "second"):
        monkeypatch.setitem(KINDS, name, Kind("fake", make, ("cpu",), "device"))
    list(run({setting: ["first", "second"]}))
    assert alive_when_built == [0] * (2 if wrong else 4)


def test_ids_are_drawn_once_for_settings_that_share_them(setting, fake, monkeypatch):
    drawn, make = [], bench_run.make_workload
    monkeypatch.setattr(bench_run, "make_workload", lambda one, count: drawn.append(one.zipf) or make(one, count))
    fake("works")
    settings = [setting, replace(setting, dim=4), replace(setting, zipf=0.5), replace(setting, zipf=0.5, dense=8)]
    outcomes = list(run(dict.fromkeys(settings, ("works",))))
    assert [outcome.setting for outcome in outcomes] == settings
    assert drawn == [setting.zipf, 0.5]
