"""Loaded into pytest. MUTANTS_SEEN: note which functions of hotbed every test runs. MUTANTS_TESTS: run these, in this order.

MUTANTS_WITHOUT: leave these out. MUTANTS_SECONDS: of processor time. Every file has its part of what the files before it left,
runs one case of every test first, and skips the rest when its time is over.

Processes that tests start note what they run in a file of the same name (hook.py), which is read after every test.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.mutants import hook

_SEEN, _TESTS = os.environ.get("MUTANTS_SEEN"), os.environ.get("MUTANTS_TESTS")
_WITHOUT, _SECONDS = os.environ.get("MUTANTS_WITHOUT"), float(os.environ.get("MUTANTS_SECONDS", "inf"))
_tests: dict[str, dict[str, object]] = {}
_failed: set[str] = set()

if _SEEN:

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:  # type: ignore[misc]
        hook.take()
        began = time.perf_counter()
        try:
            return (yield)
        finally:
            found = {"seconds": round(time.perf_counter() - began, 3), "functions": sorted(hook.take())}
            _tests[item.nodeid] = found

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if not report.passed:
            _failed.add(report.nodeid)

    def pytest_sessionfinish() -> None:
        hook.stop()
        passed = {name: found for name, found in _tests.items() if name not in _failed}
        Path(_SEEN).write_text(json.dumps({"tests": passed, "not_passed": sorted(_failed)}))  # type: ignore[arg-type]


if _TESTS:

    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        by_name: dict[str, list[pytest.Item]] = {}
        for item in items:  # a test without its parameters is all of its cases
            for name in {item.nodeid, item.nodeid.partition("[")[0]}:
                by_name.setdefault(name, []).append(item)
        wanted = [item for name in Path(_TESTS).read_text().splitlines() for item in by_name.get(name, [])]  # type: ignore[arg-type]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted


if _WITHOUT:

    def pytest_itemcollected(item: pytest.Item) -> None:
        if item.nodeid in _left_out():
            item.add_marker(pytest.mark.skip(reason="it fails without the change, too"))

    @cache
    def _left_out() -> set[str]:
        return set(Path(_WITHOUT).read_text().splitlines())  # type: ignore[arg-type]


class _Shares:
    """The processor time of every file, from its first test on."""

    def __init__(self) -> None:
        self._end = 0.0  # of all
        self._left: list[str] = []
        self._file, self._until = "", 0.0

    def divide(self, items: list[pytest.Item]) -> None:
        """Among these, which are put in order."""
        self._left = list(dict.fromkeys(_file_of(item) for item in items))
        cases = Counter[str]()
        order = {}
        for place, item in enumerate(items):
            name = item.nodeid.partition("[")[0]
            order[item] = self._left.index(_file_of(item)), cases[name], place
            cases[name] += 1
        items.sort(key=order.__getitem__)

    def has_time(self, item: pytest.Item) -> bool:
        now = sum(os.times()[:4])
        if _file_of(item) != self._file:
            self._file = _file_of(item)
            self._end = self._end or now + _SECONDS
            self._until = now + (self._end - now) / len(self._left)
            self._left.remove(self._file)
        return now <= self._until


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


if math.isfinite(_SECONDS):
    _shares = _Shares()

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        _shares.divide(items)

    def pytest_runtest_setup(item: pytest.Item) -> None:
        if not _shares.has_time(item):
            pytest.skip("no time is left")
