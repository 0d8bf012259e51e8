"""gs:// and abfs://, against emulators where `azurite-blob` (npm) and `gcp-storage-emulator` (pip) are on the PATH."""

import json
import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from pyarrow.fs import AzureFileSystem, FileInfo, FileType, GcsFileSystem

from hotbed import load
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import RemoteError
from hotbed.files import path_of, uri
from hotbed.files.connect import connect
from hotbed.files.store import Store, store_of
from hotbed.files.uri import hide, read_uri
from tests.files.test_end_to_end import SHAPE, SMALL, files_in, hotbed, remote_files, write_days
from tests.ports import free_port

ACCOUNT = "devstoreaccount1"  # of every Azurite, with this key
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
# The emulator answers one request at a time; a client that reads a range and asks again before its end waits for ever.
THREADED = """
import sys
from http import server
server.HTTPServer = server.ThreadingHTTPServer
from gcp_storage_emulator.__main__ import main
main(["start", f"--port={sys.argv[1]}", "--in-memory", "--default-bucket=clicks"])
"""


def program(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on the PATH")
    return found


@contextmanager
def running(arguments, port):
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["abfs", "gs"])
def server(request, tmp_path_factory):
    """The URI of a folder of a bucket, with {} for the name of the bucket."""
    port = free_port()
    if request.param == "abfs":
        folder = tmp_path_factory.mktemp("azurite")
        arguments = [
            program("azurite-blob"),
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "-l",
            str(folder),
        ]
        at = f"127.0.0.1:{port}"
        options = f"?blob_storage_authority={at}&dfs_storage_authority={at}&enable_tls=false"
        with running([*arguments, "--blobPort", str(port)], port):
            plain = {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
            there = {f"{kind}_storage_authority": at for kind in ("blob", "dfs")}
            AzureFileSystem(ACCOUNT, account_key=KEY, **plain, **there).create_dir("clicks")
            yield f"abfs://{ACCOUNT}@{{}}/made{options}"
    else:
        python = Path(program("gcp-storage-emulator")).read_text().partition("\n")[0].removeprefix("#!")
        with running([python, "-c", THREADED, str(port)], port):
            yield f"gs://anonymous@{{}}/made?scheme=http&endpoint_override=127.0.0.1:{port}"


@pytest.fixture
def bucket(server, tmp_path, clean):
    clean.setenv("AZURE_STORAGE_KEY", KEY)
    clean.setenv("HOTBED_CACHE", str(tmp_path / "cache"))
    clean.setenv("HOTBED_STORE_PATIENCE", "20")
    return path_of(server.format("clicks")) / tmp_path.name


@pytest.fixture
def clean(monkeypatch):
    """No options and secrets of other tests."""
    monkeypatch.setattr(uri, "_options", {})
    monkeypatch.setattr(uri, "_secrets", set())
    for name in [one for one in os.environ if one.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    store_of.cache_clear()
    return monkeypatch


def test_from_raw_files_to_scores(bucket, tmp_path):
    (tmp_path / "days").mkdir()
    write_days(tmp_path / "days")
    for number, path in enumerate(sorted((tmp_path / "days").iterdir())):
        local = tmp_path / "logs" / f"day={number}" / path.name
        local.parent.mkdir(parents=True)
        shutil.copy(path, local)
        (bucket / "logs" / f"day={number}" / path.name).put(local)
    prepare(tmp_path / "logs", tmp_path / "data", **SHAPE)
    prepare(str(bucket / "logs"), bucket / "data", **SHAPE)
    assert remote_files(bucket / "data") == files_in(tmp_path / "data")
    assert hotbed("train", "--data", tmp_path / "data", "--out", tmp_path / "run", *SMALL) == 0
    stopping = ("--set", "train.max_steps=12")
    assert hotbed("train", "--data", bucket / "data", "--out", bucket / "run", *SMALL, *stopping) == 0
    shutil.rmtree(tmp_path / "cache")  # another machine
    assert hotbed("train", "--resume", bucket / "run", "--set", "train.max_steps=0", "--quiet") == 0
    there, here = remote_files(bucket / "run"), files_in(tmp_path / "run")
    rows = [name for name in here if name.startswith("model/") and name.endswith(".safetensors")]
    assert rows
    assert {name: there[name] for name in rows} == {name: here[name] for name in rows}
    assert json.loads(there["summary.json"])["final"] == json.loads(here["summary.json"])["final"]
    assert hotbed("evaluate", bucket / "run", "--split", "test") == 0
    assert hotbed("export", bucket / "run", "--no-onnx", "--out", bucket / "exported") == 0
    columns = {"price": [0.5, -1.0], "user": ["u1", "u39"], "ad": ["a3", "unheard of"], "day": ["1", "2"]}
    with load(bucket / "run") as remote, load(tmp_path / "run") as local, load(bucket / "exported") as exported:
        assert remote.score(columns).tolist() == local.score(columns).tolist()
        np.testing.assert_allclose(exported.score(columns), local.score(columns), atol=1e-6)


def test_folders_and_refusals(bucket, server):
    (bucket / "a" / "b" / "c.txt").write_text("grüße")
    (bucket / "a" / "d.txt").write_text("")
    assert (bucket / "a" / "b" / "c.txt").read_text() == "grüße"
    assert [(path.name, stat and stat.st_size) for path, stat in (bucket / "a").entries()] == [
        ("b", None),
        ("d.txt", 0),
    ]
    assert [path.name for path in bucket.rglob("*.txt")] == ["c.txt", "d.txt"]
    assert (bucket / "a" / "b").is_dir()
    (bucket / "a" / "d.txt").unlink()
    assert not (bucket / "a" / "d.txt").exists()
    nowhere = path_of(server.format("nowhere"))
    with pytest.raises(RemoteError, match="no such bucket"):
        (nowhere / "a").exists()
    with pytest.raises(RemoteError, match="no such bucket"):
        (nowhere / "a").write_text("a")


def test_a_wrong_key_is_refused_at_once(bucket, server, clean):
    if not server.startswith("abfs"):
        pytest.skip("the other one asks for no key")
    clean.setenv("AZURE_STORAGE_KEY", KEY[::-1][2:] + "==")
    store_of.cache_clear()
    with pytest.raises(RemoteError, match=r"Access was denied\. .*AZURE_STORAGE_KEY"):
        (bucket / "a").exists()


def test_folders_where_a_store_lists_files_alone(monkeypatch):
    """As gs:// does: files below other folders were left out."""
    names = ["logs/day=1/a", "logs/day=1/b", "logs/day=2/x/a", "logs/e"]

    class FilesAlone:
        def get_file_info(self, selector):
            deep = [f"clicks/{name}" for name in names if f"clicks/{name}".startswith(selector.base_dir)]
            start = len(selector.base_dir) + 1
            return [
                FileInfo(one, FileType.File, size=1) for one in deep if selector.recursive or "/" not in one[start:]
            ]

    monkeypatch.setattr("hotbed.files.store.connect", lambda _: (FilesAlone(), "clicks"))
    store = Store(read_uri("gs://clicks/"))
    assert [(one.key, one.stat is None) for one in store.listed("logs")] == [
        ("logs/day=1", True), ("logs/day=2", True), ("logs/e", False)
    ]  # fmt: skip
    assert [one.key for one in store.listed("")] == ["logs"]
    deep = {one.key for one in store.listed("", recursive=True)}
    assert deep == {*names, "logs", "logs/day=1", "logs/day=2", "logs/day=2/x"}


TOKEN = "sv=2026-10-06&sr=c&sig=ab/cd%2Bef%3D"
FORMS = {
    "abfs://clicks@acc.dfs.core.windows.net/x": ({}, {}, "clicks"),
    "abfss://acc@clicks/x": ({"AZURE_STORAGE_KEY": KEY}, {"account_key": KEY}, "clicks"),
    "abfs://clicks:a%2Fb@acc.dfs.core.windows.net/x": ({"AZURE_STORAGE_KEY": KEY}, {"account_key": "a/b"}, "clicks"),
    "abfs://acc.blob.core.windows.net/clicks/x": ({"AZURE_STORAGE_SAS_TOKEN": TOKEN}, {"sas_token": f"?{TOKEN}"}, ""),
    f"abfs://acc@clicks/x?{TOKEN}": (
        {"AZURE_STORAGE_KEY": KEY}, {"sas_token": "?sv=2026-10-06&sr=c&sig=ab%2Fcd%2Bef%3D"}, "clicks"
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", list(FORMS))
def test_accounts_and_credentials_of_azure(clean, text):
    variables, secret, container = FORMS[text]
    for name, value in variables.items():
        clean.setenv(name, value)
    files, base = connect(read_uri(text))
    assert base == container
    assert files.equals(AzureFileSystem("acc", **secret))
    shown = str(path_of(text))
    assert shown == text.partition("?")[0].replace(":a%2Fb@", "@")
    assert "ab/cd" not in hide(text)


def test_an_account_must_be_named(clean):
    with pytest.raises(RemoteError, match="names no account"):
        connect(read_uri("abfs://clicks/x"))


def test_options_of_google(clean):
    files, bucket = connect(read_uri("gs://anonymous@clicks/x?scheme=http&endpoint_override=127.0.0.1:1"))
    assert bucket == "clicks"
    assert isinstance(files, GcsFileSystem)
