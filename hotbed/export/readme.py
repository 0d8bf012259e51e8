"""The content of an export in, its README.md out: for a reader who has nothing but the folder."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from hotbed.data.encode import raw_column
from hotbed.data.schema import IdFeature, Schema, clock_of
from hotbed.models import shown_name

_BOUNDS = {
    "fp32": "float32, as they were trained.",
    "fp16": "float16, rounded to nearest: off by |w| / 2048 at most (3e-8 where |w| is below 6.2e-5).",
    "int8": "int8 with a float32 `scale` for each row; a number is `scale * weight`, off by max |w| / 254 of its row.",
}
_MODES = {
    "vocabulary": "row number of its vocabulary",
    "hash": "64-bit id, taken modulo the rows",
    "direct": "row number",
    "raw": "64-bit id",
}
_SOURCES = {
    "string": "text, whose 64-bit id is `text_id(text)`",
    "integer": "a whole number, which is its id",
    "bucket": "a number, whose id is `bucket_id(number)`",
    "hour": "a time (UTC), whose hour is its id",
    "weekday": "a time (UTC), whose weekday is its id (0 is Monday)",
}


def readme(schema: Schema, card: dict[str, Any], about: dict[str, Any]) -> str:
    """The text of README.md."""
    parts = [_head(schema, card, about), _files(about)]
    if about["row_format"] != "none":
        parts += [_rows(schema, about)]
        parts += [_score(schema, about)] if about["onnx"] else []
    parts.append(_inputs(schema))
    return "\n".join(parts)


def _head(schema: Schema, card: dict[str, Any], about: dict[str, Any]) -> str:
    source = about["source"]
    came = "the model of a run" if source["kind"] == "model" else f"a checkpoint of step {source['step']:,}"
    num_rows = sum(one["num_rows"] for one in about["tables"].values())
    return f"""# A trained {shown_name(card["model"]["name"])} model

Exported from {came} by hotbed: {len(schema.features)} id features, {len(schema.dense)} dense features, {num_rows:,} rows.
It scores one sample as the probability of `{schema.label}`.
"""


def _files(about: dict[str, Any]) -> str:
    lines = ["## Files", ""]
    if about["onnx"]:
        inputs = ", ".join(f"`{name}` {shape}" for name, shape in about["onnx"]["inputs"].items()).replace("'", "")
        lines.append(
            f"- `model.onnx`: the dense model, opset {about['onnx']['opset']}; {inputs} in, `logit` [batch] and `probability` "
            f"[batch]{_tasks(about['onnx']['tasks'])} out, float32."
        )
    lines.append("- `dense.safetensors`: the same weights under torch's names.")
    if about["row_format"] != "none":
        lines.append(f"- `rows/`: one {about['row_format']} file per table. Numbers are {_BOUNDS[about['precision']]}")
    if about["triton"]:
        lines.append(
            "- `config.pbtxt`, `1/model.py`: for Triton Inference Server, whose Python needs hotbed. This folder, "
            "under the name of the model, belongs in a model repository."
        )
    lines += [
        "- `schema.json`: the columns, in the order in which the model reads them. `counts/`: the ids of vocabularies, most",
        "  frequent first; line k (from 0) is row k + 1, row 0 is every other id.",
        "- `export.json`, `model.json`: how tables are read. `score.py`: code that does all of this. `manifest.json`: the size",
        "  and crc32 of every file.",
        "",
    ]
    return "\n".join(lines)


def _tasks(names: list[str]) -> str:
    """The output of further labels."""
    return (
        f", and `tasks` [batch, {len(names)}] with the scores of {', '.join(names)} (`Export.score_tasks`),"
        if names
        else ""
    )


def _rows(schema: Schema, about: dict[str, Any]) -> str:
    scale = ", `scale` float32 [rows]" if about["precision"] == "int8" else ""
    lines = [
        "## Rows",
        "",
        f"Every file has `id` int64 [rows] and `weight` [rows, width]{scale}. The vector of a feature with one id is",
        "the row of that id; for a bag it is the sum or the mean of its rows, zeros if it is empty.",
        "",
        "| table | rows | width | pooling | order | an id that is not in the file |",
        "|---|---|---|---|---|---|",
    ]
    for name, (feature, *_) in schema.tables.items():
        one = about["tables"][name]
        pooling = one["pooling"] if isinstance(one["pooling"], str) else _words(one["pooling"])
        order = "most frequent first" if one["order"] == "frequency" else "by id; no counts were available"
        order += ", the n-th row is id n" if one["id_is_position"] else ""
        lines.append(f"| {name} | {one['num_rows']:,} | {one['dim']} | {pooling} | {order} | {_absent(one, feature)} |")
    return "\n".join([*lines, ""])


def _words(pooling: dict[str, str]) -> str:
    """The pooling of features that share a table."""
    return ", ".join(f"{feature}: {how}" for feature, how in pooling.items())


def _absent(table: dict[str, Any], feature: IdFeature) -> str:
    if table["hashing"]:
        return f"ids are taken modulo {table['rows']:,}"
    if table["rows"] is not None:
        seen = "; a raw value that is not in the vocabulary has row 0" if feature.mode == "vocabulary" else ""
        return f"an error{seen}"
    return "reads `shared` of export.json" if table["shared"] is not None else "reads its initial value, see score.py"


def _score(schema: Schema, about: dict[str, Any]) -> str:
    ids = "\n".join(f'    "{one.name}": {_example(one)},' for one in schema.features)
    dense = f", np.zeros((2, {len(schema.dense)}))" if schema.dense else ""
    packages = "numpy and onnxruntime" + (" and pyarrow" if about["row_format"] == "parquet" else "")
    return f"""## Score without hotbed

