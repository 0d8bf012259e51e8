"""Ranks of torchrun take their share of the cores, and leave what a user chose."""

import os
import subprocess
import sys

import pytest
import torch

from hotbed.host import threads
from hotbed.host.threads import CoreShare, share_cores


@pytest.fixture
def rank(monkeypatch):
    """As torchrun starts one of four ranks on a machine of 16 cores; threads are put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, value in {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "num_cores", lambda: 16)
    monkeypatch.setattr(threads, "_is_users_choice", lambda: False)
    yield monkeypatch
    torch.set_num_threads(before)


def test_a_rank_takes_its_share_and_says_it_once(rank):
    share = share_cores()
    assert share == CoreShare(4, 16, 4)
    assert torch.get_num_threads() == 4
    assert str(share).startswith("4 ranks share 16 cores: 4 threads each")
    assert share_cores() is None


@pytest.mark.parametrize(
    ("name", "value"), [("OMP_NUM_THREADS", "3"), ("OMP_NUM_THREADS", None), ("LOCAL_WORLD_SIZE", "1")]
)
def test_other_numbers_and_lone_processes_stay(rank, name, value):
    rank.setenv(name, value) if value else rank.delenv(name)
    assert share_cores() is None
    assert torch.get_num_threads() == 1


def test_a_user_stays_who_chose_in_the_shell_or_in_code_or_starts_ranks_otherwise(rank):
    rank.setattr(threads, "_is_users_choice", lambda: True)
    assert share_cores() is None
    rank.setattr(threads, "_is_users_choice", lambda: False)
    rank.delenv("TORCHELASTIC_RUN_ID")
    assert share_cores() is None
    rank.setenv("TORCHELASTIC_RUN_ID", "x")
    torch.set_num_threads(2)
    assert share_cores() is None
    assert torch.get_num_threads() == 2


def test_more_ranks_than_cores_keep_one_thread(rank):
    rank.setattr(threads, "num_cores", lambda: 3)
    assert share_cores() is None
    assert torch.get_num_threads() == 1


SCRIPT = """
import os, torch
from hotbed.host import threads
threads.num_cores = lambda: 10
threads.share_cores()
with open(f"rank{os.environ['RANK']}", "w") as file:
    file.write(str(torch.get_num_threads()))
"""


@pytest.mark.parametrize(("chosen", "expected"), [(None, "5"), ("1", "1")])
def test_under_torchrun(tmp_path, chosen, expected):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {} if chosen is None else {"OMP_NUM_THREADS": chosen}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=120)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [expected] * 2
