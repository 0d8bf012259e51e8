"""Runs a compiled kernel on all cores: `kernel(thread, num_threads, *arguments)` once per thread.

The kernels release the GIL, so plain Python threads are enough, whatever OpenMP or TBB a machine has, and two callers in
one process cannot disturb each other (Numba's default thread pool aborts on that). A call costs about 20 us beyond the
kernel. A kernel must write disjoint places from different threads and must not depend on num_threads in its results.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_pool: ThreadPoolExecutor | None = None
_pool_pid = 0


def num_threads() -> int:
    """As many threads as torch uses (`torch.set_num_threads`)."""
    return torch.get_num_threads()


def in_parallel(kernel: Callable[..., Any], *arguments: Any, threads: int = 0) -> None:
    """Run the kernel on `threads` threads (default: num_threads()) and wait; the first exception is raised here."""
    threads = threads or num_threads()
    if threads == 1:
        kernel(0, 1, *arguments)
        return
    pool = _shared_pool()
    futures = [pool.submit(kernel, thread, threads, *arguments) for thread in range(1, threads)]
    try:
        kernel(0, threads, *arguments)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


def _shared_pool() -> ThreadPoolExecutor:
    global _pool, _pool_pid  # noqa: PLW0603  one pool per process; a forked child must not use its parent's
    if _pool is None or _pool_pid != os.getpid():
        _pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="hotbed-op")
        _pool_pid = os.getpid()
    return _pool
