"""Owners of rows as a dictionary has them: ids get rows, move to others, lose them to other ids, and rows become free."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.scorer.checkpoints import RANK_BITS
from hotbed.scorer.owners import RowOwners

STARTS = np.array([0, 1 << 40, 2 << 40])
KEYS = [*range(6), *range(1 << 40, (1 << 40) + 6)]  # of two tables of a group
PLACES = [*range(8), *range(1 << RANK_BITS, (1 << RANK_BITS) + 4)]  # of two ranks
pairs = st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(KEYS)), max_size=6)


def distinct(some):
    """Each place and each key once."""
    by_place = dict(some)
    return {place: key for key, place in {key: place for place, key in by_place.items()}.items()}


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(pairs, st.lists(st.sampled_from(PLACES), unique=True, max_size=4)), max_size=6))
def test_as_a_dictionary(tmp_path_factory, steps):
    owners, known = RowOwners(tmp_path_factory.getbasetemp(), STARTS), {}
    for moved, freed in steps:
        for place, key in distinct(moved).items():  # each as a part of its own, as tables come one after the other
            new, had = owners.move("g", np.array([place]), np.array([key]))
            assert new.tolist() == [known.get(place) != key]
            assert had.tolist() == ([known[place]] if place in known and known[place] != key else [])
            known = {p: k for p, k in known.items() if k != key} | {place: key}
        assert sorted(owners.free("g", np.sort(np.array(freed, dtype=np.int64))).tolist()) == sorted(
            known.pop(place) for place in freed if place in known
        )
        owners.read_only()  # the next change goes to copies
        assert owners.owners("g", np.array(PLACES)).tolist() == [known.get(place, -1) for place in PLACES]
        assert owners.has_place("g", np.array(KEYS)).tolist() == [key in known.values() for key in KEYS]


def test_all_at_once(tmp_path):
    """Ids that swap rows, in one part."""
    owners = RowOwners(tmp_path, STARTS)
    owners.set("g", np.arange(3), np.arange(3))
    new, had = owners.move("g", np.array([0, 1, 5]), np.array([1, 0, 2]))
    assert new.all()
    assert sorted(had.tolist()) == [0, 1]
    assert owners.owners("g", np.array([0, 1, 2, 5])).tolist() == [1, 0, -1, 2]
    assert owners.has_place("g", np.arange(4)).tolist() == [True, True, True, False]
    owners.share("g", np.array([7]), 1)
    assert owners.owners("g", np.array([7])).tolist() == [-3]
