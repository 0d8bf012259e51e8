"""The device that a name stands for, and page-locked memory, which is never allocated while a CUDA graph is recorded.

torch's allocator of such memory inspects graphs that are being recorded, also those of other threads: on an H200 one request
of a reader thread among some thousands failed with "invalid argument". So allocation and recording exclude each other. Memory
that users' loaders pin in threads of their own is not covered: there is no way to stop them.
"""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor

from hotbed.errors import ConfigError

RECORDING = threading.RLock()  # held while a graph is recorded


def pick_device(name: str) -> torch.device:
    """The device of a name; auto is CUDA when there is one, and of several the one that torchrun gives this process."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:  # cuda:999, a number that torch cannot hold
        raise ConfigError(f"there is no device {name}. Use cpu, cuda or cuda:N.") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = device if ":" in name else torch.device("cuda", _local_rank())
        if device.index >= count:
            have = f"{count} CUDA device{'s' * (count != 1)}" if count else "no CUDA device"
            raise ConfigError(f"there is no device {device}: torch {torch.__version__} finds {have}. Use cpu.")
    return device


def use_device(name: str) -> torch.device:
    """`pick_device`, as the current device from now on: kernels are launched there, wherever their tensors are."""
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def check_current(device: torch.device) -> None:
    """A ConfigError for a CUDA device that is not the current one of this thread."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ConfigError(
            f"the tables are on {device}, and kernels are launched on the current device, cuda:{torch.cuda.current_device()}. "
            f"Call torch.cuda.set_device({device.index}) before, or `with torch.cuda.device({device.index}):` around it."
        )


def _local_rank() -> int:
    """Which of the devices of this machine is this process's."""
    return int(os.environ.get("LOCAL_RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype, *, pins: bool = True) -> Tensor:
    """A tensor of any contents, page-locked if it `pins`."""
    with RECORDING:
        return torch.empty(shape, dtype=dtype, pin_memory=pins, device="cpu")


def mapped_empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Int64 memory of the host that kernels of a device read and write; on a CPU any memory.

    torch sees no use of it by kernels, and would give it out again while they still run. It does see copies: one, here, and the
    memory is not given out again before all that the current stream has to do when it is dropped.
    """
    if device.type != "cuda":
        return torch.empty(shape, dtype=torch.int64, device="cpu")
    memory = pinned_empty(shape, torch.int64)
    memory.view(-1)[:1].to(device, non_blocking=True)
    return memory


def pinned(tensor: Tensor) -> Tensor:
    """A page-locked copy of a tensor on the host."""
    with RECORDING:
        return tensor.pin_memory()


def with_spare(num_rows: int, most: int | None) -> int:
    """Rows of a buffer that has to hold this many: a quarter more, so that it seldom grows, up to `most`."""
    assert most is None or num_rows <= most, f"{num_rows} rows are on their way, and {most} are allowed"
    spare = num_rows + num_rows // 4
    return spare if most is None else min(spare, most)
