"""Raw click logs in, a dataset directory out (see schema.py), in two passes with bounded memory.

    read     every reel of every file becomes pieces of parsed rows, on as many threads as memory allows (parse.py, piece.py)
    assign   rows are assigned to splits that depend on all rows (assign.py)
    count    feature by feature, the id lists of all pieces are merged into a vocabulary (merge.py)
    write    the rows are written in parts, as Arrow files (write.py)

Every step writes its results to the workspace as complete files, so a killed job resumes where it stopped (stages.py), and
its tasks can run on many machines (workers.py). The temporary files take about as much space as the raw text. The output
depends only on the input, never on timing, workers or machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.data.formats import Format, guess_format, open_format
from hotbed.data.formats.align import NO_COLUMNS, AlignedFormat, partition_values, unify
from hotbed.data.prepare.assign import RowAssignment, assign_rows
from hotbed.data.prepare.guess import IdGuess, is_named_id
from hotbed.data.prepare.hints import (
    find_leaks,
    joined_columns,
    label_hint,
    number_columns,
    spaced_columns,
    time_columns,
)
from hotbed.data.prepare.inputs import Input, RawSource, TableFormat, list_sources
from hotbed.data.prepare.layout import (
    ColumnLayout,
    LayoutOptions,
    choose_layout,
)
from hotbed.data.prepare.merge import IdRule
from hotbed.data.prepare.parse import PrepareProgress, Recipe
from hotbed.data.prepare.quarantine import MaxBad, Quarantine
from hotbed.data.prepare.sort import SortedFormat
from hotbed.data.prepare.splits import TRAIN, SplitRule
from hotbed.data.prepare.stages import (
    PrepareJob,
    commit,
    count_features,
    describe_job,
    negative_label,
    no_rows,
    read_files,
    take_over,
    write_parts,
)
from hotbed.data.prepare.workers import MEMORY_OF_WORKER, RayWorkers, Workers, WorkerThreads
from hotbed.data.prepare.write import FinalColumns
from hotbed.data.schema import IdMode, Schema, Split, Task
from hotbed.data.values import LabelReader
from hotbed.data.workspace import Workspace, publishing
from hotbed.errors import ConfigError, FormatError
from hotbed.files import path_of
from hotbed.host.memory import in_words, parse_bytes
from hotbed.host.threads import num_cores

IDS_MODES: tuple[IdMode, ...] = ("vocabulary", "hash", "raw")
MEMORY = "2GiB"
_LEAST_MEMORY = 1 << 30
_MEMORY_OF_PROCESS = 384 << 20  # Python, numpy, pyarrow and compiled kernels


@dataclass(frozen=True)
class PrepareReport:
    """The result of `prepare`."""

    path: Path
    schema: Schema
    bad_rows: dict[str, int]  # reason -> rows, most frequent first
    left_out: int  # good rows read that belong to no split
    raw_bytes: int
    seconds: float
    joined: dict[str, str] = field(
        default_factory=dict
    )  # columns whose values look like several ids, and the separator
    guesses: tuple[tuple[str, IdGuess], ...] = ()  # integer columns that look like ids
    times: dict[str, str] = field(
        default_factory=dict
    )  # columns of times read as ids or amounts -> unit, plain or format
    numbers: dict[str, str] = field(default_factory=dict)  # columns of numbers read as ids, and one that is not plain
    spaced: dict[str, str] = field(default_factory=dict)  # columns of ids with spaces around them, and such an id


def prepare(
    inputs: Input | Sequence[Input],
    out: str | Path,
    *,
    format: str | None = None,
    label: str | None = None,
    positive: str | None = None,
    dense: Sequence[str] = (),
    ids: Sequence[str] = (),
    multi: Mapping[str, str] | None = None,
    sequence: Sequence[str] = (),
    share: Mapping[str, str] | None = None,
    task: Sequence[str] = (),
    weight: str | None = None,
    drop: Sequence[str] = (),
    integers: str = "log",
    split: str | Mapping[str, float | int] | None = None,
    time_column: str | None = None,
    time_features: Sequence[str] = (),
    keep_negatives: float = 1.0,
    min_count: int = 1,
    ids_mode: str = "vocabulary",
    hash_rows: int | None = None,
    max_bad: str | int = "1%",
    delimiter: str | None = None,
    memory: str | int = MEMORY,
    workers: int | None = None,
    overwrite: bool = False,
    ray: bool = False,
    progress: Callable[[PrepareProgress], None] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> PrepareReport:
    """Turn raw files or tables into a dataset directory; `hotbed prepare --help` explains the arguments.

    `inputs` is one of, or a sequence of: a path, a pyarrow Table, RecordBatch or Dataset, a pandas DataFrame, or a pair
    (split, one of these). With `ray` the work is done by tasks of a Ray cluster. `say` gets a message about unfinished work of
    an earlier call, if there is any.
    """
    started = time.perf_counter()
    ids_rule = _id_rule(ids_mode, hash_rows, min_count)
    options = LayoutOptions.parse(
        label=label, positive=positive, dense=dense, ids=ids, multi=multi, sequence=sequence, task=task, weight=weight,
        drop=drop, integers=integers, time_column=time_column, time_features=time_features, share=share,
    )  # fmt: skip
    clock = options.clock
    rule = SplitRule.parse(split) if isinstance(split, str) else None if split is None else SplitRule(split)
    if rule is not None and rule.kind == "days" and clock is None:
        raise ConfigError("--splits days:... needs a time column: --time COLUMN.")
    _check_negatives(keep_negatives, rule)
    limit = MaxBad.parse(max_bad)
    num_bytes = _memory(memory)
    sources = list_sources(inputs)
    splits = _split_names(sources, rule)
    if ray and any(source.data is not None for source in sources):
        raise ConfigError("--ray reads files, which all machines see; tables of this process are prepared without it.")
    readers = _readers(sources, format, delimiter, options, say)
    if clock is not None:
        readers = [SortedFormat(reader, clock, say) for reader in readers]
    settings = {
        **{"format": [reader.name for reader in readers[:1]], "wishes": repr(options), "positive": positive},
        **{
            "split": repr(split),
            "negatives": keep_negatives,
            "time": time_column,
            "ids": list(ids_rule),
            "delimiter": delimiter,
            "memory": num_bytes,
        },
    }
    marks = [source.stamp() for source in sources]
    first = _first_look(sources, readers, options, limit, positive)
    layout = first.layout
    target, runners = path_of(out), _workers(workers, num_bytes, ray)
    with (
        publishing(target, overwrite=overwrite, shared=ray) as local,
        Workspace(local, overwrite, resumable=True) as work,
    ):
        work.keep = ray
        raw_bytes = in_words(sum(mark.size for mark in marks))
        work.needs = (
            f" prepare needs space for about as much as the raw text (files of {raw_bytes}), and for the dataset."
        )
        message = take_over(work, describe_job(settings, sources, layout), sources, marks)
        if message:
            say(message)
        job = PrepareJob(
            sources=sources,
            marks=marks,
            readers=readers,
            recipe=Recipe(layout, splits, rule, positive, clock, keep_negatives),
            ids=ids_rule,
            limit=limit,
            label_hint=first.label_hint,
            memory=num_bytes,
            workers=runners,
            report=progress or (lambda _: None),
            path=work.path,
        )
        reels, quarantine = read_files(job, work)
        assigned = assign_rows(reels, job.recipe, job.work)
        _check_positive(assigned, positive, first.label_hint)
        features = count_features(job, assigned)
        finish = FinalColumns(
            layout.label,
            (
                *(m.fit(spec) for m, spec in zip(assigned.moments, layout.dense)),
                *layout.numbers[len(layout.dense) :],  # targets stay as they are
            ),
            tuple(features),
        )
        parts = write_parts(job, assigned, finish)
        schema = Schema(
            label=layout.label,
            dense=finish.dense[: len(layout.dense)],
            features=finish.features,
            tasks=tuple(Task(target.name, target.kind) for target in layout.targets if target.kind != "weight"),
            weight=next((target.name for target in layout.targets if target.kind == "weight"), ""),
            splits={
                name: Split(
                    tuple(part.file for part in parts[name]),
                    tuple(part.rows for part in parts[name]),
                    assigned.positives[name],
                )
                for name in splits
            },
            raw_format=readers[0].name,
            notes={
                "raw": {"delimiter": delimiter, "positive": positive, "negative": negative_label(reels), "times": "us"},
                "sources": [
                    f"{source.split}={source.path.name}" if source.split else source.path.name for source in sources
                ],
                "bad_rows": dict(quarantine.reasons.most_common()),
                "left_out": assigned.left_out,
                "min_count": min_count,
                **({} if rule is None else {"split": rule.kind}),
                **({"negatives_kept": keep_negatives} if keep_negatives < 1 else {}),
                **({"time": assigned.time} if assigned.time else {}),
            },
        )
        leaks = find_leaks(work.path, schema)
        if leaks:
            schema.notes["leaks"] = leaks
        commit(job, work, reels, schema)
    return PrepareReport(
        path=target,
        schema=schema,
        bad_rows=dict(quarantine.reasons.most_common()),
        left_out=assigned.left_out,
        raw_bytes=job.raw_bytes,
        seconds=time.perf_counter() - started,
        joined=first.joined,
        guesses=layout.guesses,
        times=first.times,
        numbers=first.numbers,
        spaced=first.spaced,
    )


def look_at(
    inputs: Input | Sequence[Input],
    *,
    format: str | None = None,
    positive: str | None = None,
    max_bad: str | int = "1%",
    delimiter: str | None = None,
    **columns: Any,
) -> FirstLook:
    """How `prepare` with the same arguments would read the columns, by the first rows; nothing is written."""
    options = LayoutOptions.parse(positive=positive, **columns)
    sources = list_sources(inputs)
    readers = _readers(sources, format, delimiter, options, lambda _: None)
    return _first_look(sources, readers, options, MaxBad.parse(max_bad), positive)


def _readers(
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


class FirstLook(NamedTuple):
    """What the first readable rows show."""

    layout: ColumnLayout
    joined: dict[str, str]  # columns that look like several ids in one, and the separator
    times: dict[str, str]  # columns of times that would be read as ids or amounts
    numbers: dict[str, str]  # columns of numbers that would be read as ids, and one that is not plain
    spaced: dict[str, str]  # columns of ids with spaces around them, and such an id
    label_hint: str  # the way out if labels cannot be read


def _first_look(
    sources: list[RawSource], readers: list[Format], options: LayoutOptions, limit: MaxBad, positive: str | None
) -> FirstLook:
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


def _check_negatives(share: float, rule: SplitRule | None) -> None:
    if not 0 < share <= 1:
        raise ConfigError(f"--keep-negatives {share:g} is not a share above 0 and at most 1.")
    if share < 1 and rule is not None and not rule.is_known_while_reading:
        raise ConfigError(
            "--keep-negatives needs to know the split of a row when it is read: use fractions (--splits train=0.8,test=0.2) or "
            "a file for each split (train=a.csv test=b.csv)."
        )


def _check_positive(assigned: RowAssignment, positive: str | None, hint: str) -> None:
    """A FormatError if no row has the value of --positive."""
    if positive is not None and hint and not any(assigned.positives.values()):
        raise FormatError(f"no row is positive. {hint}")


def _memory(memory: str | int) -> int:
    num_bytes = parse_bytes(memory, "--memory")
    if num_bytes < _LEAST_MEMORY:
        raise ConfigError(
            f"--memory {in_words(num_bytes)} is too little; prepare needs {in_words(_LEAST_MEMORY)} at least."
        )
    return num_bytes


def _workers(count: int | None, memory: int, ray: bool) -> Workers:
    if count is not None and count < 1:
        raise ConfigError(f"--workers {count} is below 1.")
    if ray and count is not None:
        raise ConfigError(f"--workers {count} is for threads of one machine; with --ray the cluster's cores count.")
    most = max(1, (memory - _MEMORY_OF_PROCESS) // MEMORY_OF_WORKER)
    return RayWorkers() if ray else WorkerThreads(min(count or num_cores(), most), memory // 2)


def _id_rule(ids_mode: str, hash_rows: int | None, min_count: int) -> IdRule:
    mode = next((one for one in IDS_MODES if one == ids_mode), None)
    if mode is None:
        raise ConfigError(f"ids-mode {ids_mode!r} is not one of {', '.join(IDS_MODES)}.")
    if mode == "hash" and (hash_rows is None or hash_rows < 1):
        raise ConfigError(
            f"--ids-mode hash needs --hash-rows N, the rows of each table, at least 1; given: {hash_rows}."
        )
    if mode != "hash" and hash_rows is not None:
        why = "a vocabulary counts its own rows" if mode == "vocabulary" else "raw ids get rows in training"
        raise ConfigError(f"--hash-rows {hash_rows} belongs to --ids-mode hash; {why}.")
    if min_count < 1:
        raise ConfigError(f"--min-count {min_count} is below 1, the count of an id that was seen.")
    if mode == "raw" and min_count > 1:
        raise ConfigError(
            f"--min-count {min_count} belongs to a vocabulary. For raw ids, `hotbed train --dynamic --admit "
            f"'after {min_count}'` gives rows only to ids that occur that often."
        )
    return IdRule(mode, min_count if mode == "vocabulary" else 1, hash_rows)


def _carved_names(named: tuple[str, ...], rule: SplitRule) -> tuple[str, ...]:
    """The splits of named files, and those that the rule takes out of train."""
    twice = [name for name in rule.names if name in named]
    if rule.kind != "random" or twice or TRAIN not in named:
        given = f"{', '.join(twice)} is given as a file" if twice else f"the files are {', '.join(named)}"
        raise ConfigError(
            "inputs named split=path already have their split; leave out --splits, or take a share of the train files for "
            f"another one, as in --splits valid=0.1 ({given})."
        )
    return *named, *rule.names


def _split_names(sources: Sequence[RawSource], rule: SplitRule | None) -> tuple[str, ...]:
    named = tuple(dict.fromkeys(source.split for source in sources if source.split))
    if named and rule is not None:
        return _carved_names(named, rule)
    names = named or (rule.names if rule else (TRAIN,))
    if TRAIN not in names:
        raise ConfigError(f"no split is called train (given: {', '.join(names)}). Ids are counted on train.")
    return names
