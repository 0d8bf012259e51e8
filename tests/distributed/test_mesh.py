"""The mesh: places, sums over either axis, rows in two hops, bytes per kind of wire, and mistakes."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotbed.errors import ConfigError, ShapeError
from hotbed.parallel.collect import carry, carry_back, exchange, exchange_flat, make_routings
from hotbed.parallel.mesh import Mesh
from tests.distributed.ranks import run_ranks

SHAPES = {world: [(n, world // n) for n in range(1, world + 1) if world % n == 0] for world in (1, 2, 3, 4)}
SIZES = (1, 7, 64)
ROWS = [(3, torch.float32), (1, torch.int64)]  # width and type


def values_of(rank, size, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(rank).normal(size=size)).to(dtype)


def places(nodes):
    found = Mesh.from_environment()
    by_hand = Mesh(nodes=nodes, local=dist.get_world_size() // nodes)
    assert repr(found) == repr(by_hand)
    return found.node, found.local_rank, found.in_node.members, found.across.members, found.flat.size


def test_places_by_torchrun():
    assert run_ranks(places, 4, 2, nodes=2) == [
        (0, 0, (0, 1), (0, 2), 4),
        (0, 1, (0, 1), (1, 3), 4),
        (1, 0, (2, 3), (0, 2), 4),
        (1, 1, (2, 3), (1, 3), 4),
    ]


def sums():
    results = {}
    for nodes, local in SHAPES[dist.get_world_size()]:
        mesh = Mesh(nodes=nodes, local=local)
        for size in SIZES:
            for over in ("all", "node"):
                mine = values_of(mesh.rank, size)
                started = mine.clone()
                mesh.sum_(mine, over)
                mesh.start_sum(started, over).wait()
                assert torch.equal(mine, started)
                results[nodes, size, over] = mine
    return results


@pytest.mark.parametrize("world", SHAPES)
def test_sums(world):
    found = run_ranks(sums, world)
    for rank, results in enumerate(found):
        for (nodes, size, over), result in results.items():
            local = world // nodes
            node = rank // local
            ranks = range(world) if over == "all" else range(node * local, (node + 1) * local)
            torch.testing.assert_close(result, sum(values_of(r, size) for r in ranks), rtol=1e-12, atol=1e-12)
            twin = found[node * local if over == "node" else 0]  # the same bits on all ranks that share a sum
            assert torch.equal(result, twin[nodes, size, over])


def bytes_of_a_sum(size):
    mesh = Mesh(nodes=2, local=2)
    counted = []
    for over in ("all", "node"):
        before = mesh.traffic.in_node, mesh.traffic.across
        mesh.sum_(torch.ones(size), over)
        counted.append((mesh.traffic.in_node - before[0], mesh.traffic.across - before[1]))
    flat = Mesh(nodes=1, local=4)
    flat.sum_(torch.ones(size))
    return counted, flat.traffic.in_node


def test_bytes_of_a_sum():
    """1,000 floats: half goes to the neighbour and half comes back; across goes the half of a rank only."""
    for counted, flat in run_ranks(bytes_of_a_sum, 4, 1000):
        assert counted == [(2000 + 2000, 2000), (4000, 0)]
        assert flat == 2 * 4000 * 3 // 4


def rows_between(source, target, width, dtype):
    number = np.random.default_rng(100 * source + target).integers(0, 5) * ((source + target) % 3)  # often none
    first = 1000 * source + 10 * target
    return torch.arange(number * width).view(number, width).add(first).to(dtype)


def exchanged():
    results = []
    for nodes, local in SHAPES[dist.get_world_size()]:
        mesh = Mesh(nodes=nodes, local=local)
        for width, dtype in ROWS:
            pieces = [rows_between(mesh.rank, target, width, dtype) for target in range(mesh.size)]
            rows, counts = torch.cat(pieces), [len(piece) for piece in pieces]
            results += [(width, dtype, way(mesh, rows, counts)) for way in (exchange, exchange_flat)]
    return results


@pytest.mark.parametrize("world", SHAPES)
def test_rows_in_two_hops(world):
    for rank, results in enumerate(run_ranks(exchanged, world)):
        for width, dtype, found in results:
            pieces = [rows_between(source, rank, width, dtype) for source in range(world)]
            assert torch.equal(found.rows, torch.cat(pieces))
            assert found.counts == [len(piece) for piece in pieces]


def there_and_back():
    same = []
    for nodes, local in SHAPES[dist.get_world_size()]:
        mesh = Mesh(nodes=nodes, local=local)
        pieces = [rows_between(mesh.rank, target, 3, torch.float32) for target in range(mesh.size)]
        rows, counts = torch.cat(pieces), torch.tensor([[7, len(piece)] for piece in pieces])
        routing = make_routings(mesh, counts, rows.device)[1]
        told = mesh.traffic.num_collectives
        same.append(torch.equal(carry_back(mesh, carry(mesh, rows, routing), routing), rows))
        hops = (mesh.size > 1) + (nodes > 1 and local > 1)
        same.append(mesh.traffic.num_collectives - told == 2 * hops)  # and not one more to ask how much comes
    return same


@pytest.mark.parametrize("world", SHAPES)
def test_rows_go_back_where_they_came_from(world):
    assert all(all(same) for same in run_ranks(there_and_back, world))


def bytes_of_rows():
    mesh = Mesh(nodes=2, local=2)
    counts = [1, 2, 4, 8]  # rows of 4 bytes to each rank
    exchange_flat(mesh, torch.zeros(15, 1), counts)
    flat = mesh.traffic.in_node, mesh.traffic.across
    exchange(mesh, torch.zeros(15, 1), counts)
    return flat, (mesh.traffic.in_node - flat[0], mesh.traffic.across - flat[1])


def test_bytes_of_rows():
    flat, two_hops = run_ranks(bytes_of_rows, 4)[0]
    # Rank 0 sends 2 rows in its node and 12 across, and a count of 8 bytes to every other rank.
    assert flat == (2 * 4 + 8, 12 * 4 + 2 * 8)
    # First to local rank 1 all that ends there (2 + 8 rows), then to rank 2 what both ranks of the node have for it.
    assert two_hops == (10 * 4 + 2 * 8, (4 + 4) * 4 + 2 * 8)


def mistakes():
    with pytest.raises(ConfigError, match=r"3 ranks, but the process group has 2; nodes x local may be 1 x 2, 2 x 1"):
        Mesh(nodes=3, local=1)
    with pytest.raises(ConfigError, match="at least one node"):
        Mesh(nodes=0, local=2)
    with pytest.raises(ShapeError, match="2 ranks and add up to the 3 rows; given: 2 counts that add up to 4"):
        exchange(Mesh(nodes=1, local=2), torch.zeros(3), [2, 2])
    os.environ["LOCAL_RANK"] = "0"
    with pytest.raises(ConfigError, match=r"rank 1 of 2 with 2 ranks per node .* says GROUP_RANK=0, LOCAL_RANK=0"):
        Mesh.from_environment()
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank())
    with pytest.raises(ConfigError, match=r"LOCAL_WORLD_SIZE of each rank: \[1, 2\]"):
        Mesh.from_environment()
    return "all refused"


def test_mistakes():
    assert run_ranks(mistakes, 2) == ["all refused"] * 2


def test_alone():
    """Without a process group a mesh has one rank, and its sums are the values themselves."""
    mesh = Mesh.from_environment()
    values = torch.arange(3.0)
    mesh.sum_(values)
    mesh.start_sum(values, "node").wait()
    assert values.tolist() == [0, 1, 2]
    assert (mesh.size, mesh.traffic.num_collectives) == (1, 0)
    assert mesh.flat.gather_text("here") == ["here"]
    assert exchange(mesh, values, [3]).counts == [3]
    with pytest.raises(ConfigError, match=r"8 ranks, but this process is alone.*torchrun"):
        Mesh(nodes=2, local=4)


def breaks():
    """Rank 1 is gone before rank 0 asks for its part."""
    mesh = Mesh(nodes=1, local=2)
    dist.barrier()
    if mesh.rank == 0:
        with pytest.raises(RuntimeError, match=r"onnection|Broken pipe"):
            mesh.start_sum(torch.ones(3)).wait()
    dist.destroy_process_group()
    return "refused" if mesh.rank == 0 else "gone"


def test_a_sum_that_fails_says_so():
    assert run_ranks(breaks, 2) == ["refused", "gone"]
