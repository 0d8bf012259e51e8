"""The device that a name stands for."""

from __future__ import annotations

import os

import torch

from hotbed.errors import ConfigError


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
            raise ConfigError(
                f"the device {device} was asked for, but torch {torch.__version__} finds {have}. Use cpu."
            )
    return device


def _local_rank() -> int:
    """Which of the devices of this machine is this process's."""
    return int(os.environ.get("LOCAL_RANK", "0")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 0
