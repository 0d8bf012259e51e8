"""Modules that stood elsewhere in 0.1 and that others import: the old name is the same module, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "hotbed.cache.lane": "hotbed.cache.recorded_planner",
    "hotbed.cached_group": "hotbed.tables.group.cached",
    "hotbed.clock": "hotbed.telemetry.clock",
    "hotbed.group": "hotbed.tables.group.group",
    "hotbed.memory": "hotbed.host.memory",
    "hotbed.ops.index.lane": "hotbed.ops.index.recorded",
    "hotbed.pipeline.lanes": "hotbed.pipeline.recorded",
    "hotbed.plan": "hotbed.forecast",
    "hotbed.plan.network": "hotbed.forecast.network",
    "hotbed.plan.optimum": "hotbed.forecast.optimum",
    "hotbed.plan.replay": "hotbed.forecast.replay",
    "hotbed.plan.simulate": "hotbed.forecast.replay",
    "hotbed.plan.trace": "hotbed.forecast.trace",
    "hotbed.train.files": "hotbed.run.files",
    "hotbed.train.layouts": "hotbed.checkpoint.layouts",
    "hotbed.train.run_folder": "hotbed.run.folder",
}


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
