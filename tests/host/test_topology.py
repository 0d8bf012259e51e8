"""Ranks get the cores and memory of their GPU's NUMA node, or equal shares, and never what they were not given."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from hotbed.host import topology
from hotbed.host.topology import Gpu, cores_text, find_machine, node_of_device, place_ranks, read_list

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def two_sockets(tmp_path):
    """Two NUMA nodes with four cores of two hardware threads each, numbered as on most servers; one memory-only node."""
    for number, cores in enumerate(["0-3,8-11", "4-7,12-15", ""]):
        folder = tmp_path / f"devices/system/node/node{number}"
        write(folder / "cpulist", cores)
        write(
            folder / "meminfo", f"Node {number} MemTotal:       {(number + 1) * GIB // 1024} kB\nNode 0 MemFree: 1 kB"
        )
    for core in range(16):
        write(tmp_path / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", f"{core % 8},{core % 8 + 8}")
    for number, node in enumerate([0, 0, 1, -1]):
        write(tmp_path / f"bus/pci/devices/0000:{number:02x}:00.0/numa_node", str(node))
    return tmp_path


def gpus_of(root, *numbers):
    addresses = {number: f"0000:{number:02x}:00.0" for number in numbers}
    return [Gpu(number, "H200", at, node_of_device(at, root)) for number, at in addresses.items()]


def test_nodes_are_read_with_neighbouring_hardware_threads(two_sockets):
    machine = find_machine(root=two_sockets, allowed=range(16))
    assert [node.cores for node in machine.nodes] == [(0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15), ()]
    assert [node.memory for node in machine.nodes] == [GIB, 2 * GIB, 3 * GIB]


def test_ranks_on_cpus_share_whole_physical_cores_of_one_node(two_sockets):
    machine = find_machine(root=two_sockets, allowed=range(16))
    found = place_ranks(machine, 4)
    assert found.bound
    assert [place.cores for place in found.ranks] == [(0, 8, 1, 9), (2, 10, 3, 11), (4, 12, 5, 13), (6, 14, 7, 15)]
    assert [(place.node, place.threads) for place in found.ranks] == [(0, 4), (0, 4), (1, 4), (1, 4)]
    assert "local rank 2: cores 4-5,12-13 and memory of NUMA node 1" in str(found)


def test_a_rank_whose_cores_are_of_two_nodes_has_memory_of_any(two_sockets):
    found = place_ranks(find_machine(root=two_sockets, allowed=range(16)), 3)
    assert [place.node for place in found.ranks] == [0, None, 1]
    assert sorted(core for place in found.ranks for core in place.cores) == list(range(16))


def test_ranks_with_gpus_have_the_cores_of_their_node(two_sockets):
    machine = find_machine(gpus_of(two_sockets, 0, 1, 2), two_sockets, range(16))
    found = place_ranks(machine, 3, gpus=[0, 1, 2])
    assert [place.node for place in found.ranks] == [0, 0, 1]
    assert [cores_text(place.cores) for place in found.ranks] == ["0-3,8-11", "0-3,8-11", "4-7,12-15"]
    assert [place.threads for place in found.ranks] == [4, 4, 8]


def test_a_gpu_of_an_unknown_node_leaves_its_rank_unbound(two_sockets):
    machine = find_machine(gpus_of(two_sockets, 2, 3), two_sockets, range(16))
    assert [gpu.node for gpu in machine.gpus] == [1, None]
    found = place_ranks(machine, 2, gpus=[2, 3])
    assert [(place.node, len(place.cores)) for place in found.ranks] == [(1, 8), (None, 16)]
    assert not place_ranks(machine, 1, gpus=[3]).bound


@pytest.mark.parametrize("allowed", [{1, 9, 4, 12, 5}, {2}, set(range(8)), {3, 4}])
@pytest.mark.parametrize("gpus", [None, [0, 2]])
def test_nothing_is_bound_outside_of_the_given_cores(two_sockets, allowed, gpus):
    machine = find_machine(gpus_of(two_sockets, 0, 2), two_sockets, allowed)
    assert set(machine.cores) == allowed
    for bind in (True, False, "auto"):
        found = place_ranks(machine, 2, gpus=gpus, bind=bind)
        assert all(place.cores and set(place.cores) <= allowed for place in found.ranks)


def test_a_gpu_whose_node_was_not_given_has_the_given_cores(two_sockets):
    machine = find_machine(gpus_of(two_sockets, 0, 2), two_sockets, range(4))
    found = place_ranks(machine, 2, gpus=[0, 2], bind=True)
    assert not found.bound
    assert [(place.node, set(place.cores)) for place in found.ranks] == [(None, {0, 1, 2, 3})] * 2


def test_one_node_is_said_and_bound_only_on_request(two_sockets):
    machine = find_machine(root=two_sockets, allowed=range(4))
    found = place_ranks(machine, 2)
    assert not found.bound
    assert str(found) == "ranks are not bound to cores: 1 NUMA node with 4 cores, the same for all of them"
    assert [place.cores for place in found.ranks] == [(0, 1, 2, 3)] * 2
    assert [place.cores for place in place_ranks(machine, 2, bind=True).ranks] == [(0, 1), (2, 3)]


def test_more_ranks_than_cores_are_not_bound(two_sockets):
    found = place_ranks(find_machine(root=two_sockets, allowed={0, 4}), 3, bind=True)
    assert not found.bound
    assert {place.threads for place in found.ranks} == {1}


def test_ranks_that_were_given_different_cores_keep_them(two_sockets):
    found = place_ranks(find_machine(root=two_sockets, allowed={0, 1, 4}), 2, bind=True, given_apart=True)
    assert not found.bound
    assert found.ranks[1].threads == 3
    assert "started with different cores" in str(found)


def test_a_system_that_says_nothing_is_one_node(tmp_path):
    assert [node.cores for node in find_machine(root=tmp_path, allowed={5, 2}).nodes] == [(2, 5)]
    write(tmp_path / "devices/system/node/node0/cpulist", "0-1")
    assert [node.cores for node in find_machine(root=tmp_path, allowed={0, 1, 2}).nodes] == [(0, 1, 2)]


@pytest.mark.parametrize("text", ["0-3,8-11", "7", "", "0,2,4"])
def test_lists_of_cores_are_read_and_written(text):
    assert cores_text(read_list(text)) == text


BIND = """
import json, os, threading
from hotbed.host.topology import RankPlace, bind_process, find_machine, given_cores
from hotbed.host.pages import zeros

