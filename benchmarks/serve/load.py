"""Requests on a fixed schedule over raw sockets: a process of its own, as light as Python can be.

Open loop: request n is due at start + n / rate, whatever became of those before it, and its latency counts from that moment
(no coordinated omission). Requests go out over connections that are idle; where none is, a new one is opened.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pickle
import time
from collections import Counter
from pathlib import Path

import numpy as np

_HEAD = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[tuple[int, bytes]] | None = None
        self.closed = False
        self._parts = bytearray()
        self._wanted = -1
        self._body_at = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionError("closed"))

    def ask(self, request: bytes, loop: asyncio.AbstractEventLoop) -> asyncio.Future[tuple[int, bytes]]:
        self._parts, self._wanted = bytearray(), -1
        self.answer = loop.create_future()
        self.transport.write(request)
        return self.answer

    def data_received(self, data: bytes) -> None:
        self._parts += data
        if self._wanted < 0:
            end = self._parts.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._parts[:end]).lower()
            at = head.find(b"content-length: ")
            self._wanted = int(head[at + 16 : head.find(b"\r\n", at) if head.find(b"\r\n", at) > 0 else end])
            self._body_at = end + 4
            if b"connection: close" in head:
                self.closed = True
        if len(self._parts) >= self._body_at + self._wanted and self.answer is not None and not self.answer.done():
            self.answer.set_result((int(self._parts[9:12]), bytes(self._parts[self._body_at :])))


class Load:
    """The requests of one run."""

    def __init__(self, port: int, rate: float, requests: list[tuple[bytes, bool]]) -> None:
        self._port, self._rate, self._requests = port, rate, requests
        self._idle: list[Connection] = []
        self.latencies = np.full(len(requests), np.nan)
        self.status: Counter[str] = Counter()
        self.models: Counter[str] = Counter()
        self.kept: list[tuple[int, str]] = []
        self.num_connections = 0

    async def run(self) -> None:
        """All of them, then wait for the last answer."""
        loop = asyncio.get_running_loop()
        tasks = set()
        start = loop.time() + 0.2
        for number in range(len(self._requests)):
            due = start + number / self._rate
            delay = due - loop.time()
            if delay > 0:
                await asyncio.sleep(delay)
            task = loop.create_task(self._one(number, due, loop))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _one(self, number: int, due: float, loop: asyncio.AbstractEventLoop) -> None:
        request, valid = self._requests[number]
        try:
            connection = await self._connection(loop)
            status, body = await connection.ask(request, loop)
        except OSError:
            self.status["valid failed" if valid else "malformed: connection lost"] += 1
            return
        self.latencies[number] = loop.time() - due
        if not connection.closed:
            self._idle.append(connection)
        if not valid:
            self.status[f"malformed: {status}"] += 1
            return
        self.status["valid ok" if status == 200 else f"valid failed {status}"] += 1
        if status == 200:
            self.models[body[body.rfind(b'"model":"') + 9 : -2].decode()] += 1
            if number % 200 == 0:
                self.kept.append((number, body.decode()))

    async def _connection(self, loop: asyncio.AbstractEventLoop) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        self.num_connections += 1
        _, made = await loop.create_connection(Connection, "127.0.0.1", self._port)
        return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int, help="of the server")
    parser.add_argument("bodies", type=Path, help="pickled requests, valid and malformed")
    parser.add_argument("found", type=Path, help="file for the result, as JSON")
    parser.add_argument("--rate", type=float, default=500, help="valid requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="of load (%(default)s)")
    parser.add_argument("--malformed", type=int, default=1000, help="requests on the way (%(default)s)")
    given = parser.parse_args()
    good, bad = pickle.loads(given.bodies.read_bytes())  # written by the process that started this one
    good, bad = ([_HEAD % len(one) + one for one in bodies] for bodies in (good, bad))
    count = int(given.rate * given.seconds)
    every = count // given.malformed if given.malformed else 0
    requests = [(good[n % len(good)], True) for n in range(count)]
    for n in range(given.malformed):
        requests.insert((n + 1) * (every + 1) - 1, (bad[n % len(bad)], False))
    load = Load(given.port, given.rate * len(requests) / count, requests)
    cpu, began = time.process_time(), time.perf_counter()
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.install()
    asyncio.run(load.run())
    valid = np.array([one[1] for one in requests])
    found = load.latencies[valid & ~np.isnan(load.latencies)]
    quantiles = {f"p{q:g}_ms": round(1000 * float(np.quantile(found, q / 100)), 2) for q in (50, 90, 99, 99.9)}
    took = time.perf_counter() - began
    given.found.write_text(
        json.dumps(
            {
                **quantiles,
                "max_ms": round(1000 * float(found.max()), 2),
                "seconds": round(took, 1),
                "requests": len(requests),
                "status": dict(load.status),
                "models": dict(load.models),
                "connections": load.num_connections,
                "generator_cores": round((time.process_time() - cpu) / took, 3),
                "kept": load.kept,
            }
        )
    )


if __name__ == "__main__":
    main()
