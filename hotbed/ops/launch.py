"""Launching Triton kernels cheaply.

Triton works out at every launch which compiled form of a kernel fits the arguments: 30 to 60 us of Python for our kernels, as
long as the kernels themselves run. Callers here know that already, and say so with a key: whatever decides the form (types,
alignment, compile-time constants). The first launch under a key goes Triton's way, later ones straight to its launcher.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs

from hotbed.host.compiling import note_compiled

_DIRECT = tuple(triton.__version__.split(".")[:2]) == ("3", "6")  # whose launcher takes the arguments below


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
        self._compiled: dict[Any, Any] = {}

    def __call__(self, grid: tuple[int, ...], key: Any, *arguments: Any, **options: Any) -> None:
        """Run `grid` programs on the current stream. Numbers that change between launches are not specialised on."""
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        compiled = self._compiled.get((device, key))
        if compiled is None:
            compiled = self._kernel[grid](*arguments, **self._options, **options)
            if _DIRECT and compiled is not None:  # None under the interpreter
                self._compiled[device, key] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            *grid, *(1,) * (3 - len(grid)), stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )  # fmt: skip
