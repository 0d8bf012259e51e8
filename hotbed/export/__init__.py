"""A trained model for other systems: the dense model as ONNX, rows as safetensors or Parquet (docs/export.md).

    hotbed.export.export("runs/demo", "demo-export", hotbed.export.Wanted(precision="fp16"))
    hotbed.export.read_export("demo-export").tables["user"].values(positions)

Rows stay on the disk: what is opened is mapped.
"""

from __future__ import annotations

from hotbed.export.write import Exported, Wanted, export
from hotbed.run.export_format import Export, ExportedTable, is_export, read_export

__all__ = ["Export", "Exported", "ExportedTable", "Wanted", "export", "is_export", "read_export"]
