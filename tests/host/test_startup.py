import importlib
import subprocess
import sys

import pytest

import hotbed
from hotbed import checkpoint
from hotbed.host.startup import MOVED
from hotbed.tables.group import cached


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_gives_the_new_module_and_says_so(old, monkeypatch):
    for name in list(sys.modules):
        if name in MOVED:
            monkeypatch.delitem(sys.modules, name)
    parent = old.rpartition(".")[0]
    if parent in MOVED:
        with pytest.warns(DeprecationWarning, match="has moved"):
            importlib.import_module(parent)
    with pytest.warns(DeprecationWarning, match=f"{old} has moved; import {MOVED[old]} instead"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(MOVED[old])


def test_names_are_imported_from_old_modules():
    code = "from hotbed.plan.trace import Trace; from hotbed.clock import StepClock as Clock; "
    code += "print(Trace.__module__, Clock.__module__)"
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["hotbed.forecast.trace", "hotbed.telemetry.clock"]


@pytest.mark.parametrize("old", ["Carried", "Frozen", "Loaded"])
def test_an_old_name_of_checkpoints_gives_the_new_one_and_says_so(old):
    with pytest.warns(DeprecationWarning, match=f"hotbed.checkpoint.{old} is now called"):
        found = getattr(checkpoint, old)
    assert found is getattr(checkpoint, found.__name__)
    assert found.__name__ != old


def test_old_names_of_the_tables_give_the_new_ones_and_say_so():
    tables = hotbed.EmbeddingTables({"a": hotbed.Table(rows=3, dim=2)})
    with pytest.warns(DeprecationWarning, match="now called ownership"):
        assert tables.turns is tables.ownership
    with pytest.warns(DeprecationWarning, match="now called CachedRows"):
        assert cached.CachedGroup is cached.CachedRows
    with pytest.raises(AttributeError, match="no attribute 'LostGroup'"):
        _ = cached.LostGroup


def test_other_names_are_not_there():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hotbed.ownership")
