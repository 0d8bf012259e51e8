"""The machine below the node: NUMA nodes with their cores and memory, GPUs, and the place of every local rank.

In: what Linux says under /sys, and the cores that this process was given (cgroups, taskset). Out: `Placement`: the cores, the
memory node and the threads of each local rank, and whether ranks are bound to them.

A rank with a GPU belongs on the NUMA node of the GPU: its host copies cross no socket. Ranks of one NUMA node share its cores.
Ranks on CPUs have equal shares of the cores, in the order of NUMA nodes and physical cores. Memory of a node is preferred and
not demanded: a store larger than its node takes the rest from another, where a strict policy would end the process.

Binding is never surprising: nothing is bound outside of the given cores; nothing changes on a machine with one NUMA node,
or where ranks of a machine were given different cores by whoever started them.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

_SYSTEM = Path("/sys")
_PREFERRED = 1  # MPOL_PREFERRED
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the system call; libc has no function for it
_WORD = 64


class NumaNode(NamedTuple):
    """Cores that are equally near to some memory."""

    number: int
    cores: tuple[int, ...]  # that this process may use; hardware threads of one core stand next to each other
    memory: int  # bytes


class Gpu(NamedTuple):
    """A CUDA device."""

    number: int
    name: str
    address: str  # on the PCI bus
    node: int | None  # NUMA node; None: the machine does not say


class Machine(NamedTuple):
    """What was found."""

    nodes: tuple[NumaNode, ...]
    gpus: tuple[Gpu, ...] = ()

    @property
    def cores(self) -> tuple[int, ...]:
        """The cores that this process may use, by NUMA node."""
        return tuple(core for node in self.nodes for core in node.cores)


class RankPlace(NamedTuple):
    """The part of a machine for one local rank."""

    cores: tuple[int, ...]
    node: int | None  # for its memory; None: its cores are of several nodes
    threads: int
    gpu: int | None = None

    def __str__(self) -> str:
        memory = "" if self.node is None else f" and memory of NUMA node {self.node}"
        return f"cores {cores_text(self.cores)}{memory}"


class Placement(NamedTuple):
    """What was chosen for the ranks of one machine."""

    ranks: tuple[RankPlace, ...]
    bound: bool
    why: str

    def __str__(self) -> str:
        if not self.bound:
            return f"ranks are not bound to cores: {self.why}"
        places = "; ".join(f"local rank {number}: {place}" for number, place in enumerate(self.ranks))
        return f"ranks are bound ({self.why}): {places}"


def find_machine(gpus: Sequence[Gpu] = (), root: Path = _SYSTEM, allowed: Collection[int] | None = None) -> Machine:
    """NUMA nodes with the cores that this process may use; a single one where the system does not say."""
    cores = set(given_cores() if allowed is None else allowed)
    folders = sorted((root / "devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    nodes = []
    for folder in folders:
        mine = cores & set(read_list(_text(folder / "cpulist")))
        ordered = tuple(sorted(mine, key=lambda core: (_first_thread(core, root), core)))
        nodes.append(NumaNode(int(folder.name[4:]), ordered, _memory(folder)))
    if cores != {core for node in nodes for core in node.cores}:
        nodes = [NumaNode(0, tuple(sorted(cores)), sum(node.memory for node in nodes))]
    return Machine(tuple(nodes), tuple(gpus))


def find_gpus(root: Path = _SYSTEM) -> tuple[Gpu, ...]:
    """The CUDA devices that this process sees."""
    import torch  # late: the command line starts without it

    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(number)
        parts = [getattr(facts, f"pci_{name}_id", -1) for name in ("domain", "bus", "device")]  # torch before 2.5: none
        address = "" if -1 in parts else f"{parts[0]:04x}:{parts[1]:02x}:{parts[2]:02x}.0"
        found.append(Gpu(number, facts.name, address, node_of_device(address, root)))
    return tuple(found)


def node_of_device(address: str, root: Path = _SYSTEM) -> int | None:
    """The NUMA node of a PCI address."""
    text = _text(root / "bus/pci/devices" / address / "numa_node").strip() if address else ""
    return int(text) if text.isdigit() else None  # -1: the firmware does not say


def place_ranks(
    machine: Machine,
    num_ranks: int,
    *,
    gpus: Sequence[int] | None = None,
    bind: bool | str = "auto",
    given_apart: bool = False,
) -> Placement:
    """Places of the local ranks; `gpus`: the device of each, None on CPUs; `given_apart`: ranks were given different cores."""
    if given_apart:  # the machine of a rank is then its own part
        one = RankPlace(machine.cores, None, len(machine.cores))
        places = tuple(one._replace(gpu=None if gpus is None else gpus[rank]) for rank in range(num_ranks))
        return Placement(places, False, "they were started with different cores, which they keep")
    places = _with_gpus(machine, gpus) if gpus is not None else _shares(machine, num_ranks)
    unbound = tuple(place._replace(cores=machine.cores, node=None) for place in places)
    num_nodes = sum(bool(node.cores) for node in machine.nodes)
    at = f"{num_nodes} NUMA node{'s' * (num_nodes != 1)} with {len(machine.cores)} cores"
    if bind is False:
        return Placement(unbound, False, "parallel.bind=false")
    if bind == "auto" and num_nodes == 1:
        return Placement(unbound, False, f"{at}, the same for all of them")
    if all(len(place.cores) == len(machine.cores) for place in places):
        return Placement(unbound, False, f"{at}, and no share of them belongs to one rank more than to another")
    return Placement(places, True, at)


def _with_gpus(machine: Machine, gpus: Sequence[int]) -> tuple[RankPlace, ...]:
    """The cores of the GPU's NUMA node, for all ranks whose GPUs are there."""
    cores_of = {node.number: node.cores for node in machine.nodes if node.cores}
    node_of = {gpu.number: gpu.node for gpu in machine.gpus if gpu.node in cores_of}
    nodes = [node_of.get(gpu) for gpu in gpus]
    found = []
    for gpu, node in zip(gpus, nodes):
        cores = machine.cores if node is None else cores_of[node]
        sharing = len(gpus) if node is None else nodes.count(node)
        found.append(RankPlace(cores, node, max(1, len(cores) // sharing), gpu))
    return tuple(found)


def _shares(machine: Machine, num_ranks: int) -> tuple[RankPlace, ...]:
    """Equal shares of all cores; where there are fewer cores than ranks, all cores for each."""
    cores = machine.cores
    borders = [rank * len(cores) // num_ranks for rank in range(num_ranks + 1)]
    found = []
    for start, stop in pairwise(borders):
        mine = cores[start:stop] if len(cores) >= num_ranks else cores
        at = [node.number for node in machine.nodes if set(mine) & set(node.cores)]
        found.append(RankPlace(mine, at[0] if len(at) == 1 else None, max(1, len(cores) // num_ranks)))
    return tuple(found)


def bind_process(place: RankPlace) -> str:
    """Bind all threads of this process, and prefer its memory node for those that start from now on; what was refused."""
    allowed = given_cores()
    assert set(place.cores) <= set(allowed), f"cores {place.cores} are not all among those given: {allowed}"
    try:
        os.sched_setaffinity(0, place.cores)
    except (OSError, AttributeError) as error:
        return f"the system refuses to bind it to cores {cores_text(place.cores)} ({error})"
    for task in Path("/proc/self/task").glob("[0-9]*"):  # threads that run already, such as the heartbeat
        try:
            os.sched_setaffinity(int(task.name), place.cores)
        except OSError:  # it has ended
            continue
    return "" if place.node is None else _prefer_memory(place.node)


def _prefer_memory(node: int) -> str:
    """Set the memory policy of this thread and of those it starts; returns why not.

    Containers may refuse it: pages then come from where they are used.
    """
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"no memory policy is known for {platform.machine()}; pages come from where they are first used"
    words = node // _WORD + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _WORD] = 1 << node % _WORD
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _PREFERRED, mask, ctypes.c_ulong(words * _WORD + 1)) != 0:
        reason = os.strerror(ctypes.get_errno())
        return f"the system refuses to prefer memory of NUMA node {node} ({reason}); pages come from where they are first used"
    return ""


def given_cores() -> tuple[int, ...]:
    """The cores that this thread may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def read_list(text: str) -> list[int]:
    """The numbers of "0-3,8"."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last or first) + 1)
    return found


def cores_text(cores: Collection[int]) -> str:
    """The inverse: 0-3,8."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def _first_thread(core: int, root: Path) -> int:
    """The first hardware thread of a core's physical core."""
    return min(read_list(_text(root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list")), default=core)


def _memory(folder: Path) -> int:
    for line in _text(folder / "meminfo").splitlines():
        if "MemTotal:" in line:
            return int(line.split()[-2]) * 1024
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
