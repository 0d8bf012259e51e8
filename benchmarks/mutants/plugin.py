"""Loaded into pytest. MUTANTS_SEEN: note which functions of hotbed every test runs. MUTANTS_TESTS: run these, in this order.

MUTANTS_WITHOUT: leave these out. MUTANTS_SECONDS: of processor time, after which tests are skipped.

Processes that tests start note what they run in a file of the same name (hook.py), which is read after every test.
"""

from __future__ import annotations

import json
import os
import time
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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if sum(os.times()[:4]) > _SECONDS:
        pytest.skip("no time is left")
