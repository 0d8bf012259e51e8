"""Reading and writing objects of a real server: ranges, listings, refusals, the cache of blocks and its budget."""

import os
import zlib

import numpy as np
import pytest

from hotbed.errors import RemoteError
from hotbed.files import path_of
from hotbed.files.block_cache import BLOCK, CacheFolder, block_cache
from hotbed.files.copies import fetch_folder, publish_folder
from tests.files.s3 import SECRET, FaultProxy, set_environment

CONTENT = np.random.default_rng(3).integers(0, 256, 2 * BLOCK + 1000, dtype=np.uint8).tobytes()


def test_small_objects(bucket):
    path = bucket / "a" / "b.txt"
    assert not path.exists()
    path.write_text("grüße")
    assert path.read_text() == "grüße"
    assert path.is_file()
    assert bucket.is_dir()
    assert (bucket / "a").is_dir()
    assert not (bucket / "a").is_file()
    assert path.stat().st_size == 7
    assert [str(one) for one in bucket.rglob("*.txt")] == [str(path)]
    path.write_text("new")
    assert path.read_text() == "new"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        path.read_bytes()


def test_ranges_through_the_cache(bucket, tmp_path):
    path = bucket / "big"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        assert file.read() == CONTENT
        file.seek(BLOCK - 10)
        assert file.read(20) == CONTENT[BLOCK - 10 : BLOCK + 10]
        assert file.seek(-5, os.SEEK_END) == len(CONTENT) - 5
        assert file.read() == CONTENT[-5:]
    blocks = list((tmp_path / "cache" / "remote" / "blocks").iterdir())
    assert sum(one.stat().st_size - 4 for one in blocks) == len(CONTENT)
    blocks[0].write_bytes(b"x" + blocks[0].read_bytes()[1:])  # a flipped bit is found and the block is fetched again
    block_cache()._recent.clear()
    with path.open("rb") as file:
        assert zlib.crc32(file.read()) == zlib.crc32(CONTENT)


def test_a_cache_of_zero_bytes(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTBED_READ_CACHE", "0")
    (bucket / "big").write_bytes(CONTENT)
    with (bucket / "big").open("rb") as file:
        assert file.read() == CONTENT
    assert not (tmp_path / "cache").exists()


def test_the_budget_holds(tmp_path):
    folder = CacheFolder(tmp_path, 10_000)
    other = CacheFolder(tmp_path, 10_000)  # another process
    for number in range(30):
        (folder if number % 2 else other).add(f"block-{number}", bytes(996))
        used = sum(one.stat().st_size for one in (tmp_path / "blocks").iterdir())
        assert used <= 10_000
    assert folder.read("block-29", 996) == bytes(996)
    assert folder.read("block-0", 996) is None
    folder.add("too-large", bytes(20_000))
    assert not folder.has("too-large")


def test_a_missing_bucket(bucket):
    with pytest.raises(RemoteError, match=r"s3://nowhere.*no such bucket"):
        path_of("s3://nowhere/a").is_file()
    with pytest.raises(RemoteError, match="no such bucket"):
        path_of("s3://nowhere/a").write_text("x")


def test_a_refusal_is_not_repeated(bucket, s3_server, monkeypatch):
    variables = s3_server.environment() | {"AWS_ACCESS_KEY_ID": "UNKNOWN-KEY"}
    set_environment(monkeypatch, variables)
    with pytest.raises(
        RemoteError, match=r"(Access was denied|does not know the access key).*AWS_ACCESS_KEY_ID"
    ) as found:
        (bucket / "a").write_text("x")
    assert SECRET not in str(found.value)


def test_a_dead_server_ends_patience(bucket, s3_server, monkeypatch):
    proxy = FaultProxy(s3_server.port, lambda number, method: "dropped")
    monkeypatch.setenv("HOTBED_STORE_PATIENCE", "0.5")
    set_environment(monkeypatch, s3_server.environment(proxy.port))
    try:
        with pytest.raises(RemoteError, match=r"failed for .*Is the store up.*HOTBED_STORE_PATIENCE") as found:
            (bucket / "a").read_bytes()
        assert proxy.requests > 1
        assert SECRET not in str(found.value)
    finally:
        proxy.close()


def test_a_folder_counts_when_its_manifest_is_there(bucket, tmp_path):
    local = tmp_path / "folder"
    (local / "deep").mkdir(parents=True)
    (local / "manifest.json").write_text("{}")
    (local / "deep" / "rows").write_bytes(CONTENT[:1000])
    (bucket / "unit" / "left.over").write_text("of an upload that was killed")
    publish_folder(local, bucket / "unit", "manifest.json")
    files = {
        path.key[len((bucket / "unit").key) + 1 :]: stat
        for path, stat in (bucket / "unit").entries(recursive=True)
        if stat
    }
    assert {name for name in files if not name.endswith("/")} == {"manifest.json", "deep/rows"}
    wanted = {name: files[name] for name in ("manifest.json", "deep/rows")}

    def refuse(new):
        raise RemoteError(f"{new} is not whole")

    with pytest.raises(RemoteError, match="is not whole"):
        fetch_folder(bucket / "unit", tmp_path / "back", wanted, refuse)
    assert not list(tmp_path.glob("back*"))
    fetch_folder(bucket / "unit", tmp_path / "back", wanted, lambda new: None)
    assert (tmp_path / "back" / "deep" / "rows").read_bytes() == CONTENT[:1000]
    with pytest.raises(RemoteError, match=r"has no manifest\.json"):
        publish_folder(local / "deep", bucket / "unit", "manifest.json")
