"""Threads whose work must not be felt: pauses in long work."""

import threading
import zlib
from types import SimpleNamespace

import pytest

from hotbed.checkpoint.files import checksum
from hotbed.host import background
from hotbed.host.background import paced, pause


@pytest.fixture
def clock(monkeypatch):
    """Work that takes the seconds that are appended; waiting takes none."""
    now = [0.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(thread_time=lambda: now[0]))

    def work(seconds):
        now[0] += seconds

    return work


def test_work_takes_its_share_of_the_time(clock):
    waited = []
    with paced(0.25, waited.append):
        for seconds in (1.0, 2.0, 0.0):
            clock(seconds)
            pause()
    assert waited == [3.0, 6.0, 0.0]


def test_nothing_waits_outside_of_paced_or_in_other_threads(clock):
    waited = []
    pause()
    with paced(0.5, waited.append):
        clock(1.0)
        other = threading.Thread(target=pause)
        other.start()
        other.join()
        with pytest.raises(ValueError, match="inside"):
            raise ValueError("inside")
    pause()
    assert waited == []


def test_a_checksum_pauses_between_pieces_and_stays_the_same(tmp_path):
    file = tmp_path / "rows"
    file.write_bytes(bytes(range(256)) * 12_289)  # 3 MiB and one part
    waited, whole = [], checksum(file)
    with paced(0.5, waited.append):
        assert checksum(file) == whole
    assert len(waited) == 4
    assert whole == zlib.crc32(file.read_bytes())
