"""Score with an export and without hotbed: rows or ids in, probabilities out. Copied into every export.

It needs numpy and onnxruntime, and pyarrow where raw values are looked up in a vocabulary.

    from score import Export
    export = Export(".")                          # the folder this file is in
    export.score_rows([{"user": "abc", "price": 3.5, "tags": "a|b"}])              # as in the raw log
    export.score({"user": user_ids, "tags": (values, offsets)}, dense)             # as in the dataset

Ids are those of the dataset: row numbers of a vocabulary (`Export.rows_of` finds them), else 64-bit ids. A feature with one id
per sample is an int64 array [B]; a bag or a sequence is (values [L], offsets [B + 1]). Rows stay on disk and are mapped, so
tables may be larger than memory (Parquet is read completely). Dense features are as in the dataset: `Export.dense_of`
transforms raw numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

MISSING_ID = -(2**63)  # of a missing value
_NUMBERS = {"I64": np.int64, "F32": np.float32, "F16": np.float16, "I8": np.int8}
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NANOS = {"s": 10**9, "ms": 10**6, "us": 1000, "ns": 1, "hour": 36 * 10**11, "day": 864 * 10**11}
_NO_NUMBER = ("", "nan", "na", "n/a", "null", "none", "-", "?", "\\n")  # in lower case
_LARGEST = 1e30  # larger numbers are treated as damage


class Export:
    """The tables of an export and its dense model."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.schema = _json(self.folder / "schema.json")
        card, about = _json(self.folder / "model.json"), _json(self.folder / "export.json")
        self.features = [one["name"] for one in self.schema["features"]]
        self.num_dense = len(self.schema["dense"])
        self.tasks: list[str] = (about["onnx"] or {}).get("tasks", [])  # further labels that the model scores
        self.sequences: dict[str, int] = card["model"].get("sequences") or {}  # feature -> greatest length
        self._vocabularies: dict[str, tuple[Any, Any]] = {}  # of tables
        self.table_of = {one["name"]: one.get("shares") or one["name"] for one in self.schema["features"]}  # by feature
        self.tables = {
            name: Table(self.folder, name, {**card["tables"][name], **about["tables"][name]})
            for name in dict.fromkeys(self.table_of.values())
        }

    def score_rows(self, rows: list[dict[str, Any]]) -> Any:
        """Probabilities [B] of rows as in the raw log, by column; None and "" are missing."""
        return self.score(*self.inputs_of(rows))

    def inputs_of(self, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], Any]:
        """The inputs of `score` from rows as in the raw log; columns that the model does not read are ignored."""
        given = {name for row in rows for name in row}
        columns = [one["name"] for one in self.schema["dense"]] + [_column(one) for one in self.schema["features"]]
        absent = [name for name in dict.fromkeys(columns) if name not in given]
        if absent:
            raise ValueError(f"no row has {', '.join(absent)}; the model reads {', '.join(dict.fromkeys(columns))}")
        numbers = [[_number(row.get(one["name"]), one["name"]) for one in self.schema["dense"]] for row in rows]
        ids = {one["name"]: self._ids([row.get(_column(one)) for row in rows], one) for one in self.schema["features"]}
        return ids, self.dense_of(np.array(numbers).reshape(len(rows), self.num_dense))

    def _ids(self, values: list[Any], feature: dict[str, Any]) -> Any:
        if not feature["multi"]:
            return self.rows_of(feature["name"], [_raw_id(value, feature) for value in values])
        bags = [_bag(value, feature) for value in values]
        found = [_raw_id(value, feature) for bag in bags for value in bag]
        return self.rows_of(feature["name"], found), np.cumsum([0, *map(len, bags)])

    def score(self, ids: dict[str, Any], dense: Any = None) -> Any:
        """Probabilities [B]."""
        return self.run(ids, dense)[1]

    def score_tasks(self, ids: dict[str, Any], dense: Any = None) -> dict[str, Any]:
        """Scores [B] of every label by name: probabilities, or the numbers of a regression."""
        _, probabilities, *tasks = self.run(ids, dense)
        return {self.schema["label"]: probabilities} | {name: tasks[0][:, n] for n, name in enumerate(self.tasks)}

    def run(self, ids: dict[str, Any], dense: Any = None) -> tuple[Any, ...]:
        """Logits [B], probabilities [B] and, if there are further labels, their scores [B, K]."""
        inputs = {"vectors": self.vectors(ids)}
        if self.num_dense:
            inputs["dense"] = np.ascontiguousarray(dense, dtype=np.float32)
        if self.sequences:
            inputs["lengths"] = np.stack([np.diff(ids[name][1]) for name in self.sequences], axis=1).astype(np.int64)
        return tuple(self._model.run(["logit", "probability", *(["tasks"] if self.tasks else [])], inputs))

    def vectors(self, ids: dict[str, Any]) -> Any:
        """The model's first input, float32 [B, C, W]: a pooled vector of every feature, then the vectors of every sequence."""
        tables = {name: self.tables[table] for name, table in self.table_of.items()}
        names = [name for name in self.features if name not in self.sequences]
        pooled = [tables[name].pooled(ids[name], name)[:, None] for name in names]
        padded = [tables[name].padded(ids[name], length, name) for name, length in self.sequences.items()]
        return np.concatenate([*pooled, *padded], axis=1)

    def rows_of(self, feature: str, raw_ids: Any) -> Any:
        """Raw 64-bit ids (`text_id`, `bucket_id`) to ids as in the dataset: row numbers if there is a vocabulary."""
        raw_ids = np.asarray(raw_ids, dtype=np.int64)
        if next(one["mode"] for one in self.schema["features"] if one["name"] == feature) != "vocabulary":
            return raw_ids
        table = self.table_of[feature]
        if table not in self._vocabularies:
            import pyarrow.parquet as pq

            known = pq.read_table(self.folder / "counts" / f"{table}.parquet", columns=["id"])["id"].to_numpy()
            self._vocabularies[table] = known, np.argsort(known)
        return _find(*self._vocabularies[table], raw_ids) + 1  # row 0: never seen

    def dense_of(self, raw: Any) -> Any:
        """Dense features [B, N] of raw numbers [B, N]; NaN is missing."""
        out = np.asarray(raw, dtype=np.float64).copy()
        for column, spec in zip(out.T, self.schema["dense"]):
            if spec["transform"] == "log":
                column[:] = np.sign(column) * np.log1p(np.abs(column))
            column[np.isnan(column)] = 0.0
            column[:] = (column - spec["mean"]) / spec["scale"]
        return out.astype(np.float32)

    @cached_property
    def _model(self) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession(str(self.folder / "model.onnx"), providers=["CPUExecutionProvider"])


