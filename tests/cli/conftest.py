from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from hotbed.cli import main


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Embedded datasets are built once for all tests of this folder."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def hotbed(capsys, monkeypatch, cache, tmp_path):
    """hotbed("train", ...) -> Result; runs in an empty folder, in this process."""
    monkeypatch.setenv("HOTBED_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Result:
        with pytest.raises(SystemExit) as caught:
            main([str(one) for one in arguments])
        code = caught.value.code
        captured = capsys.readouterr()
        return Result(0 if code is None else int(code), captured.out, captured.err)

    return call
