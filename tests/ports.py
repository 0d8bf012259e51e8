"""A port of this machine for a server that starts later, or for nobody.

The system hands out ports from a range of its own, to whoever asks for any and to every connection. One from there, free now,
may be another process's a second later, when the server has started. So these are from below that range.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """One that nobody listens at, another one for every caller."""
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 0
    draw = random.SystemRandom()
    for _ in range(100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", draw.randrange(_LOWEST, first) if first > _LOWEST else 0))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise AssertionError("a hundred ports are all taken")
