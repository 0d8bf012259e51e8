import itertools

import pytest

from tests.pairs import pairs


@pytest.mark.parametrize(("sizes", "most"), [((5, 4, 4), 20), ((7, 4, 3), 28), ((5, 4, 2), 20), ((3, 3, 2, 2), 10)])
def test_every_two_values_meet(sizes, most):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in zip("abcd", sizes)]
    cases = pairs(*axes)
    for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(one, other))
    assert len(cases) <= most


def test_one_axis_or_two_are_tried_whole():
    assert pairs("ab", [1, 2]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
