"""Threads of a process: the cores it may use, and the one thread pool for Python code (compiled code has its own: pool.py).

torchrun gives each of several processes one thread (OMP_NUM_THREADS=1) unless the user set the variable. A rank with
tables has work for more: `share_cores` gives it its part of the machine's cores, and leaves a number that a user chose.

`run_ahead`: tasks in, results out, in the order of the tasks whatever the threads do. At most `ahead` results are pending at
any time, so memory is bounded. An exception in a thread is raised where its result would have come, with its own traceback;
closing the generator early ends the threads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

_NAME = "OMP_NUM_THREADS"
Task = TypeVar("Task")
Result = TypeVar("Result")


class CoreShare(NamedTuple):
    """What one rank takes of its machine."""

    threads: int
    cores: int
    local_ranks: int

    def __str__(self) -> str:
        each = f"{self.threads} thread{'s' * (self.threads != 1)} each instead of torchrun's one"
        return f"{self.local_ranks} ranks share {self.cores} cores: {each} ({_NAME}=N sets another number)"


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores(threads: int = 0) -> CoreShare | None:
    """Take `threads`, else cores / local ranks threads, where torchrun has chosen one; None where nothing changes."""
    import torch  # late: the command line reads and writes files without it

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_ranks < 2 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if os.environ.get(_NAME) != "1" or torch.get_num_threads() != 1 or _is_users_choice():
        return None
    share = CoreShare(threads or max(1, num_cores() // local_ranks), num_cores(), local_ranks)
    if share.threads == 1:
        return None
    torch.set_num_threads(share.threads)
    return share


def _is_users_choice() -> bool:
    """Whether torchrun itself was started with the variable, as far as that can be known: Linux keeps what it began with."""
    try:
        began_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(each.startswith(f"{_NAME}=".encode()) for each in began_with)


def run_ahead(
    function: Callable[[Task], Result], tasks: Iterable[Task], *, threads: int, ahead: int, name: str = "hotbed-data"
) -> Generator[Result, None, None]:
    """Yield function(task) for every task, computed by `threads` threads at most `ahead` tasks before it is needed."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    pending: deque[Future[Result]] = deque()
    try:
        for task in tasks:
            pending.append(pool.submit(function, task))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_all(
    function: Callable[[Task], object], tasks: Iterable[Task], *, threads: int, name: str = "hotbed-data"
) -> None:
    """Call the function for every task, by `threads` threads; the first error ends it."""
    for _ in run_ahead(function, tasks, threads=threads, ahead=threads, name=name):
        pass
