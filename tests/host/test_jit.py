"""A kernel that is loaded from disk is the one that was asked for."""

import os
import subprocess
import sys
from collections import namedtuple
from enum import Enum
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.caching import IndexDataCacheFile

from hotbed.host import jit
from hotbed.host.jit import digest_of, njit
from hotbed.ops.update.numba import update_kernel
from hotbed.optim import ROW_OPTIMIZERS, SGD
from tests.fresh import run_python

PACKAGE = Path(jit.__file__).parent.parent

KERNELS = """
import numpy as np
import callee
from hotbed.host.jit import njit

TABLE = np.arange(4)

@njit(nogil=True, cache=True)
def kernel(x):
    return callee.twice(x) + callee.OFFSET + TABLE[1]
"""

CALLEE = """
from hotbed.host.jit import njit
OFFSET = {offset}

@njit(nogil=True)
def twice(x):
    return {factor} * x
"""

HERE = """
import sys, numba
numba.config.CACHE_DIR = sys.argv[1]
sys.dont_write_bytecode = True  # sources of one size change within a second
"""
CALL = "import kernels; print(kernels.kernel(10), sum(kernels.kernel.stats.cache_hits.values()))"


def run(folder, program, **callee):
    (folder / "callee.py").write_text(CALLEE.format(**{"offset": 0, "factor": 2, **callee}))
    where = {**os.environ, "PYTHONPATH": f"{folder}:{PACKAGE.parent}"}
    done = run_python(HERE + program, folder / "cache", env=where)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_a_kernel_is_loaded_until_something_that_it_calls_changes(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    assert run(tmp_path, CALL) == [21, 0]
    assert run(tmp_path, CALL) == [21, 1]
    assert run(tmp_path, CALL, factor=3) == [31, 0]
    assert run(tmp_path, CALL, factor=3, offset=5) == [36, 0]
    assert run(tmp_path, CALL) == [21, 1]


def test_functions_that_differ_differ_in_name():
    """Numba links by name and by a number that other processes give to other functions."""
    for kind in range(3):
        names = [update_kernel(kind_of().rule, kind).py_func.__qualname__ for kind_of in ROW_OPTIMIZERS.values()]
        assert len(set(names)) == len(names)
    applies = [update_kernel(one().rule).py_func.__globals__["apply_rule"].py_func for one in ROW_OPTIMIZERS.values()]
    assert len({apply.__qualname__ for apply in applies}) == len(applies)


KEYS = """
from hotbed.host.jit import digest_of
from hotbed.ops.update.numba import update_kernel
from hotbed.optim import ROW_OPTIMIZERS
for one in ROW_OPTIMIZERS.values():
    print(update_kernel(one().rule).py_func.__name__, digest_of(update_kernel(one().rule)))
"""


def test_another_process_finds_the_kernels_of_the_rules():
    where = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", KEYS], env=where, capture_output=True, text=True, check=True)
    kernels = [update_kernel(one().rule) for one in ROW_OPTIMIZERS.values()]
    assert done.stdout.splitlines() == [f"{kernel.py_func.__name__} {digest_of(kernel)}" for kernel in kernels]


def test_a_rule_that_changes_is_another_kernel():
    rule = SGD().rule
    other = rule._replace(element=lambda w, g, a, b, c0, c1, h: (w - 2 * c0 * g, a, b))
    assert update_kernel(rule).py_func.__name__ != update_kernel(other).py_func.__name__


def test_a_closure_without_a_name_is_refused():
    with pytest.raises(TypeError, match=r"<locals>.*name="):

        @njit(nogil=True)
        def double(x):
            return 2 * x


def test_all_kernels_go_this_way():
    takes = [
        path for path in PACKAGE.rglob("*.py") if "import njit" in (text := path.read_text()) or "numba.njit" in text
    ]
    wrong = [
        path.name for path in takes if path.name != "jit.py" and "from hotbed.host.jit import" not in path.read_text()
    ]
    assert len(takes) > 30
    assert wrong == []


OPTIONS = """
from hotbed.host.jit import njit

def divide(x, y):
    return x / y

strict, loose = (njit(divide, name="divide", cache=True, error_model=model) for model in ("python", "numpy"))
print(int(loose(1.0, 0.0) > 1), sum(loose.stats.cache_hits.values()))
try:
    strict(1.0, 0.0)
except ZeroDivisionError:
    print(2, sum(strict.stats.cache_hits.values()))
"""


def test_a_kernel_with_other_options_is_another_kernel(tmp_path):
    (tmp_path / "options.py").write_text(OPTIONS)
    assert run(tmp_path, "import options") == [1, 0, 2, 0]
    assert run(tmp_path, "import options") == [1, 1, 2, 1]


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_damaged_file_is_compiled_again(tmp_path, suffix):
    (tmp_path / "kernels.py").write_text(KERNELS)
    assert run(tmp_path, CALL) == [21, 0]
    (damaged,) = (tmp_path / "cache").rglob(f"*.{suffix}")
    for content in (b"", damaged.read_bytes()[:-9], b"not a pickle"):
        (damaged,) = (tmp_path / "cache").rglob(f"*.{suffix}")
        damaged.write_bytes(content)
        assert run(tmp_path, CALL) == [21, 0]
        assert run(tmp_path, CALL) == [21, 1]


def test_without_a_folder_to_write_to_kernels_are_compiled_in_every_process(tmp_path, monkeypatch):
    monkeypatch.setattr(jit.FunctionCache._impl_class, "_locator_classes", [])
    kernel = njit(lambda x: x + 1, name=f"one_more_{tmp_path.name}", cache=True)
    assert kernel(1) == 2


def test_a_disk_that_is_full_does_not_stop_a_kernel(tmp_path, monkeypatch):
    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jit._KernelFiles, "_save_data", full)
    kernel = njit(lambda x: x + 2, name=f"two_more_{tmp_path.name}", cache=True)
    assert kernel(1) == 3


