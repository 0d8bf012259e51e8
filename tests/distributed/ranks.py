"""Run a function in W processes that form one process group: what each returned, or the traceback of the one that failed.

    def mean_of(values):
        mine = torch.tensor(values[dist.get_rank()])
        dist.all_reduce(mine)
        return mine / dist.get_world_size()

    assert run_ranks(mean_of, 2, [1.0, 3.0]) == [2.0, 2.0]

The function and its arguments are pickled, so it stands at the top of a module. Every rank has one torch thread and the
environment torchrun would give it; `nodes` says over how many machines the ranks seem to be spread, and `init=False`
leaves the process group to the function. Ranks that hang are killed when `timeout` seconds have passed, and the
message shows where each of them was.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT = 120.0  # seconds
GRACE = 1.0  # seconds that the other ranks have to fail too
_context = multiprocessing.get_context("forkserver")


class Place(NamedTuple):
    """Where a rank is, and the folder the ranks share."""

    rank: int
    world: int
    nodes: int
    folder: Path
    init: bool
    timeout: float

    @property
    def stacks(self) -> Path:
        """Where a rank that hangs says what it was doing."""
        return self.folder / f"stacks-{self.rank}"


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, nodes: int = 1, init: bool = True, timeout: float = TIMEOUT
) -> list[Any]:
    """What `function(*args)` returned in each of `world` ranks; a rank that fails or hangs is an AssertionError."""
    _context.set_forkserver_preload(["tests.distributed.ahead"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        places = [Place(rank, world, nodes, Path(folder), init, timeout) for rank in range(world)]
        ranks = [_start(place, function, args) for place in places]
        try:
            return _results(ranks, places)
        finally:
            for process, answers in ranks:
                process.kill()
                process.join()
                answers.close()


def _start(place: Place, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Connection]:
    answers, answer = _context.Pipe(duplex=False)
    # Pickled here, not by multiprocessing: torch would pass tensors by memory that ends with its process.
    process = _context.Process(target=_rank, args=(place, answer, pickle.dumps((function, args))), daemon=True)
    process.start()
    answer.close()
    return process, answers


def _results(ranks: list[tuple[Any, Connection]], places: list[Place]) -> list[Any]:
    deadline = time.monotonic() + places[0].timeout + 1.0  # a rank that hangs shows its stacks first
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    waiting = {answers: rank for rank, (_, answers) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            stacks = "\n".join(f"rank {rank}:\n{_stacks(places[rank])}" for rank in sorted(waiting.values()))
            raise AssertionError(f"ranks {sorted(waiting.values())} hung for {places[0].timeout} s\n{stacks}")
        for answers in ready:
            rank = waiting.pop(answers)
            try:
                when, failure, results[rank] = pickle.loads(answers.recv_bytes())
            except EOFError:
                ranks[rank][0].join()
                when, failure = 0.0, f"it ended with exit code {ranks[rank][0].exitcode}"
            if failure:
                failures.append((when, rank, failure))
        if failures:  # one that was killed may be noticed after those that failed because of it
            deadline = min(deadline, time.monotonic() + GRACE)
    if failures:  # the first of them
        _, rank, failure = min(failures)
        raise AssertionError(f"rank {rank} of {len(ranks)} failed:\n{failure}")
    return [results[rank] for rank in range(len(ranks))]


def _stacks(place: Place) -> str:
    """Of a rank that hangs; on a busy machine it may have begun late."""
    deadline, before = time.monotonic() + TIMEOUT, ""
    while time.monotonic() < deadline:
        text = place.stacks.read_text() if place.stacks.exists() else ""
        if text and text == before:  # nothing more is written to it
            return text
        before = text
        time.sleep(0.2)
    return before or "(nothing known)"


def _rank(place: Place, answer: Connection, work: bytes) -> None:
    """In the new process."""
    import torch
    import torch.distributed as dist

    local = place.world // place.nodes
    numbers = {"RANK": place.rank, "WORLD_SIZE": place.world, "GROUP_RANK": place.rank // local}
    numbers |= {"LOCAL_RANK": place.rank % local, "LOCAL_WORLD_SIZE": local}
    os.environ.update({name: str(number) for name, number in numbers.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    with open(place.stacks, "w") as stacks:
        # A start takes long on a busy machine: what a rank does meanwhile is not where it hangs.
        faulthandler.dump_traceback_later(max(place.timeout, TIMEOUT), file=stacks)
        try:
            function, args = pickle.loads(work)
            if place.init:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{place.folder}/store",
                    rank=place.rank,
                    world_size=place.world,
                    timeout=timedelta(seconds=place.timeout + 60.0),  # the stacks are shown first
                )
                faulthandler.dump_traceback_later(place.timeout, file=stacks)  # anew: others may have begun late
            result = pickle.dumps((0.0, "", function(*args)))
            if dist.is_initialized():
                dist.barrier()  # a rank that leaves early breaks what others are still doing
                dist.destroy_process_group()
        except BaseException:
            result = pickle.dumps((time.monotonic(), traceback.format_exc(), None))
        answer.send_bytes(result)
        faulthandler.cancel_dump_traceback_later()
