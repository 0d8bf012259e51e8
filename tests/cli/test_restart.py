"""What a restart of torchrun may take: the run that an attempt before it had begun, and nothing else."""

from pathlib import Path

import pytest

from hotbed.cli.ranks import RunStart, TorchrunRanks
from hotbed.errors import RunError


class Noted(dict):
    """The store that outlives a restart."""

    def set(self, name, text):
        self[name] = text.encode()

    def check(self, names):
        return all(name in self for name in names)


def attempt(number, noted):
    ranks = TorchrunRanks.__new__(TorchrunRanks)
    ranks.size, ranks.rank, ranks.attempt, ranks._lasting = 2, 0, number, noted
    return ranks


@pytest.fixture(params=["checkpoints", "none"])
def old(tmp_path, request):
    """Somebody's run."""
    for name in ("config.json", "summary.json", "metrics.jsonl", "model/dense.safetensors"):
        path = tmp_path / "eight" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}\n")
    if request.param == "checkpoints":
        for rank in range(2):
            (tmp_path / "eight" / "checkpoints" / f"rank-{rank}-of-2" / "000000001000").mkdir(parents=True)
    return tmp_path / "eight"


FRESH = Path("unused")


def test_a_run_that_was_refused_is_refused_again(old):
    noted = Noted()
    for number in range(3):
        with pytest.raises(RunError, match="already holds a run"):
            attempt(number, noted).start(RunStart(old), FRESH)


def test_an_attempt_that_died_before_it_took_the_folder_leaves_the_old_run_to_what_was_asked(old):
    """--overwrite was granted, and nothing overwritten: the old run is not what is resumed."""
    noted = Noted()
    asked = RunStart(old, overwrite=True)
    assert attempt(0, noted).start(asked, FRESH) == asked
    assert attempt(1, noted).start(asked, FRESH) == asked
    assert not attempt(1, noted).has_begun(old)


def test_a_run_that_was_begun_goes_on(old):
    noted = Noted()
    first = attempt(0, noted)
    first.start(RunStart(old, overwrite=True), FRESH)
    first.begin(old)
    assert not first.has_begun(old)  # by an attempt before
    has_checkpoint = (old / "checkpoints").exists()
    again = attempt(1, noted).start(RunStart(old), FRESH)
    assert again == RunStart(old, resume=has_checkpoint, overwrite=not has_checkpoint)


def test_a_fresh_folder_is_found_again(tmp_path):
    noted = Noted()
    assert attempt(0, noted).start(None, tmp_path / "one") == RunStart(tmp_path / "one")
    assert attempt(1, noted).start(None, tmp_path / "two") == RunStart(tmp_path / "one")


def test_alone_nothing_is_noted(old):
    with pytest.raises(RunError, match="already holds a run"):
        attempt(1, None).start(RunStart(old), FRESH)
