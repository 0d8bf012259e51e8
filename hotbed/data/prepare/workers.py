"""Who does the tasks of prepare: threads of this process, or tasks of a Ray cluster. Results come in the order of the tasks.

    threads   --memory is shared by all of them; progress is reported while a task runs
    ray       a task may run on any machine that sees the files and the workspace; Ray repeats tasks of machines that are lost

A task writes complete files into the workspace and may run twice, so it makes no difference who ran it, or how often.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from hotbed.errors import HotbedError, RankError, reason_of
from hotbed.host.extras import connect_ray
from hotbed.host.threads import run_ahead

Task = TypeVar("Task")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # bytes, rows
_PER_CPU = 2  # tasks that are handed to Ray for each of its cores
_RETRIES = 5  # of a task whose machine or process was lost
MEMORY_OF_WORKER = 448 << 20  # the maximum for a reel of any text; Criteo's take a third of it


class Workers(Protocol):
    """Runs tasks side by side."""

    def run(
        self,
        function: Callable[[Task, Progress], Result],
        tasks: Iterable[Task],
        progress: Progress,
        need: Callable[[Task], int] = lambda _: 0,
    ) -> Generator[Result, None, None]:
        """function(task, progress) for every task; `need` is its memory beyond that of a worker. Close it to end early."""
        ...


class WorkerThreads:
    """Threads of this process, whose tasks need `memory` bytes together."""

    def __init__(self, count: int, memory: int) -> None:
        self._count, self._gate = count, _Gate(memory)

    def run(
        self,
        function: Callable[[Task, Progress], Result],
        tasks: Iterable[Task],
        progress: Progress,
        need: Callable[[Task], int] = lambda _: 0,
    ) -> Generator[Result, None, None]:
        def run(task: Task) -> Result:
            with self._gate.take(need(task)):
                return function(task, progress)

        return run_ahead(run, tasks, threads=self._count, ahead=self._count)


class _Gate:
    """Limits the total memory of concurrent tasks; a task larger than the total runs alone."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = threading.Condition()

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        amount = min(amount, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._changed:
                self._free += amount
                self._changed.notify_all()


class RayWorkers:
    """Tasks of the Ray cluster that `ray.init` finds: RAY_ADDRESS, one started by `ray start`, or a new one here."""

    def __init__(self) -> None:
        self._ray = connect_ray()

    def run(
        self,
        function: Callable[[Task, Progress], Result],
        tasks: Iterable[Task],
        progress: Progress,
        need: Callable[[Task], int] = lambda _: 0,
    ) -> Generator[Result, None, None]:
        """Progress is reported when a task is done."""
        ray, pending = self._ray, deque[Any]()
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run)
        shared = ray.put(function)
        most = _PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
        try:
            for task in tasks:
                memory = MEMORY_OF_WORKER + need(task)
                self._check_room(memory)
                pending.append(remote.options(memory=memory).remote(shared, task))
                if len(pending) >= most:
                    yield self._result(pending.popleft(), progress)
            while pending:
                yield self._result(pending.popleft(), progress)
        finally:
            for one in pending:
                ray.cancel(one, force=True)

    def _result(self, one: Any, progress: Progress) -> Any:
        from ray.exceptions import RayError, RayTaskError

        try:
            result, num_bytes, rows = self._ray.get(one)
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, HotbedError | OSError) else error) from None
        except RayError as error:
            raise RankError(
                f"a task of prepare was lost {_RETRIES + 1} times on the Ray cluster ({type(error).__name__}: "
                f"{reason_of(error)}). Run the same command again: finished work is kept."
            ) from error
        progress(num_bytes, rows)
        return result

    def _check_room(self, memory: int) -> None:
        """A task that fits no machine would wait for ever."""
        machines = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if not any(one.get("CPU", 0) >= 1 and one.get("memory", 0) >= memory for one in machines):
            most = max((one.get("memory", 0) for one in machines if one.get("CPU", 0) >= 1), default=0)
            raise RankError(
                f"a task of prepare needs one core and {memory >> 20:,} MiB on one machine of the Ray cluster; the largest of "
                f"{len(machines)} machines offers {int(most) >> 20:,} MiB (`ray status`). Give a smaller --memory, or start "
                "Ray with more (`ray start --num-cpus ... --memory ...`)."
            )


def _run(function: Callable[[Any, Progress], Any], task: Any) -> tuple[Any, int, int]:
    """In a process of Ray: the result, and the bytes and rows that were read for it."""
    done = [0, 0]

    def count(num_bytes: int, rows: int) -> None:
        done[0] += num_bytes
        done[1] += rows

    result = function(task, count)
    return result, done[0], done[1]
