"""A path and settings in, a server that runs until it is stopped. Ctrl-C or SIGTERM: requests in flight are finished first.

`HeadLimit`: uvicorn's protocol with limits on the time and size of request headers. uvicorn buffers headers without a limit: a
client that never ends them would take ever more memory, and clients that connect and send nothing would take all connections.
Limits on bodies are in app.py.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hotbed.errors import ConfigError
from hotbed.host.compiling import CompileReport
from hotbed.host.memory import parse_bytes
from hotbed.scorer import Scorer
from hotbed.scorer.source import open_source
from hotbed.serve.access import Access
from hotbed.serve.app import Service, is_loopback
from hotbed.serve.board import Board
from hotbed.serve.metrics import ServerMetrics
from hotbed.serve.openapi import example_of
from hotbed.serve.pool import ScoringPool, warm
from hotbed.serve.request import Limits
from hotbed.serve.watch import ModelOnDisk, ModelWatch, newest
from hotbed.serve.workers import LONGEST_GOODBYE, STOPPED, STOPPING, Workers

_HEAD_BYTES = 64 << 10  # proxies allow 8 to 32 KiB
_SWITCH_SECONDS = 0.0005  # between Python threads, so that answers do not wait for threads that compute
_IDLE_SECONDS = 75  # before a connection is closed; longer than proxies keep theirs, so that they close first
_CONNECTIONS = 1 << 16
_log = logging.getLogger("hotbed.serve")


class Address(NamedTuple):
    """Where a server listens."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free


class ModelStorage(NamedTuple):
    """How the model is stored and updated, and its name in the paths of the Open Inference Protocol."""

    name: str
    memory: str
    scratch: Path | None = None
    threads: int = 2  # that score
    poll: float = 2.0  # seconds between checks for a newer model; 0: only on POST /reload
    mapped: bool = False  # files of rows are mapped into memory
    workers: int = 1  # processes, which divide the memory


def serve(place: Path, address: Address, holding: ModelStorage, limits: Limits, access: Access) -> None:
    """Load the model, then listen; returns when the server is stopped."""
    if not is_loopback(address.host) and access.open_to_network:
        _log.warning("listening on %s: %s", address.host, access.open_to_network)
    with _listening(address) as socket_:
        _serve(place, holding, limits, access, socket_)


def _serve(place: Path, holding: ModelStorage, limits: Limits, access: Access, socket_: socket.socket) -> None:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    torch.set_num_threads(1)  # requests are scored side by side, not each by many threads
    sys.setswitchinterval(_SWITCH_SECONDS)
    _allow_connections()
    found = newest(place)
    scorer = _load(place, found, holding)
    board = Board(holding.workers)

    def run(number: int = 0, restarted: bool = False) -> None:
        metrics = ServerMetrics(board, number)
        pool = ScoringPool(scorer, limits, metrics, holding.threads)
        watch = ModelWatch(place, scorer, metrics, found, holding.poll)
        if restarted:
            watch.catch_up()
        service = Service(holding.name, scorer, pool, watch, access)
        with _quiet_signals():
            _run(_config(service, limits, access), service, pool, watch, socket_)

    compiled = CompileReport()
    warm(scorer.live)
    if compiled.kernels:
        _log.info("%d kernels were compiled in %.1f s, once on this machine", compiled.kernels, compiled.seconds)
    _log.info("%r", scorer)
    gc.collect()
    gc.freeze()  # long-lived objects: scanning them again and again would delay requests, and unshare memory of workers
    with scorer:
        if holding.workers == 1:
            run()
        else:
            scorer.share()
            Workers(board, run).run(lambda: say_listening(socket_, scorer, access), socket_.close)


def _load(place: Path, found: ModelOnDisk | None, holding: ModelStorage) -> Scorer:
    source = found.open() if found is not None else open_source(place)
    memory, scratch = parse_bytes(holding.memory, "--memory"), holding.scratch or place
    return Scorer(source, memory, "cpu", scratch, updated=True, mapped=holding.mapped, processes=holding.workers)


