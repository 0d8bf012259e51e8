"""Pass 1 of prepare: a reel of a raw file in, pieces of parsed rows (piece.py) and facts about them out.

Several threads read reels, one thread per reel. The result depends only on the reel. `file-i.reel-k.json` is written last: if
it exists, the reel is done.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hotbed.data.encode import EncodedRows, encode
from hotbed.data.formats import BadRow, Format, Reel
from hotbed.data.prepare.arrays import write_whole
from hotbed.data.prepare.inputs import FileStamp, RawSource
from hotbed.data.prepare.layout import ColumnLayout
from hotbed.data.prepare.piece import PIECE_IDS, PieceBuilder, PieceFacts
from hotbed.data.prepare.quarantine import SHOWN_BAD
from hotbed.data.prepare.sort import SMALL_FILE
from hotbed.data.prepare.splits import TRAIN, SplitRule, keep_share
from hotbed.data.times import TimeColumn, show_time
from hotbed.data.values import LabelReader, Targets
from hotbed.errors import FormatError
from hotbed.host.atomic import flush_to_disk, place, rewriting
from hotbed.host.memory import in_words


class PrepareProgress(NamedTuple):
    """Progress of prepare: bytes while reading, features while counting, rows while writing."""

    stage: str  # "reading", "counting" or "writing"
    done: int
    total: int
    rows: int


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result of a reel."""

    layout: ColumnLayout
    splits: tuple[str, ...]
    rule: SplitRule | None
    positive: str | None
    time: TimeColumn | None
    negatives: float = 1.0  # share of the negatives of train that is kept

    @property
    def train(self) -> int:
        return self.splits.index(TRAIN)


class ReelTask(NamedTuple):
    """One reel to read."""

    file: int  # number of the source
    number: int  # of the reel in its file
    source: RawSource
    mark: FileStamp
    reel: Reel
    reader: Format

    @property
    def name(self) -> str:
        return f"file-{self.file:05d}.reel-{self.number:05d}"


