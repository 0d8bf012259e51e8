"""Launching Triton kernels cheaply.

Triton works out at every launch which compiled form of a kernel fits the arguments: 30 to 60 us of Python for our kernels, as
long as the kernels themselves run. Callers here know that already, and say so with a key: whatever decides the form (types,
alignment, compile-time constants). The first launch under a key goes Triton's way, later ones straight to the compiled
launcher, around the Python object that holds it (4 us), unless the kernel needs scratch memory. Nor do they ask `triton.cdiv`
and `triton.next_power_of_2`, which are written for kernels: 5 us a call on the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs

from hotbed.host.compiling import note_compiled

_DIRECT = tuple(triton.__version__.split(".")[:2]) == ("3", "6")  # whose launcher takes the arguments below


def cdiv(count: int, size: int) -> int:
    """Parts of `size` that hold `count`."""
    return -(-count // size)


def power_of_2(count: int) -> int:
    """The first power of two that is not below `count`, at least 1."""
    return 1 << max(0, count - 1).bit_length()


def _listen() -> None:
    """Speeds leave out what Triton compiles, once on a machine, as they do with Numba."""
    before = knobs.compilation.listener

    def note(**compiled: Any) -> None:
        if not compiled["cache_hit"]:
            note_compiled(compiled["times"].total / 1e6)
        if before is not None:
            before(**compiled)

    knobs.compilation.listener = note


_listen()


class Launch:
    """One kernel. Arguments are given in the order of its signature, compile-time constants among them."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options  # num_warps and the like
        self._compiled: dict[
            Any, tuple[Any, tuple[Any, ...]]
        ] = {}  # by device and key: a launcher, its first arguments

    def __call__(self, grid: tuple[int, ...], key: Any, *arguments: Any, **options: Any) -> None:
        """Run `grid` programs on the current stream. Numbers that change between launches are not specialised on."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        known = self._compiled.get((device, key))
        if known is None:
            compiled = self._kernel[grid](*arguments, **self._options, **options)
            if _DIRECT and compiled is not None:  # None under the interpreter
                self._compiled[device, key] = _launcher_of(compiled)
            return
        launch, fixed = known
        launch(*grid, *(1,) * (3 - len(grid)), torch._C._cuda_getCurrentRawStream(device), *fixed, *arguments)


def _launcher_of(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a compiled kernel, and what it takes between the stream and the kernel's own arguments."""
    python, metadata = compiled.run, (compiled.packed_metadata, None, None, None)
    if python.global_scratch_size or python.profile_scratch_size:
        return python, (compiled.function, *metadata)
    fixed = (compiled.function, python.launch_cooperative_grid, python.launch_pdl, None, None, *metadata)
    return python.launch, fixed
