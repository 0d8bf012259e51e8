"""The systems by name: description, devices, requirements, and how to build them. hotbed's and torch's are here."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotbed
from hotbed.bench.fbgemm import FbgemmSystem, Peer
from hotbed.bench.setting import EPS, LR, Setting
from hotbed.bench.workload import Workload, id_of_row, offsets_of, values_of
from hotbed.cache import BYTES_PER_SLOT, CacheCounts
from hotbed.errors import ConfigError
from hotbed.host.memory import available_memory, in_words
from hotbed.ops.records import layout_of
from hotbed.optim import RowOptimizer, row_optimizer
from hotbed.store.counts import TierCounts
from hotbed.tables.group.cached import CachedRows
from hotbed.tables.sizing.enough import least_over_ssd
from hotbed.types import Batch, RowPart

_CHUNK = 1 << 18  # rows written at once
_SSD_SLACK = 64 << 20  # bytes: segments that are half full
Vectors = Tensor | dict[str, Tensor]  # [B, F, D] or [B, F * D]; of every feature [B, D]


class HotbedSystem:
    """EmbeddingTables without a cache; with ranks, this rank's part of ShardedTables."""

    def __init__(self, setting: Setting, **budgets: Any) -> None:
        self.rule = setting.optimizer
        self._setting = setting
        count = [None if setting.ids == "dynamic" else rows for rows in setting.rows]
        declared = {f"C{i}": hotbed.Table(rows, setting.dim) for i, rows in enumerate(count)}
        make: Any = partial(hotbed.ShardedTables, gradients="sum") if setting.ranks else hotbed.EmbeddingTables
        self.tables: hotbed.EmbeddingTables = make(
            declared, _optimizer(setting), device=setting.device, output=setting.output, **budgets
        )
        if not setting.cold:
            _write_all_rows(self.tables, setting)

    def vectors(self, workload: Workload) -> Iterator[Vectors]:
        for batch in workload.batches:
            yield self._look_up(batch)

    def _look_up(self, batch: Tensor | Batch) -> Vectors:
        out: Vectors = self.tables(batch) if isinstance(batch, Tensor) else self.tables(batch.ids, batch.bags)
        return out

    def weights(self) -> list[Tensor]:
        return [self._weight(name, rows) for name, rows in zip(self.tables.tables, self._setting.rows)]

    def _weight(self, name: str, num_rows: int) -> Tensor:
        ids, columns = self.tables.rows(name)
        parts = [(ids.cpu(), columns["weight"].cpu())]
        if self._setting.ranks:  # each has the rows it owns
            parts *= self._setting.ranks
            dist.all_gather_object(parts, parts[0])
        ids, weight = (torch.cat(part) for part in zip(*parts))
        rows = torch.arange(num_rows)
        if self._setting.ids == "dynamic":
            rows = id_of_row(rows)
        found, order = ids.sort()
        return weight[order[torch.searchsorted(found, rows)]]

    def counts(self) -> CacheCounts | None:
        return self.tables.counters() if self.tables.caches else None

    def tier_counts(self) -> TierCounts | None:
        tiers = self.tables.tiers()
        return None if tiers is None else tiers.counts

    def close(self) -> None:
        for cache in self.tables.caches:
            cache.store.close()


