"""Compiled kernels that several processes save into one folder.

Numba reads the index of a function's kernels, takes the next free number and writes both, without a lock. Two processes that
save kernels of one function for different types at the same moment take the same number, and one type finds the other's code.
"""

from __future__ import annotations

import fcntl
from typing import Any


def save_one_at_a_time() -> None:
    """From now on, in this process and in those that do the same."""
    from numba.core.caching import IndexDataCacheFile  # it reads where its kernels are when it is imported

    save = IndexDataCacheFile.save

    def save_alone(self: Any, key: Any, data: Any) -> None:
        with open(f"{self._index_path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save(self, key, data)

    IndexDataCacheFile.save = save_alone
