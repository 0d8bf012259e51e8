"""Work done ahead of need by background threads, handed over in order: the one thread pool for Python code.

Compiled code has its own (pool.py).

In: a function and a sequence of tasks. Out: the results, in the order of the tasks whatever the threads do. At most `ahead`
results wait or are being made at any time, so memory is bounded. An exception in a thread is raised where its result would
have come, with its own traceback; closing the generator early ends the threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


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
