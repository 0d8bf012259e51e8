"""`hotbed topo`: what was found and chosen, alone and with ranks of torchrun on two nodes."""

import json
import os
import subprocess
import sys

import pytest

from hotbed.host import topology
from tests.host.test_topology import two_sockets  # noqa: F401  fixture
from tests.ports import free_port


def test_alone_it_shows_what_the_ranks_of_a_run_would_get(hotbed, two_sockets, monkeypatch):  # noqa: F811
    monkeypatch.setattr(topology, "given_cores", lambda: tuple(range(16)))
    monkeypatch.setattr(topology, "find_machine", lambda gpus: _find(gpus, two_sockets))
    shown = hotbed("topo", "--ranks", "4", "--device", "cpu").out
    assert "3 NUMA nodes, 16 cores for this process" in shown
    assert "NUMA node 1: cores 4-7,12-15, 2.0 GiB" in shown
    assert "ranks are bound to these cores (parallel.bind=auto): 2 NUMA nodes with 16 cores" in shown
    found = json.loads(hotbed("topo", "--ranks", "4", "--device", "cpu", "--json").out)
    (machine,) = found["machines"]
    assert [rank["node"] for rank in machine["ranks"]] == [0, 0, 1, 1]
    assert found["mesh"] == {"nodes": 1, "local_ranks": 4, "hops": 1}
    assert found["links"] is None


_find_machine = topology.find_machine


def _find(gpus, root):
    return _find_machine(gpus, root)


def test_a_wrong_device_is_refused(hotbed):
    assert hotbed("topo", "--device", "tpu").code == 2


@pytest.mark.parametrize("more", [[], ["--ranks", "2"]])
def test_ranks_of_two_nodes_measure_their_links(tmp_path, more):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    place = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "hotbed", "topo", "--json", *more]
    nodes = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), *place],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        ended = [one.communicate(timeout=180) for one in nodes]
    finally:
        for one in nodes:
            one.kill()  # does nothing if it has ended
            one.communicate()
    if more:
        assert all(one.returncode for one in nodes)
        assert "torchrun sets the number of ranks" in "".join(text for _, text in ended)
        return
    assert [one.returncode for one in nodes] == [0, 0], ended
    assert ended[1][0] == ""
    found = json.loads(ended[0][0])
    assert found["mesh"] == {"nodes": 2, "local_ranks": 2, "hops": 2}
    assert len(found["machines"]) == 2
    rates = found["links"]["bytes_per_s"]
    assert [[rate is None for rate in row] for row in rates] == [[i == j for j in range(4)] for i in range(4)]
    assert all(rate > 1e5 for row in rates for rate in row if rate is not None)
    assert found["links"]["exchange"]["num_bytes"] == 1 << 20
    assert found["links"]["exchange"]["two"] > 0