`score.py` needs {packages}.{_raw(schema)}

Two samples as in the dataset; run it in this folder:

```python
import numpy as np
from score import Export

export = Export(".")
ids = {{
{ids}
}}
print(export.score(ids{dense}))
```
"""


def _raw(schema: Schema) -> str:
    """Example rows as in the raw log; "" if the log itself holds row numbers."""
    if any(one.mode == "direct" for one in schema.features):
        return ""
    row = {one.name: 1.5 for one in schema.dense}
    for one in schema.features:
        row.setdefault(raw_column(one), _raw_example(one))
    return f"""

Two rows as in the raw log (None: missing; columns that the model does not
read are ignored); run it in this folder. It needs pyarrow:

```python
from score import Export

export = Export(".")
row = {json.dumps(row, ensure_ascii=False)}
print(export.score_rows([row, {{**row, {json.dumps(next(iter(row)), ensure_ascii=False)}: None}}]))
```

The scores agree with `hotbed predict` to 1e-5."""


def _raw_example(feature: IdFeature) -> Any:
    if clock := clock_of(feature.source):
        return datetime(2017, 11, 7, 9, 30).strftime(clock.unit) if clock.unit.startswith("%") else "2017-11-07 09:30"
    if feature.source in ("integer", "bucket"):
        return [7] if feature.multi else 7
    if not feature.multi:
        return "some value"
    return feature.separator.join("ab") if feature.separator else ["a", "b"]


def _example(feature: IdFeature) -> str:
    return "(np.array([0, 0, 0]), np.array([0, 1, 3]))" if feature.multi else "np.array([0, 0])"


def _inputs(schema: Schema) -> str:
    lines = ["## Inputs", ""]
    if schema.dense:
        lines += [
            "Dense features are `(transform(x) - mean) / scale` with the settings of schema.json (log: sign(x) log(1 + |x|);",
            "missing values count as 0 before mean and scale); `Export.dense_of` does it.",
            "",
        ]
    lines += ["| feature | what the model reads | raw column |", "|---|---|---|"]
    for one in schema.features:
        bag = f"sequence of at most {one.length} " if one.length else "bag of " if one.multi else ""
        lines.append(f"| {one.name} | {bag}{_MODES[one.mode]} | {_SOURCES[one.source.partition(':')[0]]} |")
    lines += [
        "",
        "`Export.rows_of(feature, ids)` finds the row numbers of 64-bit ids in a vocabulary; it needs pyarrow. A missing value",
        "has the id -2^63.",
        "",
    ]
    return "\n".join(lines)
