"""Fetching over HTTP from a loopback server that behaves, breaks off, refuses or lies."""

import hashlib
import http.server
import json
import threading

import pytest

from hotbed.data import catalog, download
from hotbed.data.catalog import HubFolder, RemoteFile
from hotbed.data.download import list_folder
from hotbed.errors import DataError
from tests.ports import free_port

CONTENT = bytes(range(256)) * 1000 + b"the end"
SIZE = len(CONTENT)
MD5 = "md5:" + hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


class Server:
    """Serves CONTENT at /file; `behaviour` changes how. Every request's Range header is kept in `ranges`."""

    def __init__(self):
        self.behaviour = "good"
        self.ranges = []
        self.listing = []
        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.thread = threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.root = f"http://127.0.0.1:{self.httpd.server_address[1]}"

    def file(self, size=SIZE, checksum=MD5):
        return RemoteFile("file.bin", f"{self.root}/file", size, checksum)

    def handler(self):
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                server.answer(self)

        return Handler

    def answer(self, request):
        if request.path.startswith("/api/"):
            return self.send(request, 200, json.dumps(self.listing).encode())
        if request.path == "/moved":
            request.send_response(302)
            request.send_header("Location", f"{self.root}/file")
            return request.end_headers()
        if self.behaviour.isdecimal():
            return request.send_error(int(self.behaviour))
        wanted = request.headers.get("Range")
        self.ranges.append(wanted)
        start = 0
        if wanted and self.behaviour != "no ranges":
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(CONTENT):
                request.send_response(416)
                request.send_header("Content-Range", f"bytes */{len(CONTENT)}")
                return request.end_headers()
        body = CONTENT[start:]
        promised = len(body)
        if self.behaviour == "breaks off once" and len(self.ranges) == 1:
            body = body[:100_000]
        if self.behaviour == "breaks off" or (self.behaviour == "then nothing" and len(self.ranges) > 1):
            body = body[: 100_000 if start == 0 else 0]
        if self.behaviour == "then nothing" and len(self.ranges) == 1:
            body = body[:70_000]
        if self.behaviour == "lies":
            body = body[:-1] + b"?"
        return self.send(request, 206 if start else 200, body, promised)

    def send(self, request, code, body, promised=None):
        request.send_response(code)
        request.send_header("Content-Length", str(len(body) if promised is None else promised))
        request.end_headers()
        request.wfile.write(body)

    def close(self):
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    started = Server()
    yield started
    started.close()


def fetch(file, directory, progress=None):
    return download.download(file, directory, progress)


def test_a_whole_file_arrives_checked(server, tmp_path):
    seen = []
    path = fetch(server.file(), tmp_path / "new" / "place", lambda name, done, total: seen.append((name, done, total)))
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["file.bin"]
    assert seen[0] == ("file.bin", 0, len(CONTENT))
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_a_complete_file_is_not_fetched_again(server, tmp_path):
    fetch(server.file(), tmp_path)
    server.behaviour = "500"
    assert fetch(server.file(), tmp_path).read_bytes() == CONTENT
    (tmp_path / "file.bin").write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(DataError, match="damaged or was replaced"):
        fetch(server.file(), tmp_path)


def test_redirects_are_followed(server, tmp_path):
    moved = RemoteFile("file.bin", f"{server.root}/moved", len(CONTENT), MD5)
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    assert fetch(moved, tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=1000-"]


def test_a_broken_transfer_continues_by_itself(server, tmp_path):
    server.behaviour = "breaks off once"
    assert fetch(server.file(), tmp_path).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-"]


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_the_next_run_resumes(server, tmp_path, size):
    server.behaviour = "then nothing"
    with pytest.raises(
        DataError, match=r"stopped at byte 70,000 .*The part so far is kept: run the same command again"
    ):
        fetch(server.file(size), tmp_path)
    assert (tmp_path / "file.bin.part").stat().st_size == 70_000
    server.behaviour, server.ranges = "good", []
    assert fetch(server.file(size), tmp_path).read_bytes() == CONTENT
    assert server.ranges == ["bytes=70000-"]


def test_a_server_without_ranges_starts_over(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(b"x" * 5000)
    server.behaviour = "no ranges"
    assert fetch(server.file(), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_part_that_is_whole_is_only_checked(server, tmp_path, size):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(server.file(size), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), None])
def test_a_part_that_is_too_long_starts_over(server, tmp_path, size):
    (tmp_path / "file.bin.part").write_bytes(CONTENT + b"more")
    assert fetch(server.file(size), tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_not_kept(server, tmp_path):
    server.behaviour = "lies"
    with pytest.raises(DataError, match=r"has md5 [0-9a-f]{32}; .*is stated to have"):
        fetch(server.file(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    server.behaviour = "good"
    assert fetch(server.file(), tmp_path).read_bytes() == CONTENT


def test_a_wrong_size_is_refused(server, tmp_path):
    with pytest.raises(DataError, match=r"has 256,007 bytes; .*stated to have 256,006"):
        fetch(server.file(size=len(CONTENT) - 1), tmp_path)


def test_without_a_checksum_the_length_is_all_there_is(server, tmp_path):
    server.behaviour = "lies"
    assert fetch(server.file(checksum=""), tmp_path).stat().st_size == len(CONTENT)


@pytest.mark.parametrize(
    ("code", "message"),
    [("401", "requires an account"), ("403", "requires an account"), ("404", "HTTP 404.*moved"), ("503", "HTTP 503")],
)
def test_a_server_that_says_no(server, tmp_path, code, message):
    server.behaviour = code
    with pytest.raises(DataError, match=message):
        fetch(server.file(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_connection_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    file = RemoteFile("f", f"http://127.0.0.1:{free_port()}/f", 10)
    with pytest.raises(DataError, match=r"127\.0\.0\.1:\d+ cannot be reached .*refused.*criteo-like or adult"):
        fetch(file, tmp_path)


def test_an_unwritable_place_is_said_so(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        fetch(server.file(), tmp_path / "file")


def test_two_downloads_of_one_file_keep_apart(server, tmp_path):
    import fcntl

    with (tmp_path / "file.bin.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="being written by another process"):
            fetch(server.file(), tmp_path)


def test_a_folder_is_listed_with_sizes_and_sums(server, monkeypatch):
    monkeypatch.setattr(catalog, "HUB", server.root)
    server.listing = [
        {"type": "directory", "path": "data/x", "size": 0},
        {"type": "file", "path": "data/x/b.parquet", "size": 7, "lfs": {"oid": "ab" * 32, "size": 7}},
        {"type": "file", "path": "data/x/a.parquet", "size": 5},
        {"type": "file", "path": "data/x/readme.md", "size": 5},
    ]
    first, second = list_folder(HubFolder("someone/something", "data/x"), (".parquet",))
    assert first == RemoteFile(
        "a.parquet", f"{server.root}/datasets/someone/something/resolve/main/data/x/a.parquet", 5, ""
    )
    assert (second.name, second.checksum) == ("b.parquet", "sha256:" + "ab" * 32)
    with pytest.raises(DataError, match=r"lists no \.zip file"):
        list_folder(HubFolder("someone/something", "data/x"), (".zip",))
    server.listing = {"error": "gone"}
    with pytest.raises(DataError, match="did not answer with a file listing"):
        list_folder(HubFolder("someone/something"), (".zip",))


def test_a_listing_that_cannot_be_reached_names_the_page(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(catalog, "HUB", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(DataError, match=r"cannot be reached.*/datasets/someone/something on another machine"):
        list_folder(HubFolder("someone/something"), (".zip",))
