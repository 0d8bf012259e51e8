"""Small versions of the claims that a CPU can check: `python -m benchmarks.papers --quick`.

Each function runs in seconds, returns what it found, and raises AssertionError if the claim does not hold. The tests run those
that need neither other processes nor root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hotbed
from benchmarks.cluster.__main__ import measure
from benchmarks.cluster.nodes import missing
from benchmarks.cluster.points import DENSE_WEIGHTS, WAYS, Point
from benchmarks.workload import batches
from hotbed.forecast.network import Cluster, Group, dense, plain, replicated, sharded, zipf
from hotbed.forecast.replay import simulate
from hotbed.forecast.trace import hottest_of, trace_of
from hotbed.optim import Adagrad

ROWS, DIM, BATCH = (20_000, 3_000, 200), 8, 256
Check = Callable[[], str]


def losses_of(
    count: int, *, ahead: bool = False, rows: tuple[int, ...] = ROWS, **budgets: object
) -> tuple[list[float], hotbed.EmbeddingTables]:
    """Losses of `count` steps on Zipf ids, and the tables."""
    tables = hotbed.EmbeddingTables(
        {f"C{i}": hotbed.Table(n, DIM) for i, n in enumerate(rows)}, Adagrad(lr=0.1), **budgets
    )
    found = []
    given = batches(rows, BATCH, count, seed=1)
    for ids in hotbed.prefetch(given, tables) if ahead else given:
        vectors = tables(ids)
        assert isinstance(vectors, Tensor)
        loss = (vectors.sum(2).tanh() - 0.5).square().mean()
        loss.backward()
        found.append(loss.item())
    return found, tables


def cache_is_invisible() -> str:
    steps = 60
    whole, _ = losses_of(steps)
    for share in (0.05, 0.2):
        for ahead in (False, True):
            found, tables = losses_of(steps, cache=share, ahead=ahead)
            assert found == whole, f"a cache of {share} of the rows changes the losses"
            assert tables.counters().misses > 0
    return f"losses of {steps} steps with 5 % and 20 % of the rows cached are those of whole tables to the bit"


def hits_by_share() -> str:
    rates = {}
    for share in (0.05, 0.1, 0.3):
        counts = losses_of(60, cache=share)[1].counters()
        rates[share] = 1 - counts.missed_lookups / counts.lookups
    assert rates[0.05] < rates[0.1] < rates[0.3], rates
    return "lookups that hit: " + ", ".join(
        f"{100 * share:.0f} % cached: {100 * rate:.1f} %" for share, rate in rates.items()
    )


def policies() -> str:
    misses = {}
    for policy in ("oracle", "lfu", "lru"):
        misses[policy] = losses_of(120, cache=0.05, ahead=True, policy=policy)[1].counters().misses
    assert misses["oracle"] < misses["lfu"] < misses["lru"], misses
    return "misses: " + ", ".join(f"{policy} {count:,}" for policy, count in misses.items())


def warm_up() -> str:
    """Rows of another draw of the same ids fill the cache: yesterday's counts."""
    bases = torch.tensor([0, *accumulate(ROWS)][:-1])
    yesterday, today = (
        trace_of([(ids + bases).numpy().ravel() for ids in batches(ROWS, BATCH, count, seed=seed)], sum(ROWS))
        for seed, count in ((2, 400), (1, 30))
    )
    slots, found = sum(ROWS) // 20, []
    hot = hottest_of(yesterday, slots)
    for policy in ("lru", "lfu"):
        cold = simulate(today, slots, policy).misses
        warm = simulate(today, slots, policy, hot=hot).misses - hot.keys.size
        assert warm < cold, (policy, warm, cold)
        found.append(f"{policy} {warm:,} instead of {cold:,}")
    return "misses of the first 30 batches with the cache filled: " + ", ".join(found)


def metadata_follows_the_cache() -> str:
    sizes = (50_000, 500_000)
    slots = [losses_of(1, rows=(rows,), hbm="1MiB")[1].groups[0].num_slots for rows in sizes]
    assert slots[0] == slots[1], slots
    return f"a budget of 1 MiB holds {slots[0]:,} rows of a table of {sizes[0]:,} and of one of {sizes[1]:,}"


def three_tiers() -> str:
    steps = 100
    whole, _ = losses_of(steps)
    with tempfile.TemporaryDirectory() as folder:
        found, tables = losses_of(steps, cache=0.05, memory="700KiB", ssd=f"{folder}:64MiB")
        store = tables.groups[0].residency.store  # type: ignore[attr-defined]
        counts = store.counts
        del tables
    assert found == whole, "rows that went to disk and back changed the losses"
    assert counts.from_ssd > 0, counts
    return (
        f"device, memory and ssd: the losses of whole tables to the bit, {counts.from_ssd:,} rows came back from disk"
    )


def shares_over_time() -> str:
    found = []
    for share in (0.05, 0.3, None):
        start = time.perf_counter()
        losses_of(60, **({} if share is None else {"cache": share}))
        found.append((share, time.perf_counter() - start))
    whole = found[-1][1]
    return "time over that of whole tables: " + ", ".join(
        f"{100 * (share or 1):.0f} % cached: {s / whole:.2f}" for share, s in found[:-1]
    )


