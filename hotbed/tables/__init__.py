"""Embedding tables: ids -> vectors, gradients -> updated rows. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbed.tables.module import EmbeddingTables
    from hotbed.tables.spec import Table

__all__ = ["EmbeddingTables", "Table"]

_HOME = {"EmbeddingTables": "hotbed.tables.module", "Table": "hotbed.tables.spec"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
