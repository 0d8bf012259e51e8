"""Rows divided among ranks: each once, every batch but the last full, whatever the number of ranks did on the way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.loader.loader import Share


def sizes_by_batch(num_rows, batch_size, rank_history, num_batches):
    """Samples of every batch, and the rows, in the order they are read; `rank_history` is the whole history."""
    rows, sizes = [], []
    borders = [*(first for first, _ in rank_history[1:]), num_batches]
    for number, ((first, world), stop) in enumerate(zip(rank_history, borders)):
        shares = [Share(rank, world) for rank in range(world)]
        parts = [share.runs_from(num_rows, batch_size, rank_history[: number + 1], first) for share in shares]
        lines = [[row for begin, end in part for row in range(begin, end)] for part in parts]
        for batch in range(stop - first):
            cut = [
                line[batch * share.size_of(batch_size) : (batch + 1) * share.size_of(batch_size)]
                for share, line in zip(shares, lines)
            ]
            sizes.append(sum(map(len, cut)))
            rows += [row for part in cut for row in part]
    return rows, sizes


@given(st.data())
def test_every_row_once(data):
    num_rows = data.draw(st.integers(1, 300))
    batch_size = data.draw(st.integers(4, 40))
    num_batches = -(-num_rows // batch_size)
    changes = sorted(data.draw(st.sets(st.integers(1, num_batches), max_size=3)))
    rank_history = [(first, data.draw(st.integers(1, 4))) for first in (0, *changes)]
    rows, sizes = sizes_by_batch(num_rows, batch_size, rank_history, num_batches)
    assert sorted(rows) == list(range(num_rows))
    assert sizes == [min(batch_size, num_rows - batch * batch_size) for batch in range(num_batches)]


@pytest.mark.parametrize("start", [0, 3, 6])
def test_a_run_goes_on_in_its_own_part(start):
    share = Share(1, 3)
    whole, rest = (share.runs_from(100, 16, [(0, 3)], batch) for batch in (0, start))
    lines = [[row for begin, end in runs for row in range(begin, end)] for runs in (whole, rest)]
    assert lines[1] == lines[0][start * share.size_of(16) :]


def test_ranks_must_be_the_last_of_the_history():
    with pytest.raises(AssertionError, match="an epoch of 2 ranks, but there are 3"):
        Share(0, 3).runs_from(100, 10, [(0, 2)], 0)
