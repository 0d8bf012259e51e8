from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fresh import Program
from tests.scorer.conftest import from_raw  # noqa: F401  a fixture

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("orjson")
pytest.importorskip("httptools")
pytest.importorskip("prometheus_client")

GOOD = {
    "context": {"price": 1.5, "user": "u7", "tags": ["a", "b"]},
    "candidates": {"age": [1, 2, 3], "ad": [0, 1_000_003, 7]},
}


class Server:
    """`hotbed serve` in a process of its own."""

    def __init__(self, program: Program, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.program, self.port, self._tls = program, port, tls

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None):
        """(status, body, headers) of one request."""
        if self._tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self._tls)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def score(self, tree):
        """(status, document) of POST /score."""
        status, body, _ = self.ask("POST", "/score", json.dumps(tree).encode())
        return status, json.loads(body)

    def metric(self, name: str) -> float:
        lines = self.ask("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"hotbed_serve_{name}"))


SERVE = "import os, sys; os.dup2(1, 2); from hotbed.cli import main; main(['serve', *sys.argv[1:]])"


@contextmanager
def serving(
    folder: Path, *flags: str, env: Mapping[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[Server]:
    program = Program(
        SERVE, folder, "--port", "0", "--poll", "0", *flags, env=None if env is None else os.environ | env
    )
    try:
        told = []
        for line in program.stdout:
            told.append(line)
            if match := re.search(r"listening on https?://127\.0\.0\.1:(\d+)", line):
                yield Server(program, int(match[1]), tls)
                break
        else:
            raise AssertionError("".join(told))
    finally:
        program.signal(signal.SIGTERM)
        program.ended(60)


@pytest.fixture(scope="package")
def run_folder(from_raw, tmp_path_factory):  # noqa: F811
    """A copy of the run that tests may not change."""
    folder = tmp_path_factory.mktemp("served") / "run"
    shutil.copytree(from_raw, folder)
    return folder


@pytest.fixture(scope="package")
def server(run_folder):
    limits = ("--max-body", "20KB", "--max-candidates", "50", "--time-limit", "60")
    with serving(run_folder, "--memory", "1MB", *limits) as found:
        yield found
