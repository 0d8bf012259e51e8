"""A single rank: tables of one process, whatever the mode."""

import pytest
import torch

from hotbed import EmbeddingTables, Table, optim
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks

ROWS = 200


def train(kind, options):
    made = ShardedTables if kind == "sharded" else EmbeddingTables
    tables = made({"a": Table(ROWS, 4), "b": Table(50, 4)}, optim.Adagrad(lr=0.1), cache=0.5, **options)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(8):
        ids = torch.stack(
            [torch.randint(ROWS, (16,), generator=generator), torch.randint(50, (16,), generator=generator)], 1
        )
        loss = tables(ids).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, tables.is_shared, {name: value.tolist() for name, value in tables.state_dict().items()}


@pytest.mark.parametrize("options", [{}, {"mode": "replicated"}, {"traffic": "bf16"}], ids=str)
def test_a_single_rank_is_the_tables_of_one_process(options):
    ((losses, is_shared, rows),) = run_ranks(train, 1, "sharded", options)
    expected, _, rows_expected = train("plain", {})
    assert not is_shared
    assert losses == expected
    assert rows == rows_expected
