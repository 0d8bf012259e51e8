"""Raw click logs in, a dataset directory out (see schema.py), in two passes with bounded memory.

Pass 1 (parse.py) reads the raw files into temporary Arrow files, about as large as the raw text, and counts the ids of
the train split. Pass 2 (write.py) turns ids into rows and writes Parquet. Memory: one chunk (some 200 MB in all) plus 24
to 32 bytes per distinct id of each feature. The output depends on the input alone, never on timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotbed.data.formats import Chunk, guess_format, open_format
from hotbed.data.inputs import Source, SplitRule, list_sources
from hotbed.data.layout import Wishes
from hotbed.data.parse import TRAIN, Parsed, Progress, parse_sources, start
from hotbed.data.quarantine import MaxBad, Quarantine
from hotbed.data.schema import IdMode, Schema
from hotbed.data.workspace import Workspace
from hotbed.data.write import IdRule, write_dataset
from hotbed.errors import ConfigError

IDS_MODES: tuple[IdMode, ...] = ("vocabulary", "hash", "raw")


@dataclass(frozen=True)
class PrepareReport:
    """What prepare did."""

    path: Path
    schema: Schema
    bad_rows: dict[str, int]  # reason -> rows, most frequent first
    left_out: int  # good rows read that belong to no split
    raw_bytes: int
    seconds: float


def prepare(
    inputs: Sequence[str | Path | tuple[str, str | Path]],
    out: str | Path,
    *,
    format: str | None = None,
    label: str | None = None,
    positive: str | None = None,
    dense: Sequence[str] = (),
    ids: Sequence[str] = (),
    multi: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    integers: str = "log",
    split: str | Mapping[str, float | int] | None = None,
    min_count: int = 1,
    ids_mode: str = "vocabulary",
    hash_rows: int | None = None,
    max_bad: str | int = "1%",
    delimiter: str | None = None,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> PrepareReport:
    """Turn raw files into a dataset directory; `hotbed prepare --help` explains the arguments."""
    ids_rule = _id_rule(ids_mode, hash_rows, min_count)
    started = time.perf_counter()
    report = progress or (lambda _: None)
    wishes = Wishes(label, tuple(dense), tuple(ids), dict(multi or {}), tuple(drop), integers)
    rule = SplitRule.parse(split) if isinstance(split, str) else None if split is None else SplitRule(split)
    limit = MaxBad.parse(max_bad)
    sources = list_sources(inputs)
    splits = _split_names(sources, rule)
    reader = open_format(
        format or guess_format(sources[0].path),
        delimiter=delimiter,
        wanted=lambda name: name not in drop,
        hashed=not (dense or multi),
    )
    with Workspace(Path(out), overwrite) as work:

        def begin(chunk: Chunk) -> Parsed:
            return start(chunk, splits, reader, wishes, positive, work.path)

        with Quarantine(limit, work.path / "quarantine.jsonl") as quarantine:
            parsed = parse_sources(sources, splits, rule, reader, begin, quarantine, report)
        written = write_dataset(parsed, work.path, rule=ids_rule, progress=report)
        schema = Schema(
            label=parsed.layout.label,
            dense=written.dense,
            features=written.features,
            splits=written.splits,
            raw_format=reader.name,
            notes={
                "raw": {"delimiter": delimiter, "positive": positive, "negative": parsed.labels.negative},
                "sources": [
                    f"{source.split}={source.path.name}" if source.split else source.path.name for source in sources
                ],
                "bad_rows": dict(quarantine.reasons.most_common()),
                "left_out": parsed.left_out,
                "min_count": min_count,
            },
        )
        schema.save(work.path)
        work.commit()
    return PrepareReport(
        path=Path(out),
        schema=schema,
        bad_rows=dict(quarantine.reasons.most_common()),
        left_out=parsed.left_out,
        raw_bytes=parsed.raw_bytes,
        seconds=time.perf_counter() - started,
    )


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
            f"--min-count {min_count} belongs to a vocabulary. Of raw ids, `hotbed train --dynamic --admit 'after "
            f"{min_count}'` gives rows to those that were seen as often."
        )
    return IdRule(mode, min_count if mode == "vocabulary" else 1, hash_rows)


def _split_names(sources: Sequence[Source], rule: SplitRule | None) -> tuple[str, ...]:
    named = tuple(dict.fromkeys(source.split for source in sources if source.split))
    if named and rule is not None:
        raise ConfigError("inputs named split=path already have their split; leave out --split.")
    names = named or (rule.names if rule else (TRAIN,))
    if TRAIN not in names:
        raise ConfigError(f"no split is called train (given: {', '.join(names)}). Ids are counted on train.")
    return names