def cores(of):
    of.append(given_cores())

started, go = threading.Event(), threading.Event()
before, after = [], []
def early():
    started.set(); go.wait(); cores(before)
running = threading.Thread(target=early); running.start(); started.wait()
machine = find_machine()
mine = machine.cores[:1]
node = next(node.number for node in machine.nodes if mine[0] in node.cores)
refused = bind_process(RankPlace(mine, node, 1))
go.set(); running.join()
late = threading.Thread(target=cores, args=(after,)); late.start(); late.join()
store = zeros((1 << 20,), "float32"); store[:] = 1
at = f"{store.ctypes.data:x}"
maps = open("/proc/self/numa_maps").read().splitlines() if os.path.exists("/proc/self/numa_maps") else []
policy = [line.split()[1] for line in maps if line.startswith(at)]
found = {"mine": mine, "main": given_cores(), "before": before[0], "after": after[0]}
print(json.dumps(found | {"refused": refused, "policy": policy, "node": node}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is of Linux")
def test_all_threads_and_the_memory_of_a_store_are_bound():
    done = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["mine"] == found["main"] == found["before"] == found["after"]
    if found["refused"]:  # a container without the right to it says so
        assert "NUMA node" in found["refused"]
    elif found["policy"]:
        assert found["policy"] == [f"prefer:{found['node']}"]


def test_a_refused_memory_policy_is_reported(monkeypatch):
    monkeypatch.setitem(topology._SET_MEMPOLICY, platform.machine(), 100_000)  # no such system call
    assert "pages come from where they are first used" in topology._prefer_memory(0)
    monkeypatch.delitem(topology._SET_MEMPOLICY, platform.machine())
    assert "no memory policy is known" in topology._prefer_memory(0)


def test_a_process_is_never_bound_to_cores_that_it_was_not_given():
    outside = max(os.sched_getaffinity(0)) + 1
    with pytest.raises(AssertionError, match="not all among those given"):
        topology.bind_process(topology.RankPlace((outside,), None, 1))
