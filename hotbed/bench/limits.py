"""How near a step comes to the fewest bytes it must move: bytes counted, and this device's own copy speed, measured."""

from __future__ import annotations

import statistics
import time

import torch

from hotbed.bench.setting import Setting

_TRIALS, _COPIES = 5, 10  # ten copies at a time, so that launching them does not show


def step_bytes(setting: Setting, distinct: float) -> float:
    """The fewest bytes of one embedding step through the device's memory.

    Vectors written and their gradients read once; ids read twice; each distinct row read for the look-up, then read and
    written with its optimizer state for the update.
    """
    vectors = 2 * 4 * setting.batch * setting.width
    ids = 2 * 8 * setting.batch * len(setting.rows)
    return vectors + ids + distinct * (4 * setting.dim + 2 * setting.record_bytes)


def copy_speed(device: torch.device) -> float:
    """Bytes per second of a large copy within the device's memory, read and written bytes both counted."""
    size = 1 << (30 if device.type == "cuda" else 27)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(_TRIALS):
        _finish(device)
        start = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        _finish(device)
        times.append((time.perf_counter() - start) / _COPIES)
    return 2 * size / statistics.median(times)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
