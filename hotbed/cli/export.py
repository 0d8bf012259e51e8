"""`hotbed export`: a trained model for other systems."""

from __future__ import annotations

from typing import Any

import typer

from hotbed.cli.console import err, out, print_json, progress_bar
from hotbed.cli.options import AsJson, Data, DryRun, Memory, ModelPlace, Out, Overwrite


def export_command(
    run: ModelPlace,
    folder: Out = None,
    onnx: bool = typer.Option(
        True, "--onnx/--no-onnx", help="Write the dense model as model.onnx; needs the packages of the extra onnx."
    ),
    rows: str = typer.Option("safetensors", "--row-format", help="Format of the rows: safetensors, parquet or none."),
    precision: str = typer.Option("fp32", help="Precision of the rows: fp32, fp16, or int8 with a scale for each row."),
    triton: bool = typer.Option(
        False, "--triton", help="Add config.pbtxt and 1/model.py, with which Triton Inference Server serves the folder."
    ),
    data: Data = None,
    memory: Memory = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Export a trained model: its dense part as ONNX, its rows as files, most frequent first, and code that scores with both.

    --out is the folder to write; left out: RUN/export, of a checkpoint RUN/export-STEP. --data says where the dataset of
    the run is, if it has moved: its counts determine the order of the rows. --memory is for the rows of a checkpoint, left
    out half of the free memory; the rest stays on disk, so tables may be larger than memory. The README.md in the
    export says how to score without hotbed.

    [bold]For example:[/bold]

    hotbed export runs/mine

    hotbed export runs/demo --row-format parquet --precision fp16 --out demo-export

    hotbed export runs/demo/checkpoints/000000002000

    hotbed export runs/mine --triton --out models/clicks
    """
    from hotbed.export.write import ExportOptions, check_export, default_folder, export
    from hotbed.files import path_of

    target = folder if folder is not None else default_folder(path_of(run))
    kinds: dict[str, Any] = {"rows": rows, "precision": precision}
    options = ExportOptions(onnx=onnx, data=data, memory=memory, overwrite=overwrite, triton=triton, **kinds)
    if dry_run:
        check_export(run, target, options)
        if as_json:
            print_json({"dry_run": True, "out": str(target), "rows": {}, "orders": {}, "num_bytes": 0})
        else:
            out().print(f"dry run: {run} would be exported to {target}. Nothing was written.")
        return
    with progress_bar("export", "rows") as report:
        done = export(run, target, options, report)
    if as_json:
        figures = {"rows": done.num_rows, "orders": done.orders, "num_bytes": done.num_bytes}
        print_json({"dry_run": False, "out": str(done.folder), **figures})
        return
    by_id = [name for name, order in done.orders.items() if order == "id"]
    if rows != "none" and by_id:
        err().print(
            f"rows of {', '.join(by_id)} are ordered by id, because their counts are in the dataset, which has moved; "
            "--data DATASET says where it is",
        )
    size = f"{sum(done.num_rows.values()):,} rows, " if rows != "none" else ""
    out().print(f"{size}{done.num_bytes / 1e6:,.1f} MB in {done.folder}; README.md there says how to use it")