def _config(service: Service, limits: Limits, access: Access) -> uvicorn.Config:
    return uvicorn.Config(
        service.app,
        http=limited(limits),
        ssl_certfile=access.cert,
        ssl_keyfile=access.key,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        backlog=2048,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=LONGEST_GOODBYE,
    )


def _run(
    config: uvicorn.Config, service: Service, pool: ScoringPool, watch: ModelWatch, socket_: socket.socket
) -> None:
    server = _ScorerServer(config, service, pool)
    watch.start()
    try:
        server.run(sockets=[socket_])
    finally:
        watch.stop()
        pool.stop()


def _allow_connections() -> None:
    """Raise the limit of open files: the usual 1,024 are too few if many clients connect and send nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _CONNECTIONS if hard == resource.RLIM_INFINITY else min(_CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """Bind the socket before the model is loaded, so that a port in use is reported at once."""
    made = None
    try:
        family, kind, number, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
    except OSError as error:
        if made is not None:
            made.close()
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror or error}. Choose another --host or --port."
        ) from error
    with made:
        yield made


def say_listening(socket_: socket.socket, scorer: Scorer, access: Access) -> None:
    """Log where, and a command line that scores two candidates with this model."""
    host, port = socket_.getsockname()[:2]
    _log.info("listening on %s://%s:%s", access.scheme, _in_url(host), port)
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # for clients on this machine
    url = f"{access.scheme}://{_in_url(local)}:{port}"
    if access.token is None:  # a browser does not send one
        _log.info("description, with a form to try it: %s/", url)
    body = shlex.quote(json.dumps(example_of(scorer.live.schema)))
    _log.info("try: curl -sg%s -H 'content-type: application/json' -d %s %s/score", access.curl_options, body, url)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _ScorerServer(uvicorn.Server):
    """uvicorn's server in one process; one of several ends with the process that started it."""

    def __init__(self, config: uvicorn.Config, service: Service, pool: ScoringPool) -> None:
        super().__init__(config)
        self._service, self._pool = service, pool
        self._parent = os.getppid() if len(pool.metrics.board.parts) > 1 else None

    async def startup(self, sockets: Any = None) -> None:
        self._pool.start(asyncio.get_running_loop())
        await super().startup(sockets)
        self._pool.metrics.own.ready = 1
        if self._parent is None:
            say_listening(sockets[0], self._service.scorer, self._service.access)

    async def on_tick(self, counter: int) -> bool:
        if self._parent is not None and (self._service.closing or os.getppid() != self._parent):
            self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._parent is None or sig != signal.SIGINT:  # Ctrl-C reaches all processes; the parent passes it on
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: Any = None) -> None:
        self._service.stop()
        self._pool.metrics.own.ready = 0
        if self._parent is None:
            _log.info(STOPPING)
        await super().shutdown(sockets)
        if self._parent is None:
            _log.info(STOPPED)


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """uvicorn raises the signal again after shutdown, when nothing is left to do: ignore it."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


class HeadLimit(HttpToolsProtocol):
    """One connection; `limited` sets the time limit."""

    seconds: float = 5.0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head_bytes = 0  # since the last whole head
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()  # of the next request on a connection that was kept
        before, self._head_bytes = self._head_bytes, self._head_bytes + len(data)
        super().data_received(data)
        if self._in_head and before + len(data) > _HEAD_BYTES:
            self._refuse("431 Request Header Fields Too Large", f"the headers have more than {_HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._stop_timer()
        self._timer = self.loop.call_later(self.seconds, self._too_late)

    def _too_late(self) -> None:
        if self._head_bytes:
            self._refuse("408 Request Timeout", "the headers did not arrive in time")
        else:
            self.transport.close()  # it was never used

    def _refuse(self, status: str, what: str) -> None:
        if self.transport.is_closing():
            return
        body = f'{{"error":"{what}"}}'
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"connection: close\r\n\r\n{body}".encode()
        )
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited(limits: Limits) -> type[HeadLimit]:
    """The protocol of a server with these limits."""
    return type("Limited", (HeadLimit,), {"seconds": limits.seconds})
