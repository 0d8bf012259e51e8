"""A trained model for other systems: the dense model as ONNX, rows as safetensors or Parquet (docs/export.md)."""

from __future__ import annotations

from hotbed.export.format import Export, ExportedTable, is_export, read_export

__all__ = ["Export", "ExportedTable", "is_export", "read_export"]