def files(folder):
    return jit._KernelFiles(cache_path=str(folder), filename_base="kernel", source_stamp=1)


def test_two_processes_that_save_at_once_do_not_mix_their_kernels(tmp_path, monkeypatch):
    mine, theirs = files(tmp_path), files(tmp_path)
    mine.save("int32", "mine before")
    before = mine._load_index()
    theirs.save("int64", "theirs")
    with monkeypatch.context() as patch:  # the index was read before they wrote
        patch.setattr(IndexDataCacheFile, "_load_index", lambda self: before)
        mine.save("float32", "mine")
    assert files(tmp_path).load("float32") == "mine"
    assert files(tmp_path).load("int32") == "mine before"
    assert files(tmp_path).load("int64") in (None, "theirs")  # it is compiled again


def test_kernels_of_an_older_source_are_removed(tmp_path):
    files(tmp_path).save("int32", "old")
    newer = jit._KernelFiles(cache_path=str(tmp_path), filename_base="kernel", source_stamp=2)
    newer.save("int32", "new")
    assert len(list(tmp_path.glob("*.nbc"))) == 1
    assert newer.load("int32") == "new"


def test_the_digest_tells_values_apart():
    def adds(n):
        return lambda x: x + n

    assert digest_of(adds(1)) == digest_of(adds(1))
    assert digest_of(adds(1)) != digest_of(adds(2))
    assert digest_of((1, "1")) != digest_of(("1", 1))
    assert digest_of(1) != digest_of(1.0)
    assert digest_of(np.uint64(1)) != digest_of(np.uint64(2))
    assert digest_of(np.uint64(1)) != digest_of(np.int64(1))
    assert digest_of(np.arange(2)) != digest_of(np.arange(1, 3))
    assert digest_of(np.empty) != digest_of(np.full)
    assert digest_of(numba.int32) != digest_of(numba.int64)
    assert digest_of(np.dtype([("a", "i4")])) != digest_of(np.dtype([("b", "i4")]))
    assert digest_of(((1, 2), 3)) != digest_of((1, (2, 3)))
    assert digest_of(Enum("E", {"A": 1})) != digest_of(Enum("E", {"A": 2}))
    assert digest_of(namedtuple("N", "a b")) != digest_of(namedtuple("N", "b a"))


def test_the_digest_holds_defaults():
    def made(default, key):
        def kernel(x, n=default, *, m=key):
            return x + n + m

        return kernel

    assert digest_of(made(1, 2)) == digest_of(made(1, 2))
    assert len({digest_of(one) for one in (made(1, 2), made(2, 2), made(1, 1))}) == 3
