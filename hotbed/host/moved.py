"""Modules that stood elsewhere in 0.1 and are named in its documentation: the old name works, with a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "hotbed.clock": "hotbed.telemetry.clock",
    "hotbed.memory": "hotbed.host.memory",
    "hotbed.plan": "hotbed.forecast",
    "hotbed.plan.network": "hotbed.forecast.network",
    "hotbed.plan.optimum": "hotbed.forecast.optimum",
    "hotbed.plan.replay": "hotbed.forecast.replay",
    "hotbed.plan.simulate": "hotbed.forecast.replay",
    "hotbed.plan.trace": "hotbed.forecast.trace",
}


class _OldNames(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} has moved; import {new} instead.", DeprecationWarning, stacklevel=2)
        found = import_module(new)
        module.__getattr__ = lambda name: getattr(found, name)  # type: ignore[method-assign]


def keep_old_names() -> None:
    """From now on they can be imported."""
    sys.meta_path.append(_OldNames())
