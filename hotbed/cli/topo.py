"""`hotbed topo`: the machine below the node, the wires between ranks, and what hotbed makes of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from hotbed.cli import options as opt
from hotbed.cli.console import out, print_json
from hotbed.cli.ranks import TorchrunRanks, join_ranks

if TYPE_CHECKING:
    from hotbed.host.topology import Machine, Placement
    from hotbed.parallel.links import LinkFigures
    from hotbed.parallel.world import World

_TIMEOUT = 300.0  # seconds
_MOST_SHOWN = 16  # ranks whose pairs are printed one by one


def topo_command(ranks: opt.Ranks = None, device: opt.Device = None, as_json: opt.AsJson = False) -> None:
    """Show NUMA nodes, GPUs and links between ranks, and the cores, memory and threads that ranks get.

    Alone, it says what the ranks of a run on this machine would get; --ranks left out: one for each GPU, else one. Started
    by torchrun, it also measures the links between these ranks, and an exchange between all of them in one hop and in two.
    Nothing is written, and nothing stays bound.

    [bold]For example:[/bold]

    hotbed topo

    hotbed topo --ranks 8 --device cpu

    torchrun --nproc-per-node 4 -m hotbed topo
    """
    import torch

    from hotbed.host.devices import pick_device

    name = str(pick_device(device or "auto").type)
    with join_ranks() as joint:
        if joint.size == 1:
            number = ranks or max(1, torch.cuda.device_count() if name == "cuda" else 1)
            machine, placement = _placed(number, name)
            found = Topology([MachineReport(os.uname().nodename, machine, placement)], 1, number, None)
        else:
            if ranks is not None:
                raise typer.BadParameter(
                    "is for a single process; torchrun sets the number of ranks", param_hint="--ranks"
                )
            found = _measured(joint, joint.connect(device or "auto", _TIMEOUT, bind="auto"), name)
        if joint.rank == 0:
            print_json(found.figures()) if as_json else _print(found)


class MachineReport(NamedTuple):
    """One machine of the run."""

    host: str
    machine: Machine
    placement: Placement

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "host": self.host,
            "numa_nodes": [node._asdict() for node in self.machine.nodes],
            "gpus": [gpu._asdict() for gpu in self.machine.gpus],
            "ranks": [place._asdict() for place in self.placement.ranks],
            "bound": self.placement.bound,
            "why": self.placement.why,
        }


class Topology(NamedTuple):
    """All machines, the mesh of ranks on them, and its links."""

    machines: list[MachineReport]
    nodes: int
    local: int
    links: LinkFigures | None

    @property
    def exchange(self) -> str:
        """What an exchange of rows does."""
        if self.nodes * self.local == 1:
            return "one rank: nothing is exchanged"
        hops = "two hops" if self.nodes > 1 < self.local else "one hop"
        text = f"{self.nodes} node{'s' * (self.nodes != 1)} x {self.local} ranks: {hops}"
        times = self.links.hops if self.links is not None else None
        if times is None:
            return text
        text += f"; {times.num_bytes / 1e6:.1f} MB a rank take {1e3 * times.two:.2f} ms, in one hop {1e3 * times.one:.2f} ms"
        slower = times.two > times.one
        return text + (". One hop is faster here: --set parallel.local_ranks=1" if slower else "")

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        mesh = {"nodes": self.nodes, "local_ranks": self.local, "hops": 2 if self.nodes > 1 < self.local else 1}
        links = None if self.links is None else {"bytes_per_s": self.links.rates}
        if links is not None and self.links is not None and self.links.hops is not None:
            links |= {"exchange": self.links.hops._asdict()}  # type: ignore[dict-item]
        return {"machines": [one.figures() for one in self.machines], "mesh": mesh, "links": links}


def _placed(number: int, device: str) -> tuple[Machine, Placement]:
    from hotbed.host.topology import find_gpus, find_machine, place_ranks

    machine = find_machine(find_gpus())
    return machine, place_ranks(machine, number, gpus=list(range(number)) if device == "cuda" else None)


def _measured(joint: TorchrunRanks, world: World, device: str) -> Topology:
    import torch

    from hotbed.host.topology import find_gpus, find_machine
    from hotbed.parallel.links import measure_links
    from hotbed.parallel.mesh import Mesh

    mesh = Mesh.from_environment()
    world.stage("measuring links")
    at = torch.device("cuda", joint.local_rank) if device == "cuda" else torch.device("cpu")
    links = measure_links(mesh, world, at)
    mine = None
    if joint.local_rank == 0 and joint.placement is not None:
        cores = {core for place in joint.placement.ranks for core in place.cores}  # those of all ranks, not of this one
        mine = MachineReport(os.uname().nodename, find_machine(find_gpus(), allowed=cores), joint.placement)
    return Topology([one for one in world.gather(mine) if one is not None], mesh.nodes, mesh.local, links)


def _print(found: Topology) -> None:
    from rich.table import Table

    from hotbed.host.memory import in_words
    from hotbed.host.topology import cores_text

    for one in found.machines:
        cores = sum(len(node.cores) for node in one.machine.nodes)
        gpus = f"{len(one.machine.gpus)} GPUs" if one.machine.gpus else "no GPU"
        number = len(one.machine.nodes)
        out().print(f"{one.host}: {number} NUMA node{'s' * (number != 1)}, {cores} cores for this process, {gpus}")
        for node in one.machine.nodes:
            out().print(f"  NUMA node {node.number}: cores {cores_text(node.cores) or 'none'}, {in_words(node.memory)}")
        for gpu in one.machine.gpus:
            at = "NUMA node unknown" if gpu.node is None else f"NUMA node {gpu.node}"
            out().print(f"  GPU {gpu.number}: {gpu.name}, PCI {gpu.address or 'address unknown'}, {at}")
        table = Table(box=None, pad_edge=False)
        for heading in ("  local rank", "GPU", "cores", "memory", "threads"):
            table.add_column(heading, justify="right" if heading in ("GPU", "threads") else "left")
        for rank, place in enumerate(one.placement.ranks):
            memory = "any" if place.node is None else f"NUMA node {place.node}"
            gpu_text = "-" if place.gpu is None else str(place.gpu)
            table.add_row(f"  {rank}", gpu_text, cores_text(place.cores), memory, str(place.threads))
        out().print(table)
        state = "bound to these cores" if one.placement.bound else "not bound"
        out().print(f"  ranks are {state} (parallel.bind=auto): {one.placement.why}")
    out().print(f"exchange: {found.exchange}")
    out().print(_links_text(found))


def _links_text(found: Topology) -> str:
    if found.links is None:
        return "links: measured when torchrun starts several ranks: torchrun --nproc-per-node 2 -m hotbed topo"
    rates, local = found.links.rates, found.local
    kinds: dict[str, list[float]] = {"in the node": [], "across nodes": []}
    for source, row in enumerate(rates):
        for target, rate in enumerate(row):
            if rate is not None:
                kinds["in the node" if source // local == target // local else "across nodes"].append(rate / 1e9)
    lines = [
        f"links {kind}: {min(found):.2f} to {max(found):.2f} GB/s, one pair at a time"
        for kind, found in kinds.items()
        if found
    ]
    if len(rates) <= _MOST_SHOWN:
        lines.append("GB/s      " + " ".join(f"{f'to {target}':>7}" for target in range(len(rates))))
        for source, row in enumerate(rates):
            cells = " ".join("      -" if rate is None else f"{rate / 1e9:7.2f}" for rate in row)
            lines.append(f"  from {source:<3}{cells}")
    return "\n".join(lines)
