"""`hotbed export`: a trained model for other systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hotbed.cli.console import err, out, progress_bar


def export_command(
    run: Path = typer.Argument(..., help="Run folder with a trained model, or one of its checkpoints."),
    folder: Path | None = typer.Option(
        None, "--out", help="Folder to write; RUN/export if not given, of a checkpoint RUN/export-STEP."
    ),
    onnx: bool = typer.Option(
        True, "--onnx/--no-onnx", help="Write the dense model as model.onnx; needs hotbed\\[onnx]."
    ),
    rows: str = typer.Option("safetensors", help="Format of the rows: safetensors, parquet or none."),
    precision: str = typer.Option("fp32", help="Precision of the rows: fp32, fp16, or int8 with a scale for each row."),
    data: str | None = typer.Option(
        None, help="The dataset of the run, if it has moved: its counts determine the order of the rows."
    ),
    memory: str | None = typer.Option(
        None,
        help="Most memory for the rows of a checkpoint, e.g. 4GiB; the rest stays on disk. Left out: half the free memory.",
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing export."),
) -> None:
    """Export a trained model: its dense part as ONNX, its rows as files, most frequent first, and code that scores with both.

    Tables may be larger than memory. The README.md in the export says how to score without hotbed.

    [bold]For example:[/bold]

    hotbed export runs/demo

    hotbed export runs/demo --rows parquet --precision fp16 --out demo-export

    hotbed export runs/demo/checkpoints/000000002000
    """
    from hotbed.export.write import ExportOptions, default_folder, export
    from hotbed.files import path_of

    target = folder if folder is not None else default_folder(path_of(run))
    kinds: dict[str, Any] = {"rows": rows, "precision": precision}
    options = ExportOptions(onnx=onnx, data=data, memory=memory, overwrite=overwrite, **kinds)
    with progress_bar("export", "rows") as report:
        done = export(run, target, options, report)
    by_id = [name for name, order in done.orders.items() if order == "id"]
    if rows != "none" and by_id:
        err().print(
            f"rows of {', '.join(by_id)} are ordered by id, because their counts are in the dataset, which has moved; "
            "--data DATASET says where it is",
            soft_wrap=True,
        )
    size = f"{sum(done.num_rows.values()):,} rows, " if rows != "none" else ""
    out().print(
        f"{size}{done.num_bytes / 1e6:,.1f} MB in {done.folder}; README.md there says how to use it", soft_wrap=True
    )
