"""The systems by name: what each is, where it runs, what it needs, and how it is built. hotbed's and torch's are here."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

import hotbed
from hotbed.bench.fbgemm import FbgemmSystem
from hotbed.bench.workload import EPS, LR, Setting, Workload
from hotbed.cache import CacheCounts
from hotbed.errors import ConfigError
from hotbed.host.memory import available_memory, in_words
from hotbed.optim import RowOptimizer, row_optimizer
from hotbed.store import MemoryStore


class HotbedSystem:
    """EmbeddingTables without a cache."""

    def __init__(self, setting: Setting, **cache: Any) -> None:
        self.rule = setting.optimizer
        tables = {f"C{i}": hotbed.Table(n, setting.dim) for i, n in enumerate(setting.rows)}
        self.tables = hotbed.EmbeddingTables(tables, _optimizer(setting), device=setting.device, **cache)

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        for ids in workload.matrices:
            yield self.tables(ids)

    def weights(self) -> list[Tensor]:
        return [self.tables.weight(name).detach().clone().cpu() for name in self.tables.tables]

    def counts(self) -> CacheCounts | None:
        return None


class CachedSystem(HotbedSystem):
    """A share of the rows on the device, every batch waiting for its own copies."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, cache=setting.cache, **({"policy": setting.policy} if setting.policy else {}))
        self._ahead = {"window": setting.window, "look_ahead": setting.look_ahead}
        if setting.warm_store:
            for cache in self.tables.caches:
                cast(MemoryStore, cache.store).write_first_values()

    def counts(self) -> CacheCounts:
        return self.tables.counters()


class PrefetchedSystem(CachedSystem):
    """The same with copies under way while earlier batches train."""

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        ahead: Any = hotbed.prefetch(workload.matrices, self.tables, **self._ahead)
        with closing(ahead) as batches:
            for ids in batches:
                yield self.tables(ids)


def _optimizer(setting: Setting) -> RowOptimizer:
    eps = {} if setting.optimizer == "sgd" else {"eps": EPS}
    return row_optimizer(setting.optimizer, lr=LR, **eps)


class TorchSystem:
    """Every row on the device. torch has no row-wise Adagrad; its sparse SGD, which does less, stands in."""

    def __init__(self, setting: Setting) -> None:
        # as is the default; said aloud, torch does not warn of it
        torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
        self._bags = nn.ModuleList(_bag(n, setting) for n in setting.rows)
        self._offsets = torch.arange(setting.batch, device=setting.device)
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
        for flat in workload.flat:
            columns = flat.view(len(self._bags), -1)
            out = torch.cat([bag(ids, self._offsets) for bag, ids in zip(self._bags, columns)], dim=1)
            self._optimizer.zero_grad(set_to_none=True)
            yield out
            del out
            self._optimizer.step()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone().cpu() for parameter in self._bags.parameters()]

    def counts(self) -> None:
        return None


def _bag(rows: int, setting: Setting) -> nn.EmbeddingBag:
    first = torch.empty(rows, setting.dim, device=setting.device).uniform_(-0.01, 0.01)
    return nn.EmbeddingBag(rows, setting.dim, mode="sum", sparse=True, _weight=first)


Holds = Literal["device", "host", "managed"]


class System(Protocol):
    """One way to do the embedding step."""

    rule: str  # the row optimizer it really applies, as check.RULES names it

    def vectors(self, workload: Workload) -> Iterator[Tensor]:
        """Look up batch after batch, [B, F, D] or [B, F * D]; the caller runs backward before it asks for the next."""
        ...

    def weights(self) -> list[Tensor]:
        """The weights of every table, float32 [rows, D] on the host."""
        ...

    def counts(self) -> CacheCounts | None:
        """What its cache has done since it was made, where that is counted."""
        ...


class Kind(NamedTuple):
    """A line of the list of systems."""

    about: str
    make: Callable[[Setting], System]
    devices: tuple[str, ...]
    holds: Holds  # where all rows are, beside those a cache keeps on the device
    needs: str = ""  # a module that must be there


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
BASELINES = {"cuda": "fbgemm-hbm", "cpu": "fbgemm-cpu"}  # what ratios are to
EXACT_TWIN = {"hotbed-cached": "hotbed-hbm", "hotbed-cached-plain": "hotbed-hbm"}  # rows must be equal to the bit


def choose_systems(names: Sequence[str], device: torch.device) -> list[str]:
    """The systems asked for, the baseline first; none asked for: all that run on this device."""
    fitting = [name for name, kind in KINDS.items() if device.type in kind.devices]
    unknown = [name for name in names if name not in KINDS]
    elsewhere = [name for name in names if name in KINDS and name not in fitting]
    if unknown or elsewhere:
        wrong = [f"no system {name!r}" for name in unknown]
        wrong += [f"{name} does not run on {device.type}" for name in elsewhere]
        raise ConfigError(f"--systems: {', '.join(wrong)}; on {device.type} there are {', '.join(fitting)}")
    return [name for name in fitting if not names or name in names]


def missing(name: str) -> str | None:
    """Why a system cannot be had on this machine, in one line."""
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


def no_room(name: str, setting: Setting) -> str | None:
    """Why the rows do not fit, where that is known beforehand.

    Managed memory beyond what the device has free can hang it, so that counts as device memory too.
    """
    holds = KINDS[name].holds
    if holds == "host" and setting.device.type == "cuda":
        return None  # a virtual machine may grow its memory on demand, so what it shows as free is no limit
    free = available_memory(setting.device)
    if free is None or setting.table_bytes < free:
        return None
    return f"needs {in_words(setting.table_bytes)} for its rows, but {setting.device} has {in_words(free)} free"


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of what it says."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
