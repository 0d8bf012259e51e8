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
    """Append rows to a file, which gets the columns that it has not got yet; a cell that nobody filled is empty."""
    rows = [{**row, **setting()} for row in rows]
    if not rows:
        return
    file = Path(path)
    known: list[dict[str, object]] = []
    columns: list[str] = []
    if file.exists():
        with file.open(newline="") as lines:
            reader = csv.DictReader(lines)
            known = [dict(row) for row in reader]
            columns = list(reader.fieldnames or ())
    columns += [name for name in rows[0] if name not in columns]
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, fieldnames=columns, restval="")
        writer.writeheader()
        writer.writerows([*known, *rows])
