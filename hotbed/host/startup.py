"""What `import hotbed` sets up: a place for compiled kernels, and modules under the names they had in 0.1.

Numba keeps kernels next to the sources, else in the user's cache, else it refuses to import them. A container with a read-only
file system and a user without a home has neither: there they go to a temporary directory and are compiled in each process.

A module that others import by its old name is the same module, with a DeprecationWarning.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

MOVED = {
    "hotbed.cache.lane": "hotbed.cache.recorded_planner",
    "hotbed.cached_group": "hotbed.tables.group.cached",
    "hotbed.clock": "hotbed.telemetry.clock",
    "hotbed.group": "hotbed.tables.group.group",
    "hotbed.memory": "hotbed.host.memory",
    "hotbed.ops.index.lane": "hotbed.ops.index.recorded",
    "hotbed.ops.threads": "hotbed.host.pool",
    "hotbed.pipeline.lanes": "hotbed.pipeline.recorded",
    "hotbed.plan": "hotbed.forecast",
    "hotbed.plan.network": "hotbed.forecast.network",
    "hotbed.plan.optimum": "hotbed.forecast.optimum",
    "hotbed.plan.replay": "hotbed.forecast.replay",
    "hotbed.plan.simulate": "hotbed.forecast.replay",
    "hotbed.plan.trace": "hotbed.forecast.trace",
    "hotbed.train.files": "hotbed.run.folder",
    "hotbed.train.layouts": "hotbed.checkpoint.layouts",
    "hotbed.train.rank_saver": "hotbed.train.ranks",
    "hotbed.train.run_folder": "hotbed.run.folder",
}
VARIABLE = "NUMBA_CACHE_DIR"


def find_kernel_cache(package: Path) -> None:
    """Name a directory for Numba, before it is imported, if it would find none by itself."""
    if os.environ.get(VARIABLE) or "numba" in sys.modules:
        return
    if _is_writable(package / "__pycache__") or _is_writable(_user_cache()):
        return
    directory = tempfile.mkdtemp(prefix="hotbed-kernels-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ[VARIABLE] = directory


def _user_cache() -> Path:
    """The directory that Numba takes (it follows appdirs)."""
    if sys.platform == "darwin":
        return Path(os.path.expanduser("~/Library/Caches/numba"))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "numba"


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


class _OldNames(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} has moved; import {new} instead.", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


def keep_old_names() -> None:
    """From now on they can be imported."""
    sys.meta_path.insert(0, _OldNames())  # before the one that would find a file in the new package by its old name