def duplicates() -> str:
    group = Group([zipf(rows, 1.05) for rows in ROWS], 16)
    ours, theirs = sharded(Cluster(1, 4), [group], 4096).total, plain(Cluster(1, 4), [group], 4096).total
    assert ours.total < 0.5 * theirs.total
    return f"bytes of distinct rows, of one vector per lookup: {ours.total / theirs.total:.2f}"


def union_bytes() -> str:
    group = Group([zipf(rows, 1.05) for rows in ROWS], 16)
    ratios = []
    for ranks in (2, 8):
        both = [way(Cluster(1, ranks), [group], 1024).total.total for way in (replicated, sharded)]
        ratios.append(both[0] / both[1])
    assert 1 < ratios[0] < ratios[1], ratios
    return f"replicated over sharded bytes: {ratios[0]:.1f} with 2 ranks, {ratios[1]:.1f} with 8"


def kstep_bytes() -> str:
    sent = {k: dense(Cluster(4, 1), DENSE_WEIGHTS, k, parts=1 if k == 1 else 2).across for k in (1, 16, 64)}
    assert sent[1] == 8 * sent[16] == 32 * sent[64]
    return f"dense bytes of a step: {sent[1]:,.0f}, with k = 16 {sent[16]:,.0f}, with k = 64 {sent[64]:,.0f} (weights and v)"


def local_adam_diverges() -> str:
    """Three ranks: one pulls a weight to zero by 4, two push it away by 1; the mean has its minimum at zero."""
    force = np.array([4.0, -1.0, -1.0])
    ends = []
    for frozen in (False, True):
        x, m, v, shared = np.full(3, 2.0), np.zeros(3), np.zeros(3), 0.0
        for step in range(1, 1201):
            gradient = force * np.clip(x, -1, 1)
            synchronous = frozen and step <= 8
            if synchronous:
                gradient = np.full(3, gradient.mean())
            m = 0.9 * m + 0.1 * gradient
            v = 0.999 * v + 0.001 * (force * np.clip(x, -1, 1)) ** 2
            below = np.full(3, shared) if frozen and not synchronous else v / (1 - 0.999**step)
            x = x - 0.01 * m / (1 - 0.9**step) / (np.sqrt(below) + 1e-8)
            if step % 8 == 0:
                x = np.full(3, x.mean())
                shared = float((v / (1 - 0.999**step)).mean())
        ends.append(float(x[0]))
    assert ends[0] > 5, ends
    assert abs(ends[1]) < 0.1, ends
    return f"from 2, minimum at 0: local Adam ends at {ends[0]:.1f}, with one frozen second moment at {ends[1]:.3f}"


def wide_ids() -> str:
    tables = hotbed.EmbeddingTables({"id": hotbed.Table(None, DIM)}, Adagrad(lr=0.1), hbm="1MiB")
    ids = torch.tensor([[1], [2**40], [2**62], [-(2**62)]])
    first = tables(ids)
    assert isinstance(first, Tensor)
    first.sum().backward()
    again = tables(ids)
    assert isinstance(again, Tensor)
    assert again.unique(dim=0).shape[0] == 4
    return "ids of 64 bits have rows of their own"


def kstep_auc() -> str:
    """Two ranks on the embedded Adult data, through `hotbed train`."""
    found = {}
    for k in (1, 16):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "hotbed",
            ]
            command += [
                "train",
                "--data",
                "adult",
                "--k-step",
                str(k),
                "--seed",
                "0",
                "--out",
                f"{folder}/run",
                "--quiet",
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "HOTBED_LOG": "quiet"})
            found[k] = json.loads(Path(folder, "run", "summary.json").read_text())["final"]["test"]["auc"]
    assert abs(found[1] - found[16]) < 0.005, found
    return f"Adult, 2 ranks: AUC {found[1]:.4f}, with k = 16 {found[16]:.4f}"


def kstep_time() -> str:
    """Two virtual nodes at 0.1 Gbit/s."""
    ways = [way for way in WAYS if way.name in ("sharded", "k-step")]
    rows = list(measure([Point(2, 1, 0.1, way) for way in ways], blocks=2, steps=4, limit=240))
    times = [float(str(row["ms_p50"])) for row in rows]
    assert times[0] > 2 * times[1], times
    return f"2 nodes at 0.1 Gbit/s: {times[0]:.0f} ms a step, with k = 16 {times[1]:.0f}"


ALONE: dict[str, Check] = {
    "cache_is_invisible": cache_is_invisible,
    "hits_by_share": hits_by_share,
    "policies": policies,
    "warm_up": warm_up,
    "metadata_follows_the_cache": metadata_follows_the_cache,
    "three_tiers": three_tiers,
    "shares_over_time": shares_over_time,
    "duplicates": duplicates,
    "union_bytes": union_bytes,
    "kstep_bytes": kstep_bytes,
    "local_adam_diverges": local_adam_diverges,
    "wide_ids": wide_ids,
}
WITH_PROCESSES: dict[str, Check] = {"kstep_auc": kstep_auc}
WITH_ROOT: dict[str, Check] = {"kstep_time": kstep_time}


def checks() -> dict[str, Check]:
    """Those that run here."""
    return ALONE | WITH_PROCESSES | ({} if missing() else WITH_ROOT)
