"""Faults are raised between any two lines, also between a handler and its end: then Python keeps the handled exception."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a test inside a generator, which has handled exceptions of its own: none is left for the tests that follow."""

    def call() -> Iterator[None]:
        yield pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})

    for _ in call():
        pass
    return True
