"""The virtual cluster: refused where it cannot be made, removed however its process ends, and one point of each kind."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import __main__ as command
from benchmarks.cluster import nodes
from benchmarks.cluster.points import RATES, SHAPES, WAYS, Point, points_of

ROOT = Path(__file__).parents[2]
REASON = nodes.missing()
needs_nodes = pytest.mark.skipif(REASON is not None, reason=f"no virtual cluster: {REASON}")
HOLD = """
import signal, sys
from benchmarks.cluster.nodes import VirtualCluster, stop_on_signals
stop_on_signals()
with VirtualCluster(2) as cluster:
    cluster.set_rate(1.0)
    cluster.start(1, ["sleep", "600"], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, None)
    print(cluster._remover.pid, *cluster.nodes, cluster.switch, flush=True)
    signal.pause()
"""


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()


@needs_nodes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind(number):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as holder:
        remover, *names = holder.stdout.readline().split()
        assert set(names) <= set(namespaces())
        inside, deadline = "", time.monotonic() + 60
        while not inside and time.monotonic() < deadline:  # until what runs in the node has entered it
            inside = subprocess.run(
                ["ip", "netns", "pids", names[1]], capture_output=True, text=True, check=True
            ).stdout
        handles = [os.pidfd_open(int(process)) for process in (remover, *inside.split())]
        holder.send_signal(number)
        holder.wait(60)
    assert len(handles) == 2, inside
    for handle in handles:  # the remover, and what ran in a node, end
        assert select.select([handle], [], [], 60)[0], names
        os.close(handle)
    assert not set(names) & set(namespaces())


@needs_nodes
def test_two_nodes_train_in_every_way(tmp_path, monkeypatch, capsys):
    """The smallest form of the command: two ranks in two nodes, sharded and k-step, one block each."""
    out = tmp_path / "cluster.csv"
    words = (
        f"cluster --shapes 2x1 --rates 1 --ways sharded,replicated,k-step --blocks 1 --steps 1 --limit 240 --out {out}"
    )
    monkeypatch.setattr(sys, "argv", words.split())
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        command.main()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before):
            signal.signal(number, handler)
    rows = {row["way"]: row for row in command.read_rows(out)}
    assert list(rows) == ["sharded", "replicated", "k-step"]
    assert all(float(row["ms_p50"]) > 0 and row["gbit"] == "1" for row in rows.values())
    dense = 4 * int(rows["sharded"]["dense_weights"])  # of each of two ranks, to the other
    assert dense < int(rows["sharded"]["across"]) < 1.2 * dense
    assert int(rows["k-step"]["across"]) < 0.25 * dense
    assert not [name for name in namespaces() if name.startswith(f"hotbed-{os.getpid()}-")]
    capsys.readouterr()
    monkeypatch.setattr(command, "measure", pytest.fail)  # all points are on file
    command.main()
    command.check_bars(command.read_rows(out))
    assert re.search(r"2 x 1 at 1 Gbit/s: k=1 [\d.]+ ms, k=16 [\d.]+ ms", capsys.readouterr().out)


def test_refused_without_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "platform", "linux")
    assert "need root; this is user 1000" in nodes.missing()
    monkeypatch.setattr(sys, "argv", ["cluster", "--shapes", "2x1"])
    with pytest.raises(SystemExit, match="no virtual cluster here: network namespaces need root"):
        command.main()


def test_refused_without_linux_or_tools(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "this is darwin" in nodes.missing()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", "")
    assert "ip and tc not found" in nodes.missing()


def test_a_failed_node_is_reported(tmp_path):
    (tmp_path / "log-0").write_text("all is well")
    (tmp_path / "log-1").write_text("the reason")
    with subprocess.Popen(["sleep", "600"]) as running, subprocess.Popen(["false"]) as failed:
        failed.wait()
        try:
            with pytest.raises(SystemExit, match=r"node 1 failed:\nthe reason"):
                command._wait([running, failed], str(tmp_path), limit=60)
            with pytest.raises(SystemExit, match="node 0 did not end within 0 s"):
                command._wait([running], str(tmp_path), limit=0)
        finally:
            running.kill()


def test_points_differ():
    """A single node has no links; hops and k-step across nodes differ only where both axes have several ranks."""
    assert points_of(1, 1) == [Point(1, 1, 0.0, WAYS[0])]
    assert {point.way.name for point in points_of(4, 1)} == {way.name for way in WAYS[:5]}
    assert len(points_of(2, 2)) == len(RATES) * len(WAYS)
    points = [point for shape in SHAPES for point in points_of(*shape)]
    assert len({point.key for point in points}) == len(points)
    assert {nodes * local for nodes, local in SHAPES} == {1, 2, 4, 8}
