"""The same work in several processes, each a rank with its part of every batch, on this machine.

Ranks with a GPU of their own use NCCL; ranks that share one, and those on a CPU, use Gloo.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hotbed.bench.setting import Setting
from hotbed.errors import BudgetError, ConfigError
from hotbed.host.threads import num_cores


class BrokenRankError(Exception):
    """An error of a rank; the message is its traceback."""


class RankAnswer(NamedTuple):
    """The result of one rank."""

    result: Any = None
    refusal: ConfigError | BudgetError | None = None  # a setting that is not possible
    trace: str = ""


def in_ranks(work: Callable[[Setting, str], Any], setting: Setting, name: str) -> list[Any]:
    """work(setting, name) in every rank of the setting; `work` is a module-level function."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hotbed-bench-") as folder:
        pipes, processes = [], []
        try:
            for rank in range(setting.ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, folder, work, setting, name, theirs), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _answers(pipes)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:  # ends: every rank answers or its pipe breaks
        for ready in wait(list(waiting)):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            try:
                answer: RankAnswer = ready.recv()
            except EOFError:
                raise BrokenRankError(f"rank {rank} ended without an answer") from None
            if answer.refusal is not None:
                raise answer.refusal
            if answer.trace:
                raise BrokenRankError(f"rank {rank}: {answer.trace}")
            results[rank] = answer.result
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, folder: str, work: Callable[[Setting, str], Any], setting: Setting, name: str, pipe: Connection
) -> None:
    """In the new process."""
    try:
        torch.set_num_threads(max(1, num_cores() // setting.ranks))
        backend, device = "gloo", setting.device
        if device.type == "cuda":
            count = torch.cuda.device_count()
            device = torch.device("cuda", rank % count)
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl" if setting.ranks <= count else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=setting.ranks)
        answer = RankAnswer(work(replace(setting, device=device), name))
        dist.barrier()  # a rank that leaves early breaks what others are still doing
    except (ConfigError, BudgetError) as error:
        answer = RankAnswer(refusal=error)
    except BaseException:
        answer = RankAnswer(trace=traceback.format_exc())
    pipe.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()
