"""hotbed.checkpoint.save and load of ShardedTables: a rank never reads the rows of another as its own."""

import pytest
import torch
import torch.distributed as dist

import hotbed
from hotbed.errors import RunError
from tests.distributed.ranks import run_ranks


def test_the_rows_of_another_rank_are_refused(tmp_path):
    assert run_ranks(saved_and_swapped, 2, str(tmp_path)) == ["refused", "refused"]


def saved_and_swapped(root):
    rank = dist.get_rank()
    tables = hotbed.ShardedTables({"a": hotbed.Table(40, 4)}, hotbed.optim.Adagrad(lr=0.1), cache=0.5)
    tables(torch.arange(10 * rank, 10 * rank + 8).unsqueeze(1)).sum().backward()
    hotbed.checkpoint.save(f"{root}/{rank}", tables)
    mine = tables.rows("a")[1]["weight"].clone()
    dist.barrier()
    with pytest.raises(RunError, match=f"rows of rank {1 - rank} of 2, and these tables those of rank {rank} of 2"):
        hotbed.checkpoint.load(f"{root}/{1 - rank}", tables)
    assert torch.equal(tables.rows("a")[1]["weight"], mine)
    hotbed.checkpoint.load(f"{root}/{rank}", tables)
    assert torch.equal(tables.rows("a")[1]["weight"], mine)
    return "refused"


def test_one_process_refuses_the_rows_of_a_rank(tmp_path):
    run_ranks(saved, 2, str(tmp_path))
    tables = hotbed.EmbeddingTables({"a": hotbed.Table(None, 4)}, hotbed.optim.Adagrad(lr=0.1), hbm="64KiB")
    with pytest.raises(RunError, match="rows of rank 1 of 2"):
        hotbed.checkpoint.load(tmp_path / "1", tables)
    with pytest.raises(RunError, match="holds the rows of one rank alone"):
        hotbed.checkpoint.warm_start(tmp_path / "1", tables)


def test_the_folder_of_a_rank_says_whose_rows_it_has(tmp_path):
    tables = hotbed.EmbeddingTables({"a": hotbed.Table(40, 4)}, hotbed.optim.Adagrad(lr=0.1))
    hotbed.checkpoint.save(tmp_path / "checkpoints" / "rank-1-of-2", tables)
    with pytest.raises(RunError, match="rows of rank 1 of 2, and these tables those of rank 0 of 1"):
        hotbed.checkpoint.load(tmp_path / "checkpoints" / "rank-1-of-2", tables)
    with pytest.raises(RunError, match=r"holds the rows of one rank alone\. Give "):
        hotbed.checkpoint.warm_start(tmp_path / "checkpoints" / "rank-1-of-2", tables)


def saved(root):
    tables = hotbed.ShardedTables({"a": hotbed.Table(None, 4)}, hotbed.optim.Adagrad(lr=0.1), hbm="64KiB")
    tables(torch.arange(8).unsqueeze(1)).sum().backward()
    hotbed.checkpoint.save(f"{root}/{dist.get_rank()}", tables)
