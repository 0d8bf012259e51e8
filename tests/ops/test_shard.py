"""Keys dealt out to ranks: every key has one owner and one number there."""

import pytest
import torch

from hotbed.ops.shard import WHOLE, Shard


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
