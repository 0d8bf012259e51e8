"""A real S3 server that keeps objects on disk (s3rver, of npm), and a proxy in front of it that fails as told.

`make test` installs the server beside Python's packages. It can be killed and started again with the same objects.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.ports import free_port

SCRIPT = Path(sys.prefix) / "s3rver" / "node_modules" / "s3rver" / "bin" / "s3rver.js"
BUCKET = "clicks"
SECRET = "wJalrXUtnFEMI-K7MDENG-never-to-be-seen"
FAULTS = ("throttled", "failed", "cut", "dropped", "lost", "slow")
# s3rver ends when an object is removed between two of its looks at it. A server that stays does not answer that request.
_STAYING = "for (const kind of ['uncaughtException', 'unhandledRejection']) process.on(kind, () => {});"


class S3Server:
    """One server process; `kill` is SIGKILL."""

    def __init__(self, folder: Path) -> None:
        if not SCRIPT.is_file() or shutil.which("node") is None:
            pytest.skip("s3rver is not installed; `make test` installs it where npm is present")
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        arguments = ["-d", str(self.folder), "-a", "127.0.0.1", "-p", str(self.port), "-s", "--no-vhost-buckets"]
        more = ["--allow-mismatched-signatures", "--configure-bucket", BUCKET]
        staying = self.folder.with_suffix(".js")
        staying.write_text(_STAYING)
        node = ["node", "--openssl-legacy-provider", "--require", str(staying), str(SCRIPT)]
        self.process = subprocess.Popen([*node, *arguments, *more], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self.process.poll() is None, "the S3 server has ended"
                assert time.monotonic() < deadline, "the S3 server does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def environment(self, port: int | None = None) -> dict[str, str]:
        """The variables of a user of this server, or of a proxy before it."""
        return {
            "AWS_ACCESS_KEY_ID": "S3RVER",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port or self.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",  # s3rver is older than these checksums
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }


class FaultProxy:
    """Passes requests on, unless `fault_of(number, method)` names a fault for one of them."""

    def __init__(self, port: int, fault_of: Callable[[int, str], str | None]) -> None:
        self.counts: dict[str, int] = dict.fromkeys(FAULTS, 0)
        self.requests = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fault = proxy.next_fault(fault_of, self.command)
                if fault in ("throttled", "failed"):
                    status, code = (503, "SlowDown") if fault == "throttled" else (500, "InternalError")
                    answer = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
                    self.send_response(status)
                    self.send_header("Content-Type", "application/xml")
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer if self.command != "HEAD" else b"")
                    return
                if fault == "dropped":
                    self.close_connection = True
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    upstream.request(self.command, self.path, body, dict(self.headers))
                    found = upstream.getresponse()
                    content = found.read()
                finally:
                    upstream.close()
                if fault == "lost":  # it was done, and nobody hears of it
                    self.close_connection = True
                    return
                self.send_response(found.status)
                for name, value in found.getheaders():
                    if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                        self.send_header(name, value)
                length = found.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if fault == "cut":
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                elif fault == "slow":  # some bytes, then none for longer than the client's limit
                    self.wfile.write(content[:1])
                    self.wfile.flush()
                    proxy.pause.wait(30)
                    self.close_connection = True
                else:
                    self.wfile.write(content)

        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.pass_on)
        self.pause = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # clients that hang up are part of the test
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def next_fault(self, fault_of: Callable[[int, str], str | None], method: str) -> str | None:
        with self._lock:
            self.requests += 1
            fault = fault_of(self.requests, method)
            if fault is not None:
                self.counts[fault] += 1
            return fault

    @property
    def num_faults(self) -> int:
        return sum(self.counts.values())

    def close(self) -> None:
        self.pause.set()
        self._server.shutdown()
        self._server.server_close()


def secrets_in(folder: Path) -> list[str]:
    """The files below a folder that hold the secret."""
    found = [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    return [str(path) for path in found]


def set_environment(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    from hotbed.files import uri
    from hotbed.files.store import store_of

    monkeypatch.setattr(uri, "_options", {})  # those that URIs of other tests have named for this bucket
    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store_of.cache_clear()
