"""Numbering against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.hash import MISSING_ID
from hotbed.data.vocabulary import Numbering

IDS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3), st.just(MISSING_ID))


@given(st.lists(st.lists(st.tuples(IDS, st.booleans()), max_size=30), max_size=8), IDS)
def test_equals_a_dict(chunks, absent):
    numbering = Numbering()
    numbers: dict[int, int] = {}
    counts: dict[int, int] = {}
    for chunk in chunks:
        ids = np.array([id_ for id_, _ in chunk], dtype=np.int64)
        counted = np.array([flag for _, flag in chunk], dtype=np.bool_)
        given_numbers = numbering.add(ids, counted)
        for id_, flag in chunk:
            numbers.setdefault(id_, len(numbers))
            counts[id_] = counts.get(id_, 0) + flag
        assert given_numbers.tolist() == [numbers[id_] for id_, _ in chunk]
    assert len(numbering) == len(numbers)
    assert numbering.ids.tolist() == list(numbers)
    assert numbering.counts.tolist() == list(counts.values())
    assert numbering.find(np.array([absent], dtype=np.int64)).tolist() == [numbers.get(absent, -1)]


def test_grows_many_times():
    ids = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 100_003)
    numbering = Numbering()
    everything = np.ones(len(ids), dtype=np.bool_)
    first = numbering.add(ids, everything)
    np.testing.assert_array_equal(numbering.ids[first], ids)
    np.testing.assert_array_equal(numbering.add(ids, everything), first)
    np.testing.assert_array_equal(numbering.find(ids), first)
    assert (numbering.counts >= 2).all()
    assert numbering.counts.sum() == 2 * len(ids)
