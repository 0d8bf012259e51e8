"""One S3 server for all tests of a process; each test has a folder of its own in the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hotbed.files import RemotePath, path_of
from tests.files.s3 import BUCKET, S3Server, set_environment


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.kill()


@pytest.fixture
def bucket(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemotePath:
    """A folder of the bucket; caches of this test only, and little patience."""
    set_environment(monkeypatch, s3_server.environment())
    monkeypatch.setenv("HOTBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOTBED_STORE_PATIENCE", "60")
    monkeypatch.setenv("HOTBED_STORE_TIMEOUT", "20")
    found = path_of(f"s3://{BUCKET}/{tmp_path.name}")
    assert isinstance(found, RemotePath)
    return found
