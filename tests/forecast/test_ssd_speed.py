"""How fast an ssd is, and that it is said when that cannot be found out."""

import os

import pytest

from hotbed.errors import StoreError
from hotbed.forecast.measure import ssd_speed


def test_reads_come_from_the_device(tmp_path, monkeypatch):
    told = []
    real = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: (told.append(given[3]), real(*given)))
    assert ssd_speed(f"{tmp_path}/not/there/yet:1GiB", 528) > 0
    assert told == [os.POSIX_FADV_DONTNEED, os.POSIX_FADV_RANDOM]
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"could not be measured in .*No space left on device.*32.0 MiB"):
        ssd_speed(f"{tmp_path}:1GiB", 528)
