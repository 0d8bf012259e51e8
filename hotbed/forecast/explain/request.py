"""A table and an id or a raw value in, the row that is meant out.

In a vocabulary an id is a row number, as the data files have it; raw values are hashed and looked up as `prepare` did. In a
table of hashed or dynamic ids an id is the 64-bit number of the raw value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hotbed.data.formats.chunk import Faults, Text
from hotbed.data.schema import IdFeature
from hotbed.data.values import read_ids
from hotbed.errors import ConfigError, IdError
from hotbed.forecast.explain.run import Opened


class Asked(NamedTuple):
    """One row of a table."""

    table: str
    id: int  # as the files of rows and the batches have it
    row: int | None  # in its table; None: dynamic ids, whose rows the checkpoint tells
    value: str | None  # as it was given
    note: str = ""
    meaning: str = ""  # of the id in the raw log, in words, where the dataset tells


def feature_of(opened: Opened, table: str) -> IdFeature:
    """The feature of a table, or an error that lists all tables."""
    features = {feature.name: feature for feature in opened.dataset.schema.features}
    if table not in features:
        raise ConfigError(f"--table {table}: {opened.run} has no such table. Its tables are: {', '.join(features)}.")
    return features[table]


def row_asked(opened: Opened, table: str, id_: int | None, value: str | None) -> Asked:
    """The row of an id or of a raw value; one of the two is given."""
    feature = feature_of(opened, table)
    if (id_ is None) == (value is None):
        raise ConfigError("give one of --id, the number of a row, and --value, as the raw log has it.")
    if value is not None:
        return _of_value(opened, feature, value)
    assert id_ is not None
    rows = opened.tables[table].rows
    if rows is None:
        return Asked(table, id_, None, None)
    if feature.mode == "hash":
        return Asked(table, id_ % rows, id_ % rows, None)
    if not 0 <= id_ < rows:
        raise IdError(
            f"--id {id_}: table {table} has the rows 0 to {rows - 1:,}. A value of the raw log is given with --value."
        )
    return Asked(table, id_, id_, None)


def _of_value(opened: Opened, feature: IdFeature, value: str) -> Asked:
    data = np.frombuffer(value.encode(), dtype=np.uint8).copy()
    faults = Faults(1)
    single = Text(data, np.zeros(1, np.int64), np.array([data.shape[0]]))
    ids = read_ids(single, feature if not feature.multi else _single(feature), faults)
    if not faults.good.all():
        raise ConfigError(f"--value {value!r}: {faults.bad_rows('', np.zeros(1, np.int64), str)[0].reason}.")
    assert isinstance(ids, np.ndarray)
    number, rows = int(ids[0]), opened.tables[feature.name].rows
    if rows is None:
        return Asked(feature.name, number, None, value)
    if feature.mode == "hash":
        return Asked(feature.name, number % rows, number % rows, value)
    places = np.flatnonzero(opened.dataset.counts(feature.name).ids == number)
    if places.shape[0] and places[0] + 1 < rows:
        row = int(places[0]) + 1
        return Asked(feature.name, row, row, value)
    return Asked(
        feature.name, 0, 0, value, f"{value!r} has no row of its own: it shares row 0 with all values that are unknown"
    )


def _single(feature: IdFeature) -> IdFeature:
    from dataclasses import replace

    return replace(feature, multi=False)
