"""Bytes to batches: raw logs are prepared into dataset directories, which loaders read. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbed.data.dataset import Dataset
    from hotbed.data.embedded import resolve
    from hotbed.data.loader.loader import Loader
    from hotbed.data.schema import Schema

__all__ = ["Dataset", "Loader", "Schema", "resolve"]

_MODULE_OF_NAME = {"Dataset": "dataset", "Loader": "loader", "Schema": "schema", "resolve": "embedded"}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
