"""Rows that several ranks of a node request cross to it once: the rows of one process, fewer bytes between nodes."""

import pytest
import torch
import torch.distributed as dist

from hotbed import Table, optim
from hotbed.errors import ConfigError
from hotbed.parallel.collect import carry, carry_back, make_routings, merge_in_node
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.sharded import ShardedTables
from hotbed.run.config_check import read_tree
from tests.distributed.ranks import run_ranks
from tests.distributed.test_sharded import OPTIMIZERS, TABLES, alone, assert_as_one, in_ranks


def both_ways(optimizers, options, ahead=False):
    """For each optimizer, without and with it: what `in_ranks` gives."""
    ways = ({}, {"once_per_node": True})
    return [[in_ranks(optimizer, {**options, **way}, ahead) for way in ways] for optimizer in optimizers]


@pytest.mark.parametrize("ahead", [False, True], ids=["on demand", "ahead"])
def test_rows_are_those_of_one_process_and_fewer_bytes_cross(ahead):
    """Sums of these gradients are exact in any order."""
    options = {"cache": 0.1} if ahead else {}
    found = run_ranks(both_ways, 4, list(OPTIMIZERS), options, ahead, nodes=2)
    for number, optimizer in enumerate(OPTIMIZERS):
        usual, merged = ([rank[number][way] for rank in found] for way in (0, 1))
        assert_as_one([one[:2] for one in merged], alone(optimizer))
        assert_as_one([one[:2] for one in usual], alone(optimizer))
        in_node, across = (torch.tensor([[one[3][wire] for one in way] for way in (usual, merged)]) for wire in (0, 1))
        assert torch.equal(in_node[0], in_node[1])
        if optimizer == "by_count":  # occurrences are of each rank
            assert torch.equal(across[0], across[1])
        else:
            assert across[1].sum() < across[0].sum()


def rounded(options, nodes_given=None):
    """Training with gradients whose sums round, and every vector of the first step."""
    options = {"pooled": "never", **options}
    mesh = None if nodes_given is None else Mesh(nodes_given, dist.get_world_size() // nodes_given)
    tables = ShardedTables({"a": Table(300, 4)}, optim.Adagrad(lr=0.1), seed=3, mesh=mesh, **options)
    draw = torch.Generator().manual_seed(dist.get_rank())
    first = None
    for _ in range(5):
        vectors = tables((torch.rand(40, 1, generator=draw) ** 4 * 300).long())
        first = vectors.detach().clone() if first is None else first
        (vectors * torch.randn(vectors.shape, generator=draw)).sum().backward()
    return first, tables.rows("a")


def test_sums_that_round_are_close_and_the_same_every_time():
    usual = run_ranks(rounded, 4, {}, nodes=2)
    once, again, cached = (
        run_ranks(rounded, 4, {"once_per_node": True, **more}, nodes=2) for more in ({}, {}, {"cache": 0.5})
    )
    differs = False
    for rank in range(4):
        assert torch.equal(usual[rank][0], once[rank][0]), "the first vectors"
        for others in (again, cached):
            assert torch.equal(once[rank][1][0], others[rank][1][0])
            for name, column in once[rank][1][1].items():
                assert torch.equal(column, others[rank][1][1][name])
        for name, column in once[rank][1][1].items():
            torch.testing.assert_close(column, usual[rank][1][1][name], rtol=1e-5, atol=1e-6)
            differs |= not torch.equal(column, usual[rank][1][1][name])
    assert differs, "the sums of this test round"


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_mesh_of_one_axis_has_nothing_to_merge(nodes):
    usual, once = (run_ranks(rounded, 4, options, nodes) for options in ({}, {"once_per_node": True}))
    for rank in range(4):
        for name, column in usual[rank][1][1].items():
            assert torch.equal(column, once[rank][1][1][name])


def merged_by_hand():
    """Keys of all ranks -> what each owner should get, against what it gets; and sums and rows back."""
    mesh = Mesh(2, dist.get_world_size() // 2)
    W, rank, device = mesh.size, mesh.rank, torch.device("cpu")
    wanted = [[sorted({(3 * r + 5 * i + o) % 11 for i in range(r + o)}) for o in range(W)] for r in range(W)]
    counts = torch.tensor([[len(keys)] for keys in wanted[rank]])
    (routing,) = make_routings(mesh, counts, device)
    mine = torch.tensor([key for keys in wanted[rank] for key in keys])
    before = mesh.traffic.across
    routing, keys = merge_in_node(mesh, mine, routing, 11)
    sent = mesh.traffic.across - before
    nodes = [range(node * mesh.local, (node + 1) * mesh.local) for node in range(2)]
    expected = [sorted({key for r in node for key in wanted[r][rank]}) for node in nodes]
    given = torch.split(keys, routing.merged.receive)
    assert [sorted(part.tolist()) for part in given] == expected
    assert routing.num_received == keys.shape[0]
    mine_of_node = nodes[mesh.node]
    away = [o for o in range(W) if o // mesh.local != mesh.node and o % mesh.local == mesh.local_rank]
    crossing = sum(len({key for r in mine_of_node for key in wanted[r][o]}) for o in away)
    assert sent == 8 * crossing + 8, "the keys, and their number"
    rows = carry_back(mesh, (100 * rank + keys).double().view(-1, 1), routing)
    owners = torch.repeat_interleave(torch.arange(W), counts.view(-1))
    assert torch.equal(rows.view(-1), (100 * owners + mine).double())
    sums = carry(mesh, torch.full((mine.shape[0], 1), float(1 + rank)), routing).view(-1).tolist()
    by_hand = [
        sum(1.0 + r for r in node if key in wanted[r][rank])
        for node, part in zip(nodes, given)
        for key in part.tolist()
    ]
    assert sums == by_hand
    narrow = carry(mesh, torch.full((mine.shape[0], 1), 1.0).bfloat16(), routing)
    assert narrow.dtype == torch.bfloat16
    return keys.shape[0]


@pytest.mark.parametrize("world", [4, 6])
def test_keys_sums_and_rows_by_hand(world):
    assert sum(run_ranks(merged_by_hand, world)) > 0


def test_contradictions_are_refused():
    for given in ({"mode": "replicated"}, {"pooled": "always"}):
        with pytest.raises(ConfigError, match="once_per_node=True needs mode='sharded' and pooled='auto' or 'never'"):
            ShardedTables(TABLES, output="dict", once_per_node=True, **given)
    assert read_tree({"parallel": {"once_per_node": True}}).parallel.once_per_node