@dataclass
class ReelFacts:
    """Facts about a reel."""

    name: str
    file: str
    mark: FileStamp
    first_line: int = 0  # of its first good row
    good_rows: int = 0
    bad_rows: int = 0
    left_out: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first_bad: list[BadRow] = field(default_factory=list)
    negative: str | None = None  # the other label, if `positive` is given
    pieces: list[PieceFacts] = field(default_factory=list)

    def save(self, directory: Path) -> None:
        write_whole(directory / f"{self.name}.json", json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ReelFacts:
        raw: dict[str, Any] = json.loads(path.read_text())
        raw["mark"] = FileStamp(*raw["mark"])
        raw["first_bad"] = [BadRow(*row) for row in raw["first_bad"]]
        raw["pieces"] = [PieceFacts(*piece) for piece in raw["pieces"]]
        return cls(**raw)

    def piece_path(self, directory: Path, number: int) -> Path:
        return directory / f"{self.name}.piece-{number:03d}"


def parse_reel(
    task: ReelTask, recipe: Recipe, negative: str | None, directory: Path, progress: Callable[[int, int], None]
) -> ReelFacts:
    """Read a reel; `progress` is called with the bytes and good rows of each chunk."""
    facts = ReelFacts(task.name, str(task.source.path), task.mark)
    label = LabelReader(
        recipe.layout.label, positive=recipe.positive, negative=negative, signed=task.reader.name == "libsvm"
    )
    reasons: Counter[str] = Counter()
    builder = PieceBuilder(recipe.layout, recipe.train)
    bad_path = directory / f"{task.name}.bad"
    with rewriting(bad_path, place, unique=True) as temporary:
        with temporary.open("w", encoding="utf-8") as bad_file:
            for encoded in _encoded(task, recipe, label, progress):
                for row in encoded.bad:
                    reasons[row.reason] += 1
                    bad_file.write(json.dumps(row._asdict()) + "\n")
                facts.first_bad += encoded.bad[: SHOWN_BAD - len(facts.first_bad)]
                rows = len(encoded.lines)
                if rows == 0:
                    continue
                facts.first_line = facts.first_line or int(encoded.lines[0])
                facts.good_rows += rows
                split = _thin_out(task, recipe, encoded, _split_of(task, recipe, encoded))
                if not isinstance(split, int):
                    facts.left_out += int(np.count_nonzero(split >= len(recipe.splits)))
                builder.add(encoded, split, len(recipe.splits))
                if builder.num_ids >= PIECE_IDS:
                    facts.pieces.append(builder.finish(facts.piece_path(directory, len(facts.pieces))))
                    builder = PieceBuilder(recipe.layout, recipe.train)
        if builder.rows:
            facts.pieces.append(builder.finish(facts.piece_path(directory, len(facts.pieces))))
        facts.negative = label.negative
        facts.reasons, facts.bad_rows = dict(reasons), reasons.total()
        if task.source.data is None:
            task.source.check_stamp(task.mark)
    flush_to_disk(directory)  # the names of the pieces, before the file that lists them
    facts.save(directory)
    return facts


def _encoded(
    task: ReelTask, recipe: Recipe, label: LabelReader, progress: Callable[[int, int], None]
) -> Iterator[EncodedRows]:
    """The chunks of a reel as labels, numbers and ids; errors name the file."""
    path, layout = task.source.path, recipe.layout
    latest = -(2**63)
    bytes_read = 0
    try:
        for chunk in task.reader.chunks(path, task.reel):
            if len(chunk.lines):
                layout.check_columns(chunk)
                encoded = encode(chunk, label, layout.dense, layout.features, recipe.time, Targets(layout.targets))
                if encoded.times is not None and len(encoded.times):
                    _check_order(encoded, latest, task)
                    latest = int(encoded.times[-1])
                yield encoded
            else:
                yield EncodedRows(np.zeros(0, np.float32), [], [], chunk.lines, chunk.bad)
            progress(chunk.bytes_read - bytes_read, len(chunk.lines))
            bytes_read = chunk.bytes_read
    except FormatError as error:
        if str(path) in str(error):
            raise
        raise FormatError(f"{path}: {error}") from error


def _split_of(task: ReelTask, recipe: Recipe, encoded: EncodedRows) -> np.ndarray | int:
    """The split of every row, or of all rows; -1 if it is not known yet."""
    if recipe.rule is None or task.source.split not in ("", TRAIN):
        return recipe.splits.index(task.source.split or TRAIN)
    if task.source.split:  # a part of the train files is taken for other splits
        carved = recipe.rule.assign(task.file, encoded.lines)
        first = recipe.splits.index(recipe.rule.names[0])
        return np.where(carved < len(recipe.rule.names), first + carved, recipe.train)
    return recipe.rule.assign(task.file, encoded.lines) if recipe.rule.kind == "random" else -1


def _thin_out(task: ReelTask, recipe: Recipe, encoded: EncodedRows, split: np.ndarray | int) -> np.ndarray | int:
    """The same splits; negatives of train that are not kept belong to none."""
    if recipe.negatives == 1.0:
        return split
    splits = np.full(len(encoded.lines), split) if isinstance(split, int) else split
    gone = (splits == recipe.train) & (encoded.labels == 0) & ~keep_share(task.file, encoded.lines, recipe.negatives)
    return np.where(gone, len(recipe.splits), splits)


def _check_order(encoded: EncodedRows, latest: int, task: ReelTask) -> None:
    assert encoded.times is not None
    before = np.concatenate([[latest], encoded.times[:-1]])
    back = np.flatnonzero(encoded.times < before)
    if len(back):
        i = int(back[0])
        raise out_of_order(str(task.source.path), int(encoded.lines[i]), int(encoded.times[i]), int(before[i]))


def out_of_order(file: str, line: int, time: int, before: int) -> FormatError:
    """The error for a row that is earlier than the previous row."""
    return FormatError(
        f"{file}, line {line}: its time, {show_time(time)}, is before that of the previous row, {show_time(before)}. "
        "With --time, rows must be sorted by time, over all files in the given order. hotbed sorts the rows of a file of up "
        f"to {in_words(SMALL_FILE)}, uncompressed; sort a larger one first, give files in the order of their times, or leave "
        "out --time."
    )
