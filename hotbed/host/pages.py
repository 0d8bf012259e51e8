"""Arrays far larger than what is used of them: address space now, memory page by page when it is first written.

An index whose arrays never move grows without copying them. Linux gives the address space for nothing. Pages of 2 MiB make
finding random ids twice as fast (a page of 4 KiB costs a walk through the page tables for nearly every id), but each is taken
whole: they are for arrays that fill up from the front, and for pieces of several MiB (`renew`).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hotbed.errors import BudgetError
from hotbed.host.memory import in_words

HUGE_PAGE = 1 << 21
_NO_RESERVE = 0x4000  # Linux: address space beyond the memory there is; Python 3.12 has no name for it
_POPULATE_WRITE = 23  # Linux 5.14: MADV_POPULATE_WRITE; Python has no name for it
_HAS_ADVICE = sys.platform == "linux"


class Pages:
    """An array of zeros that takes no memory until it is written."""

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, *, huge: bool = True) -> None:
        count = int(np.prod(shape, dtype=np.int64))
        size = max(count * np.dtype(dtype).itemsize, mmap.PAGESIZE)
        try:
            if sys.platform == "linux":  # private: shared memory, the default, gets no huge pages
                self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            else:
                self._pages = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as error:
            raise BudgetError(
                f"an array of {' x '.join(f'{n:,}' for n in shape)} needs {in_words(size)} of address space, which this "
                f"machine refuses ({error}). Use fewer rows (hashing=True), a smaller dim, or a machine with more memory."
            ) from error
        self.array: NDArray[Any] = np.frombuffer(self._pages, dtype=dtype, count=count).reshape(shape)
        if huge:
            self._advise("MADV_HUGEPAGE", 0, size)

    def renew(self, start: int, size: int) -> None:
        """Give the memory of these bytes back, to have them in huge pages when they are next written."""
        self._advise("MADV_DONTNEED", start, size)
        self._advise("MADV_HUGEPAGE", start, size)

    def _advise(self, advice: str, start: int, size: int) -> None:
        if _HAS_ADVICE and hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without huge pages costs speed, not correctness
                self._pages.madvise(getattr(mmap, advice), start, size)


def zeros(shape: tuple[int, ...], dtype: DTypeLike, *, huge: bool = True) -> NDArray[Any]:
    """Pages, as the array they are."""
    return Pages(shape, dtype, huge=huge).array


def advise_huge(address: int, size: int) -> None:
    """Have memory that was never written in huge pages, where the machine has them; what is left of the last is not."""
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + size - start) // HUGE_PAGE * HUGE_PAGE
    if length > 0 and _HAS_ADVICE:  # advice only: a kernel that refuses it costs speed, not correctness
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def make_pages(array: NDArray[Any]) -> None:
    """Have the memory of an array at once, by one call of the kernel: by the first writes it comes page by page."""
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = array.ctypes.data + array.nbytes - start
    if array.nbytes and _HAS_ADVICE:  # advice only: kernels before 5.14 do not know it, and pages come with the writes
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def in_pages(size: int, page: int = mmap.PAGESIZE) -> int:
    """Bytes in whole pages."""
    return -(-size // page) * page