class Table:
    """The rows of one table."""

    def __init__(self, folder: Path, name: str, card: dict[str, Any]) -> None:
        self.name, self.card = name, card
        if not card["file"]:
            raise ValueError(f"{folder} holds no rows; export again with --row-format safetensors or parquet")
        self.arrays = _read_rows(folder / card["file"])
        self._order = None if card["id_is_position"] else np.argsort(self.arrays["id"])

    def pooled(self, ids: Any, feature: str) -> Any:
        """One vector for each sample of a feature, float32 [B, D]."""
        if not isinstance(ids, tuple):
            return self.look_up(ids)
        values, offsets = (np.asarray(one, dtype=np.int64) for one in ids)
        lengths = np.diff(offsets)
        out = np.zeros((len(lengths), self.card["dim"]), dtype=np.float32)
        np.add.at(out, np.repeat(np.arange(len(lengths)), lengths), self.look_up(values))
        pooling = self.card["pooling"]  # of several features, one for each
        if (pooling if isinstance(pooling, str) else pooling[feature]) == "mean":
            out /= np.maximum(lengths, 1)[:, None].astype(np.float32)
        return out

    def padded(self, ids: Any, length: int, feature: str) -> Any:
        """The vectors of a sequence in order, zeros after the last, float32 [B, length, D]."""
        values, offsets = (np.asarray(one, dtype=np.int64) for one in ids)
        lengths = np.diff(offsets)
        if lengths.max(initial=0) > length:
            raise ValueError(f"{feature} has a sequence of {lengths.max()} ids; the model reads {length}")
        out = np.zeros((len(lengths), length, self.card["dim"]), dtype=np.float32)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        out[rows, np.arange(len(values)) - offsets[rows]] = self.look_up(values)
        return out

    def look_up(self, ids: Any) -> Any:
        """The rows of ids [n], float32 [n, D]."""
        ids = np.asarray(ids, dtype=np.int64)
        if self.card["hashing"]:
            ids = ids % self.card["rows"]
        positions = ids if self._order is None else _find(self.arrays["id"], self._order, ids)
        known = (positions >= 0) & (positions < self.card["num_rows"])
        if self.card["rows"] is not None and not known.all():
            raise IndexError(f"table {self.name!r} has no row for id {ids[~known][0]}")
        found = np.zeros((len(ids), self.card["dim"]), dtype=np.float32)
        found[known] = self.arrays["weight"][positions[known]]
        if "scale" in self.arrays:
            found[known] *= self.arrays["scale"][positions[known]][:, None]
        found[~known] = self._unseen(ids[~known])
        return found

    def _unseen(self, ids: Any) -> Any:
        """The vectors of dynamic ids without a row: the shared vector, or their initial values."""
        if not len(ids) or self.card["shared"] is not None:
            return np.asarray(self.card["shared"] or 0.0, dtype=np.float32)
        return first_values(ids, self.name, self.card)


