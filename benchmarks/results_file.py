"""One CSV row per result, with the hardware and versions it was measured on."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import numba
import torch


def setting() -> dict[str, object]:
    """Where a number comes from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "device": device,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def append_rows(path: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Append rows, with a header when the file is new."""
    rows = [{**row, **setting()} for row in rows]
    if not rows:
        return
    new = not Path(path).exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
