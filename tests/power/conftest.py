import tempfile
from pathlib import Path

import pytest

from tests.power.replay import TALLIES


@pytest.fixture
def disk(tmp_path):
    """A folder whose file operations are recorded."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def room():
    """Where states are laid out, thousands of them: in memory where the system has such a folder."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder) / "room"


def pytest_terminal_summary(terminalreporter):
    """How many states were tried, by operation."""
    if TALLIES:
        terminalreporter.section("power loss")
        for one in TALLIES:
            terminalreporter.write_line(
                f"{one.name:<44} {one.operations:>5,} file operations {one.states:>7,} states {one.seconds:>7.1f} s"
            )
