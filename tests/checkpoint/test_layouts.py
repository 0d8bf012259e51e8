"""Where checkpoints of one process and of ranks are."""

from pathlib import Path

import pytest

from hotbed.checkpoint.layouts import root_of, run_of


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (11, 12)])
def test_the_run_of_a_checkpoint_is_found_from_its_folder(rank, world):
    run = Path("/runs/first")
    assert run_of(root_of(run / "checkpoints", rank, world) / "000000001000") == run
