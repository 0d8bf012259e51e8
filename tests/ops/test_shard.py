"""Keys dealt out to ranks: every key has one owner and one number there."""

import pytest
import torch

from hotbed.ops.shard import SPREAD, WHOLE, Shard


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 16])
def test_every_key_has_one_place(world):
    keys = torch.arange(1003)
    owner = Shard(0, world).owner_of(keys)
    found = []
    for rank in range(world):
        shard = Shard(rank, world)
        mine = keys[owner == rank]
        numbers = shard.local_of(mine)
        assert torch.equal(shard.keys_of(numbers), mine)
        assert numbers.unique().shape == mine.shape
        assert int(numbers.max()) < shard.num_local(1003)
        found.append(mine)
    assert torch.equal(torch.cat(found).sort().values, keys)


@pytest.mark.parametrize("step", [1, 2, 4, 8, 12])
def test_ids_with_a_common_step_are_spread(step):
    owners = Shard(0, 4).owner_of(torch.arange(0, 40_000 * step, step))
    assert torch.bincount(owners, minlength=4).min() > 9_000


def test_one_rank_has_all():
    keys = torch.arange(50)
    assert torch.equal(WHOLE.keys_of(keys), keys)
    assert not WHOLE.owner_of(keys).any()


def test_tables_on_one_rank_next_to_spread_ones():
    rows, world = (40, 1, 300, 7, 25, 12), 3
    tables = tuple(zip(rows, (SPREAD, 1, SPREAD, 0, 1, SPREAD)))
    keys, whole = torch.arange(sum(rows)), Shard(0, world).of_tables(tables)
    table_of_key = torch.repeat_interleave(torch.arange(6), torch.tensor(rows))
    owner = whole.owner_of(keys)
    for number, (_, its_owner) in enumerate(tables):
        owners = set(owner[table_of_key == number].tolist())
        assert owners == ({0, 1, 2} if its_owner == SPREAD else {its_owner})
    for rank in range(world):
        shard = whole._replace(rank=rank)
        mine = keys[owner == rank]
        numbers = shard.local_of(mine)
        assert torch.equal(shard.keys_of(numbers), mine)
        assert numbers.unique().shape == mine.shape
        assert int(numbers.max()) < shard.num_local(sum(rows)) <= shard.most_local(sum(rows)) == -(-352 // 3) + 26
    ids = torch.arange(1000)
    assert (whole.owner_of_ids(torch.full((1000,), 4), ids) == 1).all()
    assert torch.equal(whole.owner_of_ids(torch.tensor(0), ids), Shard(0, world).owner_of_ids(torch.tensor(0), ids))


def test_a_rank_may_have_no_table():
    shard = Shard(1, 2).of_tables(((9, 0),))
    assert shard.num_local(9) == 1  # room for none would be no table
    assert shard.keys_of(torch.zeros(1).long()).tolist() == [9]  # behind all keys
    assert shard.of_tables(((9, SPREAD),)) == Shard(1, 2)


def test_columns_have_every_key():
    shard, keys = Shard(1, 4, by_column=True), torch.arange(9)
    assert torch.equal(shard.local_of(keys), keys)
    assert torch.equal(shard.keys_of(keys), keys)
    assert (shard.owner_of(keys) == 1).all()
    assert (shard.num_local(9), shard.num_slices, shard.columns_of(8)) == (9, 4, (2, 4))
