"""The ranks of a forecast and the wires between them: as `hotbed topo --json` measured them, or assumed.

Links are measured with one pair of ranks at a time. When all ranks send, those of a node share its card; where topo timed an
exchange between all ranks, both speeds are scaled so that the formulas give that time.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from hotbed.errors import ConfigError
from hotbed.forecast.network import Cluster, all_to_all
from hotbed.forecast.step_time import NVLINK, Fabric, Wire, hops_time, network
from hotbed.host.memory import in_words

_LOCAL = 8  # ranks of a node, if nothing was measured
_NETWORK = 400  # Gb/s of a rank
_START, _MESSAGE = 20e-6, 2e-6  # seconds; topo measures bytes, not how long a collective takes to start


class Links(NamedTuple):
    """Wires, and how ranks are placed on machines."""

    local: int  # ranks of a node
    fabric: Fabric
    about: str

    def cluster(self, world: int) -> Cluster:
        """`world` ranks on as few machines as hold them."""
        local = min(world, self.local)
        return Cluster(-(-world // local), local)


ASSUMED = Links(
    _LOCAL, Fabric(NVLINK, network(_NETWORK)), f"NVLink in a node of {_LOCAL}, {_NETWORK} Gb/s a rank across"
)


def read_links(path: Path) -> Links:
    """The links in a file that `torchrun ... -m hotbed topo --json` has printed."""
    try:
        found = json.loads(path.read_text())
        links, local = found["links"], int(found["mesh"]["local_ranks"])
        nodes = int(found["mesh"]["nodes"])
        rates = [[None if one is None else float(one) for one in row] for row in links["bytes_per_s"]] if links else []
        exchange = links.get("exchange") if links else None
    except OSError as error:
        raise ConfigError(f"--links {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--links {path}: not what `hotbed topo --json` prints") from error
    if len(rates) < 2 or any(len(row) != len(rates) for row in rates) or nodes * local != len(rates):
        raise ConfigError(
            f"--links {path}: no links in it; they are measured when torchrun starts several ranks: "
            "torchrun --nproc-per-node 2 -m hotbed topo --json > links.json"
        )
    return _links_of(rates, Cluster(nodes, local), exchange)


def _links_of(rates: list[list[float | None]], cluster: Cluster, exchange: dict[str, Any] | None) -> Links:
    in_node, across = _median(rates, cluster.local, same=True), _median(rates, cluster.local, same=False)
    across = None if across is None else across / cluster.local  # the ranks of a node share its card
    fabric = Fabric(_wire(in_node or across), _wire(across or in_node))
    if exchange is not None:
        fabric = _scaled(fabric, cluster, exchange)
    speeds = {"in a node": in_node and fabric.in_node.speed, "across nodes": across and fabric.across.speed}
    said = ", ".join(f"{in_words(speed)}/s {where}" for where, speed in speeds.items() if speed)
    return Links(cluster.local, fabric, f"measured links of {cluster.nodes} x {cluster.local} ranks: {said} for a rank")


def _median(rates: list[list[float | None]], local: int, *, same: bool) -> float | None:
    found = [
        rate
        for source, row in enumerate(rates)
        for target, rate in enumerate(row)
        if rate is not None and (source // local == target // local) == same
    ]
    return median(found) if found else None


def _wire(speed: float | None) -> Wire:
    assert speed, "there are two ranks or more"
    return Wire(speed, _START, _MESSAGE)


def _scaled(fabric: Fabric, cluster: Cluster, exchange: dict[str, Any]) -> Fabric:
    """Wires on which an exchange between all ranks takes as long as it did; never faster than a pair alone."""
    expected = hops_time(cluster, fabric, all_to_all(cluster, float(exchange["num_bytes"])))
    slower = max(1.0, float(exchange["two"]) / expected)
    return Fabric(*(wire._replace(speed=wire.speed / slower) for wire in fabric))
