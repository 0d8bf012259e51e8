"""The settings of one line of the benchmark, for every system; and the same work in several processes, each a rank.

Every rank takes its part of each batch, on this machine. Ranks with a GPU of their own use NCCL; ranks that share one, and
those on a CPU, use Gloo.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hotbed.data.synthetic.shapes import BAG_SIZES, ID_COLUMNS
from hotbed.errors import BudgetError, ConfigError
from hotbed.host.threads import num_cores

IDS = ("single", "bags", "varying", "dynamic")
OUTPUTS = ("stack", "concat", "dict")
OPTIMIZERS = ("rowwise_adagrad", "adam", "adagrad", "sgd")
LR, EPS = 0.01, 1e-8  # of the rows, for every system
ZIPF = 1.05
KAGGLE_ROWS = tuple(column.cardinality for column in ID_COLUMNS)
_STATES = {"rowwise_adagrad": (1, 0), "adam": (1, 2), "adagrad": (0, 1), "sgd": (0, 0)}  # numbers (per row, per weight)


@dataclass(frozen=True)
class Setting:
    """One line of the benchmark."""

    device: torch.device
    dim: int = 128
    batch: int = 16384
    optimizer: str = "rowwise_adagrad"
    dense: int = 0  # width of the MLP behind the lookup; 0: a given gradient instead, the embedding step alone
    ids: str = "single"
    zipf: float = ZIPF
    output: str = "stack"  # hotbed's
    cache: float = 0.015  # share of the rows on the device, where a system has a cache
    ssd: float | None = (
        None  # share of the rows in memory below hotbed's cache, the others in files; None: all in memory
    )
    ssd_folder: str = ""  # of these files
    ranks: int = 0  # processes that hotbed's rows are sharded over; 0: no ranks
    cold: bool = False  # no row was written before the first step
    policy: str | None = None  # hotbed's; None: its default
    window: int | None = None
    look_ahead: int | None = None
    steps: int = 100
    warmup: int = 80
    rows: tuple[int, ...] = KAGGLE_ROWS

    @property
    def bag_sizes(self) -> tuple[int, ...]:
        """Ids of one sample by table, exact or on average."""
        if self.ids in ("bags", "varying"):
            return tuple(islice(cycle(BAG_SIZES), len(self.rows)))
        return (1,) * len(self.rows)

    @property
    def ids_per_sample(self) -> int:
        """On average."""
        return sum(self.bag_sizes)

    @property
    def width(self) -> int:
        """Numbers of one sample's vectors."""
        return len(self.rows) * self.dim

    @property
    def record_bytes(self) -> int:
        """One row with its optimizer state."""
        per_row, per_weight = _STATES[self.optimizer]
        return 4 * (self.dim * (1 + per_weight) + per_row)

    @property
    def table_bytes(self) -> int:
        """All rows with their optimizer state."""
        return sum(self.rows) * self.record_bytes


def scaled_rows(scale: float) -> tuple[int, ...]:
    """Kaggle's tables with `scale` times the rows; small tables keep at least their first hundred rows."""
    return tuple(max(min(n, 100), round(n * scale)) for n in KAGGLE_ROWS)


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
