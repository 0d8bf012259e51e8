"""A trained model for other systems: the dense model as ONNX, rows as safetensors or Parquet (docs/export.md).

    hotbed.export.export("runs/demo", "demo-export", hotbed.export.ExportOptions(precision="fp16"))
    hotbed.export.read_export("demo-export").tables["user"].values(positions)

Rows stay on the disk: files are mapped into memory.
"""

from __future__ import annotations

import warnings

from hotbed.export.write import ExportOptions, ExportReport, export
from hotbed.run.export_format import Export, ExportedTable, is_export, read_export

__all__ = ["Export", "ExportOptions", "ExportReport", "ExportedTable", "export", "is_export", "read_export"]

_NEW_NAMES = {"Wanted": "ExportOptions", "Exported": "ExportReport"}  # of 0.1


def __getattr__(name: str) -> object:
    if name not in _NEW_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"hotbed.export.{name} is called {_NEW_NAMES[name]} now.", DeprecationWarning, stacklevel=2)
    return globals()[_NEW_NAMES[name]]
