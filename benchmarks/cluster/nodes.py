"""Virtual nodes on one machine: network namespaces joined by a bridge, with a rate on every link.

    with VirtualCluster(4) as cluster:
        cluster.set_rate(1.0)  # Gbit/s, each way
        process = cluster.start(0, ["python", "-m", "..."])

Every node is a Linux network namespace with one interface, `eth0`, whose other end is a port of a bridge in a namespace of its
own, so nothing appears in the host's own network. `tc tbf` limits both directions of every link. Processes in a node share
the memory, files and cores of the machine; only their network is separate. Root and the tools `ip` and `tc` are required.

The namespaces are removed by a second process, which waits for the end of a pipe. The pipe ends with this process, however it
ends: at the end of the `with` block, by an exception, Ctrl-C or SIGKILL. Whatever still runs in a namespace is killed first.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any

_SUBNET = "10.213.0"
_TICK = 1e-3  # seconds of the rate that may leave at once
_LEAST_BURST = 16 << 10  # bytes; tc refuses less than a packet
_QUEUE = 64 << 20  # bytes that wait for the wire: no packet is dropped, TCP's own buffers are smaller
_REMOVE = """
trap '' INT TERM HUP
cat > /dev/null
for node in "$@"; do ip netns pids "$node" 2> /dev/null | xargs -r kill -9 2> /dev/null; done
for node in "$@"; do ip netns delete "$node" 2> /dev/null; done
exit 0
"""


class NoNamespacesError(RuntimeError):
    """This machine cannot make virtual nodes; the message says why."""


def missing() -> str | None:
    """Why virtual nodes cannot be made here, or None."""
    if sys.platform != "linux":
        return f"network namespaces are a feature of Linux; this is {sys.platform}"
    if os.geteuid() != 0:
        return (
            f"network namespaces need root; this is user {os.geteuid()}. Run it as root, or in a container of your own"
        )
    tools = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if tools:
        return f"{' and '.join(tools)} not found; install iproute2"
    probe = f"hotbed-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "-n", probe, "link", "add", "near", "type", "veth", "peer", "name", "far")
        _run("tc", "-n", probe, "qdisc", "add", "dev", "near", "root", *_tbf(1.0))
    except NoNamespacesError as error:
        return f"the kernel refuses: {error}. A container needs --privileged"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return None


class VirtualCluster:
    """`num_nodes` namespaces, their bridge, and the processes in them."""

    def __init__(self, num_nodes: int) -> None:
        name = f"hotbed-{os.getpid()}"
        self.nodes = [f"{name}-{number}" for number in range(num_nodes)]
        self.switch = f"{name}-switch"
        self.addresses = [f"{_SUBNET}.{number + 1}" for number in range(num_nodes)]
        self._remover: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> VirtualCluster:
        # A session of its own: Ctrl-C in the terminal does not reach it.
        command = ["sh", "-c", _REMOVE, "sh", *self.nodes, self.switch]
        self._remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in the nodes and remove them."""
        if self._remover is not None:
            assert self._remover.stdin is not None
            self._remover.stdin.close()
            self._remover.wait()
            self._remover = None
        for process in self._processes:
            process.wait()

    def set_rate(self, gigabits: float) -> None:
        """Limit every link to `gigabits` Gbit/s each way."""
        set_rate(self.switch, self.nodes, gigabits)

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str], output: IO[Any] | int
    ) -> subprocess.Popen[bytes]:
        """Start a command in a node; stdout and stderr go to `output`."""
        whole = ["ip", "netns", "exec", self.nodes[node], *command]
        process = subprocess.Popen(
            whole, env=dict(env), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._processes.append(process)
        return process

    def _make(self) -> None:
        for name in (self.switch, *self.nodes):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for port, (node, address) in enumerate(zip(self.nodes, self.addresses)):
            _run(
                *("ip", "-n", self.switch, "link", "add", f"port{port}"),
                *("type", "veth", "peer", "name", "eth0", "netns", node),
            )
            _run("ip", "-n", self.switch, "link", "set", f"port{port}", "master", "bridge", "up")
            _run("ip", "-n", node, "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _run("ip", "-n", node, "link", "set", interface, "up")


def set_rate(switch: str, nodes: Sequence[str], gigabits: float) -> None:
    """Limit both ends of every link; any process of the machine may call it."""
    for port, node in enumerate(nodes):
        _run("tc", "-n", node, "qdisc", "replace", "dev", "eth0", "root", *_tbf(gigabits))
        _run("tc", "-n", switch, "qdisc", "replace", "dev", f"port{port}", "root", *_tbf(gigabits))


def stop_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as Ctrl-C does: `with` blocks are left. One that is ignored (nohup) stays so."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def _tbf(gigabits: float) -> list[str]:
    burst = max(_LEAST_BURST, round(gigabits * 1e9 / 8 * _TICK))
    return ["tbf", "rate", f"{round(gigabits * 1e9)}bit", "burst", str(burst), "limit", str(_QUEUE)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNamespacesError(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")
