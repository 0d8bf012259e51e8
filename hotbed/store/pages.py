"""Arrays far larger than what is used of them: address space now, memory page by page when it is first written."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hotbed.errors import BudgetError
from hotbed.memory import in_words

_NO_RESERVE = 0x4000  # Linux: address space beyond the memory there is; Python 3.12 has no name for it


def zeros(shape: tuple[int, ...], dtype: DTypeLike, *, huge: bool = True) -> NDArray[Any]:
    """Zeros that take no memory until they are written; in huge pages where the system has them, which random reads need."""
    count = int(np.prod(shape, dtype=np.int64))
    size = max(count * np.dtype(dtype).itemsize, mmap.PAGESIZE)
    try:
        if sys.platform == "linux":  # private: shared memory, the default, gets no huge pages
            pages: Any = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        else:
            pages = mmap.mmap(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise BudgetError(
            f"{shape[0]:,} rows of {in_words(size // max(1, shape[0]))} need {in_words(size)} of address space, which this "
            f"machine refuses ({error}). Use fewer rows (hashing=True), a smaller dim, or a machine with more memory."
        ) from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # advice only: a kernel without huge pages costs speed, not correctness
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype=dtype, count=count).reshape(shape)
