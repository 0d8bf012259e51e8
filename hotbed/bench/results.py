"""One measurement as a CSV row: setting, figures, hardware, versions and commit."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch

import hotbed
from hotbed.bench.setting import Setting
from hotbed.bench.systems import OURS
from hotbed.bench.timing import COUNTED, Timing
from hotbed.cache import DEFAULT_POLICY
from hotbed.errors import ConfigError


class Result(NamedTuple):
    """A system, timed at a setting."""

    system: str
    rule: str
    setting: Setting
    timing: Timing
    peak_bytes: int  # on the device, in addition to what all systems share: ids, gradient or MLP
    step_bytes: float  # the fewest a step of the embedding must move
    copy_speed: float  # bytes per second, this device's limit
    baseline: str = ""  # the system that `ratio` is relative to
    ratio: float | None = None  # of the medians; below 1 is faster than the baseline

    @property
    def ms(self) -> float:
        """Median milliseconds of a step."""
        return self.timing.quantile(5)

    @property
    def samples_per_s(self) -> float:
        return self.setting.batch / self.ms * 1e3

    @property
    def bytes_per_s(self) -> float | None:
        """Needed bytes divided by time; None with an MLP, whose time is included."""
        return None if self.setting.dense else self.step_bytes / self.ms * 1e3

    def row(self) -> dict[str, object]:
        """Names and values of a CSV row, without the environment."""
        one, timing = self.setting, self.timing
        counts = timing.counts_per_step
        per_s = self.bytes_per_s
        return {
            "benchmark": "training_step" if one.dense else "embedding_step",
            "system": self.system,
            "optimizer": one.optimizer,
            "rule": self.rule,
            "dim": one.dim,
            "batch": one.batch,
            "dense": one.dense,
            "ids": one.ids,
            "ids_per_sample": one.ids_per_sample,
            "zipf": one.zipf,
            "table_rows": sum(one.rows),
            **_cache_columns(self.system, one),
            "steps": one.steps,
            "warmup": one.warmup,
            "ms_p20": _rounded(timing.quantile(2), 4),
            "ms_p50": _rounded(self.ms, 4),
            "ms_p80": _rounded(timing.quantile(8), 4),
            "ms_mean": _rounded(timing.ms_mean, 4),
            "gpu_ms": _rounded(timing.gpu_ms, 4),
            "samples_per_s": round(self.samples_per_s),
            "baseline": self.baseline,
            "ratio": _rounded(self.ratio, 3),
            "peak_gib": _rounded(self.peak_bytes / 2**30 if one.device.type == "cuda" else None, 3),
            "step_mb": _rounded(self.step_bytes / 1e6, 1),
            "gb_per_s": _rounded(None if per_s is None else per_s / 1e9, 1),
            "copy_gb_per_s": _rounded(self.copy_speed / 1e9, 1),
            "share_of_copy": _rounded(None if per_s is None else per_s / self.copy_speed, 3),
            **{f"{name}_per_step": _rounded(counts.get(name), 3) for name in COUNTED},
            "stall_share": _rounded(timing.stall_share, 4),
            "memory_share": _rounded(timing.memory_share, 4),
            "ahead_share": _rounded(timing.ahead_share, 4),
        }


def columns(setting: Setting) -> list[str]:
    """The columns that every result's row has."""
    return list(Result("", "", setting, Timing([1.0], {}, None), 0, 0.0, 1.0).row())


def _cache_columns(system: str, setting: Setting) -> dict[str, object]:
    ours = system in OURS
    cached = system not in ("torch", "hotbed-hbm", "fbgemm-hbm", "fbgemm-cpu")
    return {
        "output": setting.output if ours else "",
        "ranks": setting.ranks if ours else "",
        "cache": setting.cache if cached else "",
        "memory": ("" if setting.ssd is None else setting.ssd) if ours and cached else "",
        "policy": (setting.policy or DEFAULT_POLICY) if ours and cached else "",
        "window": (setting.window or "auto") if ours and cached else "",
        "look_ahead": (setting.look_ahead or "auto") if ours and cached else "",
        "cold": setting.cold if ours and cached else "",
    }


def _rounded(value: float | None, digits: int) -> float | str:
    return "" if value is None else round(value, digits)


class CsvFile:
    """Appends rows one by one, so that an interrupted run keeps its measurements."""

    def __init__(self, path: Path, columns: Iterable[str]) -> None:
        self._path, self._columns = path, list(columns)
        if path.exists() and path.stat().st_size:
            with path.open(newline="") as file:
                present = next(csv.reader(file), [])
            if present != self._columns:
                raise ConfigError(f"{path} has other columns than this version writes; name another file with --csv")
        else:
            self._append(dict(zip(self._columns, self._columns)))

    def add(self, row: Mapping[str, object]) -> None:
        """One more measurement."""
        self._append(row)

    def _append(self, row: Mapping[str, object]) -> None:
        try:
            with self._path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, lineterminator="\n").writerow(row)
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror}; name another file with --csv") from None


def environment(device: torch.device) -> dict[str, object]:
    """The environment of a measurement."""
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