def _column(feature: dict[str, Any]) -> str:
    """The raw column that a feature is read from."""
    name: str = feature["name"]
    part, colon, _ = feature["source"].partition(":")
    if colon:
        return name.removesuffix(f"_{part}")
    return name.removesuffix("_bucket") if feature["source"] == "bucket" else name


def _number(value: Any, column: str) -> float:
    """A raw number; NaN: missing."""
    if value is None or (isinstance(value, str) and value.strip(" ").lower() in _NO_NUMBER):
        return math.nan
    try:
        if isinstance(value, str) and ("_" in value or not value.isascii()):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{column} is not a number: {value!r}") from None
    if abs(number) > _LARGEST:
        raise ValueError(f"{column} is infinite or beyond {_LARGEST:g}: {value!r}")
    return number


def _raw_id(value: Any, feature: dict[str, Any]) -> int:
    """The 64-bit id of a raw value."""
    name, source = feature["name"], feature["source"]
    part, colon, unit = source.partition(":")
    if colon:
        return _clock_id(value, name.removesuffix(f"_{part}"), part, unit)
    if source == "bucket":
        return bucket_id(_number(value, name))
    if isinstance(value, float | np.floating):
        if not math.isnan(value) and not float(value).is_integer():
            raise ValueError(f"{name} is not a whole number: {value!r}")
        value = None if math.isnan(value) else int(value)
    if value is None or value == "":
        return MISSING_ID
    if isinstance(value, str) and source == "string":
        return text_id(value)
    if isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]+", value):
        raise ValueError(f"{name} is not an integer: {value!r}")
    if not isinstance(value, str | int | np.integer | np.bool_):
        raise ValueError(f"{name} holds {value!r} where one id is expected")
    return text_id(str(int(value))) if source == "string" else int(value)


