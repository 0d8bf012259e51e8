"""For a user's own tests: `assert_cache_invisible` proves law 1 on their tables, their model and their batches.

from hotbed.testing import assert_cache_invisible

def make(**where):
    torch.manual_seed(0)
    tables = hotbed.EmbeddingTables({...}, hotbed.optim.Adam(), **where)
    ...
    return tables, step          # step(batch) trains on a batch and returns its loss

def test_cache():
    assert_cache_invisible(make, batches, cache=0.05)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotbed.verify import Make, TwinStorage, Verdict, verify

__all__ = ["assert_cache_invisible"]


def assert_cache_invisible(make: Make, batches: Sequence[Any], *, evicts: bool = True, **where: Any) -> list[Verdict]:
    """Raise AssertionError at the first bit that differs between plain training and training with `where`.

    Args:
        make: keyword arguments of EmbeddingTables -> (tables, step); the same twin at every call, on any of them.
        batches: what `hotbed.prefetch` can read: a Batch, a tensor of ids, a tuple that starts with them, a mapping.
        evicts: also fail where no row was evicted, because that proves little.
        where: how the rows are kept: cache=, hbm=, memory=, ssd=, policy=.

    Returns:
        What was compared: once with rows loaded on demand, once prefetched.
    """
    if not where:
        raise TypeError("assert_cache_invisible: say how rows are kept, e.g. cache=0.05 or hbm='64MiB'")
    verdicts = []
    for name, ahead in (("on demand", False), ("prefetched", True)):
        verdict = verify(make, batches, TwinStorage(name, where, ahead))
        if verdict.difference is not None:
            raise AssertionError(f"the cache can be seen, rows {name}: {verdict.difference.text()}")
        if evicts and not verdict.evictions:
            raise AssertionError(
                f"rows {name}: all {verdict.rows:,} rows that {verdict.steps} steps used fit in the cache, and none was "
                "evicted, which proves little. Give a smaller cache or more batches, or evicts=False."
            )
        verdicts.append(verdict)
    return verdicts