class CachedSystem(HotbedSystem):
    """A share of the rows on the device; every batch waits for its own copies."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, **_budgets(setting), **({"policy": setting.policy} if setting.policy else {}))


class PrefetchedSystem(CachedSystem):
    """The same with copies in flight while earlier batches train."""

    def vectors(self, workload: Workload) -> Iterator[Vectors]:
        one = self._setting
        ahead: Any = hotbed.prefetch(workload.batches, self.tables, window=one.window, look_ahead=one.look_ahead)
        with closing(ahead) as batches:
            for batch in batches:
                yield self._look_up(batch)


def _optimizer(setting: Setting) -> RowOptimizer:
    eps = {} if setting.optimizer == "sgd" else {"eps": EPS}
    return row_optimizer(setting.optimizer, lr=LR, **eps)


def _budgets(setting: Setting) -> dict[str, Any]:
    """The arguments of tables behind a cache; the rows of ranks are divided, and so are their bytes."""
    rows = -(-sum(setting.rows) // max(1, setting.ranks))
    record = layout_of(setting.dim, _optimizer(setting)).width * 4
    if setting.ids == "dynamic":  # they have no number of rows, so a cache cannot be a share
        return {"hbm": round(setting.cache * rows * (record + BYTES_PER_SLOT))}
    if setting.ssd is None:
        return {"cache": setting.cache}
    memory = least_over_ssd([(rows, record)], rows, round(setting.ssd * rows))
    return {"cache": setting.cache, "memory": memory, "ssd": f"{setting.ssd_folder}:{4 * rows * record + _SSD_SLACK}"}


def _write_all_rows(tables: hotbed.EmbeddingTables, setting: Setting) -> None:
    """The state of a run that has seen all its ids: every row below the cache is written, and no new ones are created."""
    if setting.ids == "dynamic":
        ids = (id_of_row(torch.arange(rows)).sort().values for rows in setting.rows)
        tables.load_rows(part for name, some in zip(tables.tables, ids) for part in _first_rows(tables, name, some))
        return
    for cache in tables.caches:
        write_rows(cache)


def write_rows(cache: CachedRows) -> None:
    """Write every row of preset tables as it is: one that was never written has its initial value."""
    for keys in torch.split(torch.arange(cache.keyspace.num_rows), _CHUNK):
        records = torch.empty(keys.shape[0], cache.layout.width, device="cpu")
        cache.store.read(keys, records)
        cache.store.write(keys, records)


def _first_rows(tables: hotbed.EmbeddingTables, name: str, ids: Tensor) -> Iterator[RowPart]:
    group = tables.group_of(name)
    for some in torch.split(ids, _CHUNK):
        yield RowPart(name, some, {"weight": group.first(name, some)["weight"]})


class TorchSystem(Peer):
    """Every row on the device. torch has no row-wise Adagrad; its sparse SGD, which does less, stands in."""

    def __init__(self, setting: Setting) -> None:
        # the default, set explicitly so that torch does not warn
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        self._bags = nn.ModuleList(_bag(n, setting) for n in setting.rows)
        parameters = list(self._bags.parameters())
        self._optimizer: torch.optim.Optimizer
        if setting.optimizer == "adam":
            self.rule = "adam_by_table"
            self._optimizer = torch.optim.SparseAdam(parameters, lr=LR, eps=EPS)
        elif setting.optimizer == "adagrad":
            self.rule = "adagrad"
            self._optimizer = torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
        else:
            self.rule = "sgd"
            self._optimizer = torch.optim.SGD(parameters, lr=LR)

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        for ids in workload.flat:
            inputs = [(values_of(ids, f), offsets_of(ids, f, workload.batch)) for f in range(len(self._bags))]
            out = torch.cat([bag(*each) for bag, each in zip(self._bags, inputs)], dim=1)
            self._optimizer.zero_grad(set_to_none=True)
            yield out
            del out
            self._optimizer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone().cpu() for parameter in self._bags.parameters()]


def _bag(rows: int, setting: Setting) -> nn.EmbeddingBag:
    first = torch.empty(rows, setting.dim, device=setting.device).uniform_(-0.01, 0.01)
    return nn.EmbeddingBag(rows, setting.dim, mode="sum", sparse=True, include_last_offset=True, _weight=first)


Holds = Literal["device", "host", "managed"]


class System(Protocol):
    """One way to do the embedding step."""

    rule: str  # the row optimizer it really applies, as check.RULES names it

    def vectors(self, workload: Workload) -> Iterator[Vectors]:
        """Look up batch after batch; the caller runs backward before it asks for the next."""
        ...

    def weights(self) -> list[Tensor]:
        """The weights of every table, float32 [rows, D] on the host."""
        ...

    def counts(self) -> CacheCounts | None:
        """What its cache has done since it was made, where that is counted."""
        ...

    def tier_counts(self) -> TierCounts | None:
        """What its memory and ssd have done, where it has an ssd."""
        ...

    def close(self) -> None:
        """Close its files."""
        ...


class Kind(NamedTuple):
    """A line of the list of systems."""

    about: str
    make: Callable[[Setting], System]
    devices: tuple[str, ...]
    holds: Holds  # where all rows are, apart from those in a cache on the device
    needs: str = ""  # a module that must be installed


def _fbgemm(way: str, about: str, holds: Holds, device: str = "cuda") -> Kind:
    return Kind(about, partial(FbgemmSystem, way=way), (device,), holds, needs="fbgemm_gpu")


_BOTH = ("cuda", "cpu")
KINDS = {
    "fbgemm-hbm": _fbgemm("hbm", "FBGEMM, every row on the device", "device"),
    "fbgemm-cpu": _fbgemm("cpu", "FBGEMM on the CPU", "device", "cpu"),
    "fbgemm-lru-managed": _fbgemm("lru_managed", "its LRU cache over managed memory", "managed"),
    "fbgemm-lru-mapped": _fbgemm("lru_mapped", "its LRU cache over mapped host memory", "host"),
    "fbgemm-lfu-mapped": _fbgemm("lfu_mapped", "its LFU cache over mapped host memory", "host"),
    "fbgemm-lru-managed-prefetch": _fbgemm(
        "lru_managed_prefetch", "its LRU cache, fetching one batch ahead", "managed"
    ),
    "torch": Kind("nn.EmbeddingBag with sparse gradients", TorchSystem, _BOTH, "device"),
    "hotbed-hbm": Kind("hotbed, every row on the device", HotbedSystem, _BOTH, "device"),
    "hotbed-cached": Kind("hotbed, a cache under hotbed.prefetch", PrefetchedSystem, _BOTH, "host"),
    "hotbed-cached-plain": Kind("the same cache in a plain loop", CachedSystem, _BOTH, "host"),
}
OURS = ("hotbed-hbm", "hotbed-cached", "hotbed-cached-plain")
BASELINES = {"cuda": "fbgemm-hbm", "cpu": "fbgemm-cpu"}  # what ratios are relative to
EXACT_TWIN = {"hotbed-cached": "hotbed-hbm", "hotbed-cached-plain": "hotbed-hbm"}  # rows must be equal to the bit


@contextmanager
def open_system(name: str, setting: Setting) -> Iterator[System]:
    """A system, with a temporary folder for its files if it has some; both are removed afterwards."""
    if setting.ssd is None:
        yield KINDS[name].make(setting)
        return
    Path(setting.ssd_folder or tempfile.gettempdir()).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hotbed-bench-", dir=setting.ssd_folder or None) as folder:
        system = KINDS[name].make(replace(setting, ssd_folder=folder))
        try:
            yield system
        finally:
            system.close()


def choose_systems(names: Sequence[str], device: torch.device) -> list[str]:
    """The systems of these names, the baseline first; without names, all that run on this device."""
    fitting = [name for name, kind in KINDS.items() if device.type in kind.devices]
    unknown = [name for name in names if name not in KINDS]
    elsewhere = [name for name in names if name in KINDS and name not in fitting]
    if unknown or elsewhere:
        wrong = [f"no system {name!r}" for name in unknown]
        wrong += [f"{name} does not run on {device.type}" for name in elsewhere]
        raise ConfigError(f"--systems: {', '.join(wrong)}; on {device.type} there are {', '.join(fitting)}")
    return [name for name in fitting if not names or name in names]


def why_missing(name: str) -> str | None:
    """Why a system is not available on this machine, in one line."""
    needs = KINDS[name].needs
    if not needs:
        return None
    if importlib.util.find_spec(needs) is None:
        return f"{needs}: not installed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(needs)
    except Exception as error:  # a library for another torch or CUDA fails in many ways
        return f"{needs}: cannot be imported ({first_line(error)})"
    return None


def why_no_room(name: str, setting: Setting) -> str | None:
    """Why the rows do not fit, if that is known beforehand.

    Managed memory beyond what the device has free can hang it, so that counts as device memory too.
    """
    holds = KINDS[name].holds
    if holds == "host" and setting.device.type == "cuda":
        return None  # a virtual machine may grow its memory on demand, so its free memory is not a limit
    free = available_memory(setting.device)
    if free is None or setting.table_bytes < free:
        return None
    return f"needs {in_words(setting.table_bytes)} for its rows, but {setting.device} has {in_words(free)} free"


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