def _clock_id(value: Any, column: str, part: str, unit: str) -> int:
    """The hour or weekday of a time; a number counts `unit` since 1970."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return MISSING_ID
    try:
        moment = _moment(value, unit)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"time {column} is not a time: {value!r}") from None
    return moment.hour if part == "hour" else moment.weekday()


def _moment(value: Any, unit: str) -> datetime:
    if isinstance(value, str) and unit.startswith("%"):
        return _in_utc(_strptime(value.strip(), unit))
    if isinstance(value, datetime):
        return _in_utc(value)
    if isinstance(value, str) and not re.fullmatch(r"[+-]?[0-9]+", value):
        if not re.fullmatch(r" *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)? *", value):
            return _in_utc(datetime.fromisoformat(_two_digits(value)))
        value = float(value)
    if unit == "yyyymmdd":
        return datetime.strptime(str(int(value)).rjust(8, "x"), "%Y%m%d")
    if unit == "yymmddhh":
        return datetime.strptime(f"20{int(value):08d}", "%Y%m%d%H")
    if unit not in _NANOS:
        raise ValueError
    if isinstance(value, float | np.floating):
        return datetime(1970, 1, 1) + timedelta(microseconds=float(value) * (_NANOS[unit] / 1000))
    return datetime(1970, 1, 1) + timedelta(microseconds=int(value) * _NANOS[unit] // 1000)


def _strptime(text: str, form: str) -> datetime:
    """%Z is UTC or GMT: of the zone of the machine, Python would take the name and drop the offset."""
    if "%Z" not in form.replace("%%", ""):
        return datetime.strptime(text, form)
    forms = ["%%".join(part.replace("%Z", zone) for part in form.split("%%")) for zone in ("UTC", "GMT")]
    for one in forms[:-1]:
        try:
            return datetime.strptime(text, one)
        except ValueError:
            continue
    return datetime.strptime(text, forms[-1])


def _two_digits(text: str) -> str:
    """2017/11/7 9:30 as 2017-11-07 09:30."""
    date, _, time = text.strip().replace("T", " ", 1).partition(" ")
    date = "-".join(part.zfill(2) for part in re.split("[-/]", date))
    return f"{date} {'0' + time if time[1:2] == ':' or len(time) == 1 else time}".strip()


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is None else moment.astimezone(UTC)


def _bag(value: Any, feature: dict[str, Any]) -> list[Any]:
    """The raw values of a bag; None and an empty string are an empty bag."""
    if value is None:
        return []
    if isinstance(value, str) and feature["separator"]:
        found = [part for part in value.split(feature["separator"]) if part]
    elif isinstance(value, list | tuple | np.ndarray):
        found = list(value)
    else:
        raise ValueError(f"{feature['name']} holds {value!r} where a list of ids is expected")
    length = feature.get("length", 0)  # of a sequence
    if not length:
        return found
    return found[:length] if feature["keep"] == "first" else found[-length:]


def text_id(text: str) -> int:
    """The 64-bit id of a string; an empty string is missing."""
    data = text.encode()
    if not data:
        return MISSING_ID
    state = _GOLDEN
    for start in range(0, len(data), 8):
        state = _mix(state ^ int.from_bytes(data[start : start + 8], "little"))
    bits = _mix(state ^ len(data))
    bits = _GOLDEN if bits == 1 << 63 else bits
    return bits - (1 << 64) if bits >> 63 else bits


def bucket_id(number: float) -> int:
    """The id of a number in a log-bucket feature; NaN is missing."""
    if math.isnan(number):
        return MISSING_ID
    size = abs(number)
    bucket = int(size) if size < 3 else 2 + int(np.searchsorted(_bucket_starts(), size, side="right"))
    return -bucket if number < 0 else bucket


@cache
def _bucket_starts() -> Any:
    """Where the third bucket and those after it begin: where log(x)^2 reaches 1, 2, ..., rounded up."""
    return np.unique([math.ceil(math.exp(math.sqrt(k))) for k in range(1, 1900)]).astype(np.float64)


def first_values(ids: Any, table: str, card: dict[str, Any]) -> Any:
    """The initial values [n, D] of ids: a function of (seed, table, id) in integers with one final product."""
    kind, number = re.findall(r"^\s*(\w+)\s*\(\s*([^)\s]+)\s*\)\s*$", card["init"])[0]
    if kind == "constant":
        values = np.full((len(ids), card["dim"]), float(number), dtype=np.float32)
    else:
        digest = hashlib.blake2b(f"{card['seed']}\0{table}".encode(), digest_size=8).digest()
        golden, stream = np.uint64(_GOLDEN), np.uint64(int.from_bytes(digest, "little"))
        rows = _mix((ids.astype(np.uint64) + stream) * golden)[:, None]
        bits = _mix(rows + np.arange(1, card["dim"] + 1, dtype=np.uint64) * golden)
        if kind == "uniform":
            whole = 2 * (bits >> np.uint64(40)).astype(np.int64) + 1 - (1 << 24)
            scale = float(number) / (1 << 24)
        else:
            more = _mix(bits ^ golden)
            words = [
                (word >> np.uint64(shift)) & np.uint64(0xFFFF) for word in (bits, more) for shift in (0, 16, 32, 48)
            ]
            whole = 2 * np.sum(words, axis=0).astype(np.int64) - 8 * 0xFFFF
            scale = float(number) / (2 * (8 * (65536**2 - 1) / 12) ** 0.5)
        values = whole.astype(np.float32) * np.float32(scale)
    return _rounded(values, card.get("precision", "fp32"))


def _rounded(values: Any, precision: str) -> Any:
    """Round to the precision of the rows in training."""
    if precision == "fp16":
        return values.astype(np.float16).astype(np.float32)
    if precision == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return values


def _mix(x: Any) -> Any:
    """Mix the bits of an array of uint64, or of one integer."""
    if isinstance(x, int):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _find(known: Any, order: Any, ids: Any) -> Any:
    """The position of every id in `known`, -1 if it is not there; `order` sorts `known`."""
    if not len(known):
        return np.full(len(ids), -1)
    at = order[np.minimum(np.searchsorted(known, ids, sorter=order), len(known) - 1)]
    return np.where(known[at] == ids, at, -1)


def _read_rows(path: Path) -> dict[str, Any]:
    """The arrays id, weight and, for int8, scale."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        arrays = {name: table[name].combine_chunks() for name in table.column_names}
        weight = arrays.pop("weight")
        found = {name: array.to_numpy(zero_copy_only=False) for name, array in arrays.items()}
        return {**found, "weight": weight.flatten().to_numpy(zero_copy_only=False).reshape(len(weight), -1)}
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    arrays = {}
    for name, one in header.items():
        shape, kind = tuple(one["shape"]), _NUMBERS[one["dtype"]]
        start = 8 + length + one["data_offsets"][0]
        empty = 0 in shape
        arrays[name] = np.empty(shape, kind) if empty else np.memmap(path, kind, "r", offset=start, shape=shape)
    return arrays


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
