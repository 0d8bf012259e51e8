"""For how many lookups recordings are made."""

import pytest

from hotbed.ops.recording import RecordedSizes


def test_a_short_batch_takes_what_is_there():
    sizes = RecordedSizes(1000)
    assert [sizes.size_for(n) for n in (1000, 0, 1, 999, 400, 875)] == [1000] * 6


@pytest.mark.parametrize("usual", [1, 7, 100, 800, 860])
def test_a_size_that_comes_often_gets_its_own(usual):
    sizes = RecordedSizes(1000)
    found = [sizes.size_for(usual) for _ in range(8)]
    assert found[:5] == [1000] * 5
    assert usual <= found[5] <= max(usual + 1, usual * 1.07)
    assert found[5:] == [found[5]] * 3
    assert sizes.size_for(usual // 2) == found[5]
    assert sizes.size_for(1000) == 1000


def test_sizes_that_vary_a_little_share_one():
    sizes = RecordedSizes(1_048_576)
    for n in range(100):
        size = sizes.size_for(876_544 + 97 * ((n * 37) % 100 - 50))
    assert size < 1.06 * 876_544
    assert len(sizes._sizes) == 2


def test_there_are_few():
    sizes = RecordedSizes(1 << 20)
    for n in range(2000):
        assert sizes.size_for((n * 7919) % (1 << 20)) >= (n * 7919) % (1 << 20)
    assert len(sizes._sizes) == 4
