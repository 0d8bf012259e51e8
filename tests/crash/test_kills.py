"""Law 7 with real kills: whatever a process was doing, the run goes on and ends as the one that was left alone.

`python -m benchmarks.crash` does the same two hundred times.
"""

import random
import shutil
import signal
import subprocess

import pytest

from benchmarks.crash.processes import Command
from benchmarks.crash.runs import Case, KilledRun, differences_of, end_of, no_kills, undisturbed
from hotbed.checkpoint.chain import folders_in
from hotbed.data.embedded import resolve

pytestmark = pytest.mark.slow
KILLS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTBED_CACHE", str(tmp_path_factory.mktemp("cache")))
        return str(resolve("criteo-like:2000").path)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run that was left alone, rows in memory over an ssd."""
    case = Case("memory over ssd", "incremental", data, epochs=2)
    return case, undisturbed(case, tmp_path_factory.mktemp("whole") / "root")


@pytest.fixture
def killed(whole, tmp_path):
    """The same run, killed when it had written some checkpoints and was removing one."""
    case, _ = whole
    root = tmp_path / "root"
    root.mkdir()
    change = 120
    while not folders_in(root / "run" / "checkpoints"):
        shutil.rmtree(root / "run", ignore_errors=True)
        assert Command(case.arguments(root), root, change).ended().code == -signal.SIGKILL
        change += 20
    return root


def go_on(root, *more):
    return Command(["train", "--resume", str(root / "run"), *more], root).ended()


@pytest.mark.parametrize(
    ("tiers", "checkpoints"),
    [
        ("plain", "incremental"),
        ("three tiers", "full"),
        ("dynamic ids, cache over memory", "incremental"),
        ("scored dynamic ids, three tiers", "incremental"),
    ],
)
def test_killed_again_and_again(data, tmp_path, tiers, checkpoints):
    case, tally = Case(tiers, checkpoints, data, epochs=2), no_kills()
    left_alone = undisturbed(case, tmp_path / "whole")
    draw = random.Random(7)
    for number in range(8 * KILLS):  # a run may end before its kill
        KilledRun(case, tmp_path / f"killed-{number}", left_alone, draw, tally).live(KILLS - tally.num_kills)
        if tally.num_kills >= KILLS:
            break
    assert tally.num_kills == KILLS


def test_two_processes_that_resume_one_run(whole, killed, tmp_path):
    """One of them goes on, the other one is told."""
    (tmp_path / "other").mkdir()
    arguments = ["train", "--resume", str(killed / "run")]
    both = [Command(arguments, killed), Command(arguments, tmp_path / "other")]
    first, second = sorted((one.ended() for one in both), key=lambda one: one.code)
    assert first.code == 0, first.text
    assert second.code == 1
    assert any(
        text in second.text for text in ("another process is training", "in use by another store", "is finished")
    )
    assert differences_of(whole[1].end, end_of(killed / "run")) == []


def test_a_folder_on_the_ssd_that_is_gone(whole, killed):
    """Checkpoints have links of their own to its files."""
    shutil.rmtree(killed / "ssd")
    ended = go_on(killed)
    assert ended.code == 0, ended.text
    assert differences_of(whole[1].end, end_of(killed / "run")) == []


def test_an_ssd_without_room_for_the_rows(whole, killed, tmp_path):
    """It is told, the checkpoint stays, and the run goes on where there is room."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        ended = go_on(killed, "--ssd", f"{small}:8MiB")
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)
    assert ended.code == 3
    assert "No space left on device" in ended.text
    assert "another folder" in ended.text
    assert Command(["checkpoint", "verify", str(killed / "run")], killed).ended().code == 0
    ended = go_on(killed, "--ssd", f"{killed / 'ssd'}:8MiB")
    assert ended.code == 0, ended.text
    assert differences_of(whole[1].end, end_of(killed / "run")) == []


def test_killed_while_pruning(whole, killed):
    """Some files of an old checkpoint are gone then, the others are in nobody's way."""
    checkpoints = killed / "run" / "checkpoints"
    shutil.copytree(folders_in(checkpoints)[-1], checkpoints / "000000000001")  # one that nobody needs
    prune = ["checkpoint", "prune", str(killed / "run"), "--keep", "1"]
    for number in range(1, 12):  # the first changes are those of the lock
        assert Command(prune, killed, number).ended().code == -signal.SIGKILL
        if {path.suffix for path in checkpoints.iterdir()} > {""}:
            break
    assert {path.suffix for path in checkpoints.iterdir()} > {""}
    assert Command(["checkpoint", "verify", str(killed / "run")], killed).ended().code == 0
    assert Command(prune, killed).ended().code == 0
    assert len(folders_in(checkpoints)) == len(list(checkpoints.iterdir()))
    ended = go_on(killed)
    assert ended.code == 0, ended.text
    assert differences_of(whole[1].end, end_of(killed / "run")) == []
