"""Seconds of compiling are counted once, wherever kernels call each other, and somebody is told when it takes long."""

import threading
import time

import numpy as np
from numba import njit

from hotbed.host.compiling import CompileReport, compile_seconds, compiled_within


def two_kernels():
    @njit
    def inner(values):
        return values.sum()

    @njit
    def outer(values):
        return inner(values) + 1

    return outer


def test_what_is_compiled_is_counted():
    outer = two_kernels()
    began = time.perf_counter()
    with compiled_within(lambda: None) as compiled:
        assert outer(np.ones(3)) == 4
        took = time.perf_counter() - began
        assert compiled.kernels >= 2
        assert 0 < compiled.seconds < took  # the inner one counts once, within the outer
        seconds = compiled.seconds
        outer(np.ones(3))
        assert compiled.seconds == seconds
        outer(np.ones(3, np.int64))
        assert compiled.seconds > seconds


def test_what_takes_long_is_reported_once_and_what_does_not_is_not():
    told, seen = [], threading.Event()

    def tell():
        told.append(1)
        seen.set()

    with compiled_within(tell, after=0.0):
        two_kernels()(np.ones(3))
        assert seen.wait(60)
        two_kernels()(np.ones(3))
    assert len(told) == 1
    with compiled_within(tell, after=3600.0):
        two_kernels()(np.ones(3))
    two_kernels()(np.ones(3))
    assert len(told) == 1


def test_counting_begins_where_it_is_asked_for():
    two_kernels()(np.ones(3))
    before = compile_seconds()
    later = CompileReport()
    assert (later.kernels, later.seconds) == (0, 0.0)
    two_kernels()(np.ones(3))
    assert later.seconds == compile_seconds() - before > 0
