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
from typing import Any

from hotbed.data.prepare.assign import RowAssignment, assign_rows
from hotbed.data.prepare.guess import IdGuess
from hotbed.data.prepare.hints import find_leaks
from hotbed.data.prepare.inputs import Input, RawSource, list_sources
from hotbed.data.prepare.layout import LayoutOptions
from hotbed.data.prepare.look import FirstLook, first_look, readers_of
from hotbed.data.prepare.merge import IdRule
from hotbed.data.prepare.parse import PrepareProgress, Recipe
from hotbed.data.prepare.quarantine import MaxBad
from hotbed.data.prepare.sort import SortedFormat
from hotbed.data.prepare.splits import TRAIN, SplitRule
from hotbed.data.prepare.stages import (
    PrepareJob,
    commit,
    count_features,
    describe_job,
    negative_label,
    read_files,
    take_over,
    write_parts,
)
from hotbed.data.prepare.workers import MEMORY_OF_WORKER, RayWorkers, Workers, WorkerThreads
from hotbed.data.prepare.write import FinalColumns
from hotbed.data.schema import IdMode, Schema, Split, Task
from hotbed.data.workspace import Workspace, check_out, publishing
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
    options = LayoutOptions.parse(
        label=label, positive=positive, dense=dense, ids=ids, multi=multi, sequence=sequence, task=task, weight=weight,
        drop=drop, integers=integers, time_column=time_column, time_features=time_features, share=share,
    )  # fmt: skip
    ids_rule, rule = _id_rule(ids_mode, hash_rows, min_count), _split_rule(split, options, keep_negatives)
    limit = MaxBad.parse(max_bad)
    num_bytes = _memory(memory)
    sources = list_sources(inputs)
    splits = _split_names(sources, rule)
    if ray and any(source.data is not None for source in sources):
        raise ConfigError("--ray reads files, which all machines see; tables of this process are prepared without it.")
    readers = readers_of(sources, format, delimiter, options, say)
    if options.clock is not None:
        readers = [SortedFormat(reader, options.clock, say) for reader in readers]
    settings = {
        "format": [reader.name for reader in readers[:1]], "wishes": repr(options), "positive": positive,
        "split": repr(split), "negatives": keep_negatives, "time": time_column, "ids": list(ids_rule),
        "delimiter": delimiter, "memory": num_bytes,
    }  # fmt: skip
    marks = [source.stamp() for source in sources]
    first = first_look(sources, readers, options, limit, positive)
    target, runners = path_of(out), _workers(workers, num_bytes, ray)
    with (
        publishing(target, overwrite=overwrite, shared=ray) as local,
        Workspace(local, overwrite, resumable=True) as work,
    ):
        work.keep = ray
        work.needs = (
            f" prepare needs space for about as much as the raw text (files of {in_words(sum(mark.size for mark in marks))}), "
            "and for the dataset."
        )
        message = take_over(work, describe_job(settings, sources, first.layout), sources, marks)
        if message:
            say(message)
        job = PrepareJob(
            sources=sources,
            marks=marks,
            readers=readers,
            recipe=Recipe(first.layout, splits, rule, positive, options.clock, keep_negatives),
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
        notes: dict[str, object] = {
            "raw": {"delimiter": delimiter, "positive": positive, "negative": negative_label(reels), "times": "us"},
            "sources": [f"{one.split}={one.path.name}" if one.split else one.path.name for one in sources],
            "bad_rows": dict(quarantine.reasons.most_common()),
            "left_out": assigned.left_out,
            "min_count": min_count,
            **({} if rule is None else {"split": rule.kind}),
            **({"negatives_kept": keep_negatives} if keep_negatives < 1 else {}),
            **({"time": assigned.time} if assigned.time else {}),
        }
        schema = _write_rows(job, assigned, notes)
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
        guesses=first.layout.guesses,
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
    split: str | None = None,
    keep_negatives: float = 1.0,
    min_count: int = 1,
    ids_mode: str = "vocabulary",
    hash_rows: int | None = None,
    memory: str | int = MEMORY,
    workers: int | None = None,
    ray: bool = False,
    out: str | Path = "",
    overwrite: bool = False,
    **columns: Any,
) -> FirstLook:
    """How `prepare` with the same arguments would read the columns, by the first rows; nothing is written.

    What `prepare` would refuse before it reads everything is refused here.
    """
    options = LayoutOptions.parse(positive=positive, **columns)
    _id_rule(ids_mode, hash_rows, min_count)
    rule = _split_rule(split, options, keep_negatives)
    _memory(memory)
    _check_workers(workers, ray)
    if out:
        check_out(path_of(out), overwrite=overwrite, shared=ray)
    sources = list_sources(inputs)
    _split_names(sources, rule)
    readers = readers_of(sources, format, delimiter, options, lambda _: None)
    return first_look(sources, readers, options, MaxBad.parse(max_bad), positive)


def _write_rows(job: PrepareJob, assigned: RowAssignment, notes: dict[str, object]) -> Schema:
    """Count the ids and write the rows of every split; the schema."""
    layout, features = job.recipe.layout, count_features(job, assigned)
    dense = tuple(moments.fit(spec) for moments, spec in zip(assigned.moments, layout.dense))
    targets = layout.numbers[len(dense) :]  # stay as they are
    parts = write_parts(job, assigned, FinalColumns(layout.label, (*dense, *targets), tuple(features)))
    return Schema(
        label=layout.label,
        dense=dense,
        features=tuple(features),
        tasks=tuple(Task(target.name, target.kind) for target in layout.targets if target.kind != "weight"),
        weight=next((target.name for target in layout.targets if target.kind == "weight"), ""),
        splits={
            name: Split(
                tuple(part.file for part in parts[name]),
                tuple(part.rows for part in parts[name]),
                assigned.positives[name],
            )
            for name in job.recipe.splits
        },
        raw_format=job.readers[0].name,
        notes=notes,
    )


def _split_rule(
    split: str | Mapping[str, float | int] | None, options: LayoutOptions, keep_negatives: float
) -> SplitRule | None:
    """Which rows are of which split, and a ConfigError for what cannot be."""
    rule = SplitRule.parse(split) if isinstance(split, str) else None if split is None else SplitRule(split)
    if rule is not None and rule.kind == "days" and options.clock is None:
        raise ConfigError("--splits days:... needs a time column: --time COLUMN.")
    _check_negatives(keep_negatives, rule)
    return rule


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


def _check_workers(count: int | None, ray: bool) -> None:
    if count is not None and count < 1:
        raise ConfigError(f"--workers {count} is below 1.")
    if ray and count is not None:
        raise ConfigError(f"--workers {count} is for threads of one machine; with --ray the cluster's cores count.")


def _workers(count: int | None, memory: int, ray: bool) -> Workers:
    _check_workers(count, ray)
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
