"""Which version of an op runs: compiled Numba on the CPU, Triton on CUDA, the torch reference where there is no Triton."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

from torch import Tensor

Backend = Literal["numba", "triton", "reference"]


def backend_of(tensor: Tensor) -> Backend:
    """The version for tensors on this device."""
    if tensor.device.type == "cpu":
        return "numba"
    return "triton" if tensor.device.type == "cuda" and _has_triton() else "reference"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None  # torch for CUDA brings it on Linux, not on Windows
