"""Clients that mean harm, and disks that fail: each gets an answer or is left, and the next client is served."""

import json
import os
import shutil
import signal
import socket

import orjson
import pytest

from hotbed.checkpoint.chain import folders_in
from tests.exposition import samples_of
from tests.serve.conftest import GOOD, serving

HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def hasty(run_folder):
    """A server with little patience."""
    with serving(run_folder, "--memory", "1MB", "--time-limit", "1", "--max-body", "1MB") as found:
        yield found


def said_to(server, *parts):
    """All that the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        try:
            for part in parts:
                client.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has closed already
        found = b""
        try:
            while part := client.recv(65536):
                found += part
        except ConnectionResetError:
            pass
        return found


@pytest.mark.parametrize(
    ("parts", "answer"),
    [
        ((b"",), b""),
        ((b"POST /sc",), b" 408 "),
        ((HEAD, b"X-Slow: "), b" 408 "),
        ((HEAD + b"Content-Length: 10\r\n\r\n", b"{"), b" 408 "),
        ((HEAD, b"X-Long: ", b"a" * 200_000), b" 431 "),
        ((HEAD, *[b"".join(b"X-%d: y\r\n" % n for n in range(k, k + 500)) for k in range(0, 20_000, 500)]), b" 431 "),
        ((b"GET /" + b"a" * 200_000,), b" 431 "),
        ((b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",), b" 400 "),
        ((HEAD + b"Content-Length: 99999999999999\r\n\r\n",), b" 413 "),
        ((HEAD + b"Content-Length: -1\r\n\r\n",), b" 400 "),
        ((HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",), b" 400 "),
        ((HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",), b" 400 "),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n"), b" 400 "),
        ((HEAD + b"Connection: close, Upgrade\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n",), b" 400 "),
    ],
    ids=["silent", "half a line", "half a head", "half a body", "long header", "many headers", "long path", "TLS", "huge",
         "negative", "two lengths", "length and chunks", "no chunk", "websocket"],
)  # fmt: skip
def test_heads_and_bodies_that_never_end(hasty, parts, answer):
    found = said_to(hasty, *parts)
    assert answer in found.partition(b"\r\n")[0] if answer else found == b"", found[:300]
    assert hasty.score(GOOD)[0] == 200


def test_a_crowd_of_silent_clients_keeps_nobody_out(hasty):
    crowd = [socket.create_connection(("127.0.0.1", hasty.port), timeout=30) for _ in range(300)]
    try:
        for one in crowd[::2]:
            one.sendall(HEAD)
        assert hasty.score(GOOD)[0] == 200
        for one in crowd:
            one.recv(4096)  # until the server leaves them
    finally:
        for one in crowd:
            one.close()
    assert hasty.metric("in_flight") == 0


def test_a_connection_is_used_again_and_again(hasty):
    body = orjson.dumps(GOOD)
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=30) as client:
        for _ in range(50):
            client.sendall(request)
            found = b""
            while not found.endswith(b"}"):
                found += client.recv(65536)
            assert found.startswith(b"HTTP/1.1 200 ")
        client.sendall(request[:20])
        assert b" 408 " in client.recv(4096), "also the second head has its time"


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH"])
def test_methods_that_do_not_score(server, method):
    status, _, headers = server.ask(method, "/score")
    assert (status, headers["allow"]) == (405, "POST")
    assert server.ask("HEAD", "/healthz")[:2] == (200, b"")


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "nonsense", ""]
)
def test_the_content_type_is_not_asked_for(server, kind):
    """`curl -d` says that it sends a form."""
    assert server.ask("POST", "/score", json.dumps(GOOD).encode(), {"Content-Type": kind})[0] == 200


@pytest.mark.parametrize(
    ("number", "status"),
    [("NaN", 400), ("Infinity", 400), ("-Infinity", 400), ("1e999", 422), ("1" * 400, 422), ("-0", 200), ("01", 400)],
)
def test_numbers_that_json_or_the_model_does_not_know(server, number, status):
    body = json.dumps(GOOD).replace("1.5", number).encode()
    found, answer, _ = server.ask("POST", "/score", body)
    assert found == status or (status == 422 and found == 400), answer
    assert ("scores" in json.loads(answer)) == (status == 200)


def test_of_keys_that_are_there_twice_the_last_counts(server):
    body = json.dumps(GOOD).replace('"age": [1, 2, 3]', '"age": ["x"], "age": [1, 2, 3]').encode()
    assert json.loads(server.ask("POST", "/score", body)[1])["scores"] == server.score(GOOD)[1]["scores"]


def test_metrics_follow_the_rules_of_the_format(server):
    server.score(GOOD)
    server.ask("POST", "/score", b"{")
    status, body, headers = server.ask("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = samples_of(body.decode())
    assert found['hotbed_serve_requests_total{status="200"}'] >= 1
    assert found['hotbed_serve_request_seconds_bucket{le="+Inf"}'] == sum(
        value for key, value in found.items() if key.startswith("hotbed_serve_requests_total")
    )


def test_a_checkpoint_half_written_or_gone(run_folder, tmp_path):
    """What is not whole is not taken; what scores needs none of the folders it came from."""
    folder, steps = tmp_path / "run", folders_in(run_folder / "checkpoints")
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints", "model"))
    first = folder / "checkpoints" / steps[0].name
    shutil.copytree(steps[0], first)
    with serving(folder, "--memory", "1MB") as server:
        before = server.score(GOOD)[1]
        half = folder / "checkpoints" / steps[1].name
        shutil.copytree(steps[1], half, ignore=shutil.ignore_patterns("manifest.json"))
        assert json.loads(server.ask("POST", "/reload")[1])["update"] == "none"
        shutil.rmtree(half)
        shutil.rmtree(first)
        assert server.score(GOOD)[1] == before
        assert json.loads(server.ask("POST", "/reload")[1])["model"] == before["model"]
        assert server.ask("GET", "/openapi.json")[0] in (200, 503)
        shutil.copytree(steps[-1], folder / "checkpoints" / steps[-1].name)
        shutil.copytree(steps[0], first)
        for one in steps[1:-1]:
            shutil.copytree(one, folder / "checkpoints" / one.name)
        answer = json.loads(server.ask("POST", "/reload")[1])
        assert answer["model"] != before["model"], answer
        assert server.score(GOOD)[0] == 200


def test_a_disk_that_fails_is_a_503_until_it_does_not(run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    file = folder / "model" / "tables.safetensors"
    whole = file.read_bytes()
    with serving(folder / "model", "--memory", "1MB") as server:
        os.truncate(file, 0)
        status, answer = server.score(GOOD)
        assert status == 503
        assert "cannot be read" in answer["error"]
        assert server.score({"context": []})[0] == 422
        file.write_bytes(whole)
        assert server.score(GOOD)[0] == 200
        server.program.signal(signal.SIGTERM)
        assert server.program.ended(30).returncode == 0
