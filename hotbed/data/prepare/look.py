"""How raw data are read: a reader for every source, and what the first readable rows show of their columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hotbed.data.formats import Format, guess_format, open_format
from hotbed.data.formats.align import NO_COLUMNS, AlignedFormat, partition_values, unify
from hotbed.data.prepare.guess import is_named_id
from hotbed.data.prepare.hints import joined_columns, label_hint, number_columns, spaced_columns, time_columns
from hotbed.data.prepare.inputs import RawSource, TableFormat
from hotbed.data.prepare.layout import ColumnLayout, LayoutOptions, choose_layout
from hotbed.data.prepare.quarantine import MaxBad, Quarantine
from hotbed.data.prepare.stages import no_rows
from hotbed.data.values import LabelReader
from hotbed.errors import ConfigError, FormatError


class FirstLook(NamedTuple):
    """What the first readable rows show."""

    layout: ColumnLayout
    joined: dict[str, str]  # columns that look like several ids in one, and the separator
    times: dict[str, str]  # columns of times that would be read as ids or amounts
    numbers: dict[str, str]  # columns of numbers that would be read as ids, and one that is not plain
    spaced: dict[str, str]  # columns of ids with spaces around them, and such an id
    label_hint: str  # the way out if labels cannot be read


def first_look(
    sources: list[RawSource], readers: list[Format], options: LayoutOptions, limit: MaxBad, positive: str | None
) -> FirstLook:
    """Choose the layout by the first chunk with a good row; raises if there is none."""
    quarantine = Quarantine(limit)
    for source, reader in zip(sources, readers):
        for chunk in reader.chunks(source.path):
            if len(chunk.lines):
                layout = choose_layout(chunk, options, reader.typed, guessing=reader.name in ("csv", "parquet"))
                label = LabelReader(layout.label, positive=positive, signed=reader.name == "libsvm")
                open_ids = [one for one in layout.features if one.name not in options.ids]
                open_names = {*(one.name for one in open_ids), *(one.name for one in layout.dense)} - {*options.dense}
                times = time_columns(
                    chunk, layout.features, [one for one in chunk.columns if one in open_names and not is_named_id(one)]
                )
                named = {name for name, guess in layout.guesses if guess.is_certain}
                numbers = number_columns(chunk, [one for one in open_ids if one.name not in {*times, *named}])
                joined = joined_columns(chunk, [one for one in layout.features if one.name not in numbers])
                spaced = spaced_columns(chunk, layout.features)
                return FirstLook(layout, joined, times, numbers, spaced, label_hint(chunk, label))
            quarantine.add(chunk.bad, 0)
    quarantine.check()
    raise no_rows(sources)


def readers_of(
    sources: list[RawSource],
    name: str | None,
    delimiter: str | None,
    options: LayoutOptions,
    say: Callable[[str], None],
) -> list[Format]:
    """One reader for all files, one for each table; files with other columns or partitions get one around it."""

    def wanted(column: str) -> bool:
        return column not in options.drop

    files = [source for source in sources if source.data is None]
    shared: Format | None = None
    if files:
        shared = open_format(
            name or guess_format(files[0].path),
            delimiter=delimiter,
            wanted=wanted,
            hashed=not (options.dense or options.multi or options.sequences or options.targets),
            time=options.time,
        )
        if delimiter is not None and shared.name != "csv":
            raise ConfigError(f"--delimiter {delimiter!r} is for csv files; {files[0].path} is read as {shared.name}.")
    elif name not in (None, "parquet"):
        raise ConfigError(f"format {name!r} is for files; a table needs none.")
    aligned = _aligned(files, shared, options, say) if shared is not None else {}
    return [
        aligned.get(source.path, shared)
        if shared is not None and source.data is None
        else TableFormat(source.data, wanted, options.time)
        for source in sources
    ]


def _aligned(
    files: list[RawSource], shared: Format, options: LayoutOptions, say: Callable[[str], None]
) -> dict[Path, Format]:
    """A reader for every file, where some lack a column that others have, or folders name columns."""
    found = unify([source.path for source in files]) if shared.name == "parquet" and len(files) > 1 else NO_COLUMNS
    partitions = partition_values([dict(source.partition) for source in files])
    wanted = frozenset(name for name in (*found.kinds, *partitions[0]) if name not in options.drop)
    lacking = {name: paths for name, paths in found.lacking.items() if name in wanted and name not in partitions[0]}
    for name, paths in lacking.items():
        if name in (options.time, options.label):
            raise FormatError(f"{paths[0]} has no column {name}, which every file needs.")
        say(f"column {name}: {len(paths)} of {len(files)} files lack it, first {paths[0]}; it is missing in their rows")
    named = {*options.ids, *options.multi, *options.sequences}
    numbers = {*options.dense, options.label, options.time, *(target.name for target in options.targets)}
    for name, mixed in found.mixed.items():
        is_number = name in numbers or (mixed.first == "float" and name not in named)  # as it is guessed
        if name in wanted and name not in partitions[0] and not is_number:
            raise FormatError(
                f"column {name} is {mixed.where}: the same id would be spelled in two ways. Write it with one type; or leave "
                f"it out with --drop {name}, or read it as a number with --dense {name}."
            )
    kinds = found.kinds if lacking or any(kind.kind == "float" for kind in found.kinds.values()) else {}
    if not kinds and not partitions[0]:
        return {}
    return {source.path: AlignedFormat(shared, kinds, values, wanted) for source, values in zip(files, partitions)}
