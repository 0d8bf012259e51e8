"""uvicorn's protocol with a limit on what comes before a request is known: the time and the bytes of its head.

uvicorn hands a request over once its head is whole, and its parser keeps whatever comes until then: a client that sends a head
without end would take memory without end, and clients that connect and say nothing would take all connections. Limits on bodies
are in app.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hotbed.serve.limits import Limits

_HEAD_BYTES = 64 << 10  # proxies allow 8 to 32 KiB


class HeadLimit(HttpToolsProtocol):
    """One connection; `limited` sets the seconds."""

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
            self._refuse("431 Request Header Fields Too Large", f"the head has more than {_HEAD_BYTES} bytes")

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
            self._refuse("408 Request Timeout", "the head did not arrive in time")
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
