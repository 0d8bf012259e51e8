"""Bags to parts by owner: the compiled way against plain torch, and both against walking through every bag."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotbed.ops.partition import partition_by_owner
from hotbed.ops.parts import Parts, TableAddresses, count_ways, reference, split

BAGS = st.lists(st.lists(st.integers(-2, 30), max_size=9), max_size=25)


@given(BAGS, st.integers(1, 5), st.integers(0, 3))
def test_small(bags, world, seed):
    check(bags, world, seed)


@pytest.mark.parametrize("world", [1, 4])
def test_many(world):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 40, [300], generator=generator).tolist()
    check([torch.randint(-1, 900, [n], generator=generator).tolist() for n in lengths], world, 1)


def check(bags, world, seed):
    """A key is its table times 1,000 and a number; bags of a table go one way."""
    generator = torch.Generator().manual_seed(seed)
    table_of_bag = torch.randint(-1, 3, [len(bags)], generator=generator)
    goes_in_parts = torch.randint(0, 2, [4], generator=generator).bool()
    in_parts = goes_in_parts[table_of_bag] & (table_of_bag >= 0)
    keys = [[1000 * (table + 1) + n if n >= 0 else -1 for n in bag] for table, bag in zip(table_of_bag.tolist(), bags)]
    flat = torch.tensor([key for bag in keys for key in bag], dtype=torch.int64)
    starts = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
    partitioned = partition_by_owner(flat, flat, lambda keys, _: keys * 7 % 11 % world, world)
    given = partitioned.places, starts, in_parts, partitioned.keys, partitioned.counts
    for way in (split(*given), Parts(*reference.split(*given))):
        check_split(way, keys, in_parts.tolist(), world)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*both(*given)))
    counted = partitioned.places, starts, table_of_bag, partitioned.counts, 0
    num_tables = int(table_of_bag.max()) + 1 if bags else 0
    expected = TableAddresses(
        *([count(keys, table_of_bag.tolist(), t, world)[i] for t in range(num_tables)] for i in range(3))
    )
    assert count_ways(*counted) == expected
    assert TableAddresses(*reference.count_ways(*counted, num_tables).tolist()) == expected


def both(*given):
    return split(*given), reference.split(*given)


def owner_of(key, world):
    return key * 7 % 11 % world


def count(keys, table_of_bag, table, world):
    """(rows, keys, parts) that are asked of ranks other than the first."""
    bags = [[k for k in bag if k >= 0 and owner_of(k, world)] for bag, t in zip(keys, table_of_bag) if t == table]
    looked_up = [key for bag in bags for key in bag]
    return len(set(looked_up)), len(looked_up), sum(len({owner_of(k, world) for k in bag}) for bag in bags)


def check_split(found, keys, in_parts, world):
    """What the owners would send, summed by bag, is the bag."""
    is_first = found.keys >= 0
    real = torch.where(is_first, found.keys, ~found.keys)
    owners = [owner for owner, number in enumerate(found.num_keys) for _ in range(number)]
    assert [owner_of(key, world) for key in real.tolist()] == owners
    vectors = [[] for _ in range(sum(found.num_vectors))]
    for key, number in zip(real.tolist(), (is_first.long().cumsum(0) - 1).tolist()):
        vectors[number].append(key)
    assert [owner_of(vector[0], world) for vector in vectors] == [
        owner for owner, number in enumerate(found.num_vectors) for _ in range(number)
    ]
    flat = [key for bag in keys for key in bag]
    for n, bag in enumerate(keys):
        left = range(int(found.starts[n]), int(found.starts[n + 1]))
        slots, sources = [found.slots[i].item() for i in left], [found.source[i].item() for i in left]
        if in_parts[n]:
            by_owner = {}
            for key in (key for key in bag if key >= 0):
                by_owner.setdefault(owner_of(key, world), []).append(key)
            assert [vectors[slot] for slot in slots] == list(by_owner.values())
        else:
            assert [vectors[slot] if slot >= 0 else [-1] for slot in slots] == [[key] for key in bag]
        assert [flat[source] for source in sources] == [vectors[s][0] if s >= 0 else -1 for s in slots]
