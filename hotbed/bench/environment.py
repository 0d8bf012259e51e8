"""Where a number comes from: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import hotbed


def environment(device: torch.device) -> dict[str, object]:
    """Where a number comes from."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": os.cpu_count(),
        "hotbed": hotbed.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "fbgemm": _fbgemm_version(),
        "triton": _version("triton"),
        "numba": _version("numba"),
        "python": platform.python_version(),
        "commit": commit(Path(hotbed.__file__).parent.parent),
    }


def commit(folder: Path) -> str:
    """The commit of a source folder, with `-dirty` where files differ from it; unknown outside its own checkout."""
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
        if Path(top) != folder.resolve():
            return "unknown"
        return _git(folder, "describe", "--always", "--dirty", "--exclude", "*")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _fbgemm_version() -> str:
    loaded = sys.modules.get("fbgemm_gpu")  # copied folders of it have no package metadata
    return str(getattr(loaded, "__version__", "")) if loaded is not None else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
