"""The facts of all reels in, the split of every row out: the step between the two passes of prepare.

Random and named splits are known while reading. Splits by count and by day are determined here, as ranges in the order of good
rows; a piece that contains a border is counted again. The result depends only on the facts of the reels in order, so every
rank gets the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotbed.data.prepare.arrays import ArrayFile
from hotbed.data.prepare.merge import CountedPiece
from hotbed.data.prepare.parse import Recipe, ReelFacts, out_of_order
from hotbed.data.prepare.piece import Moments, PieceFacts
from hotbed.data.prepare.splits import SplitRange
from hotbed.data.prepare.write import Pieces, RowSpan
from hotbed.data.times import DAY, show_time
from hotbed.errors import FormatError


@dataclass
class RowAssignment:
    """The pieces, and the rows of every split in them."""

    pieces: list[CountedPiece]
    sizes: list[list[int]]  # [P][F]: distinct ids
    spans: dict[str, list[RowSpan]]  # the rows of each split
    positives: dict[str, int]
    moments: list[Moments]  # of each dense column, over train
    left_out: int = 0
    time: dict[str, object] = field(default_factory=dict)  # for the notes of the schema

    def rows_of(self, split: str) -> int:
        return sum(span.end - span.begin for span in self.spans[split])

    def places(self, work: Path) -> Pieces:
        """The start of each piece in the row list of every feature."""
        sizes = np.array(self.sizes, dtype=np.int64).reshape(len(self.pieces), -1)
        ends = np.cumsum(sizes, axis=0)
        return Pieces([piece.path for piece in self.pieces], ends - sizes, ends, work)


def used_reels(reels: Sequence[ReelFacts], recipe: Recipe) -> list[ReelFacts]:
    """The reels up to the one that completes all splits."""
    used, rows = [], 0
    for reel in reels:
        if recipe.rule is not None and recipe.rule.full(rows):
            break
        used.append(reel)
        rows += reel.good_rows
    return used


def assign_rows(reels: Sequence[ReelFacts], recipe: Recipe, work: Path) -> RowAssignment:
    """Assign the rows of all reels to splits."""
    _check_time(reels)
    found = RowAssignment(
        pieces=[],
        sizes=[],
        spans={name: [] for name in recipe.splits},
        positives=dict.fromkeys(recipe.splits, 0),
        moments=[Moments() for _ in recipe.layout.numbers],
        left_out=sum(reel.left_out for reel in reels),
    )
    drawn = _drawn(reels, recipe)
    first = 0  # good row of all files where the piece begins
    for reel in reels:
        for number, piece in enumerate(reel.pieces):
            path = reel.piece_path(work, number)
            if drawn is None:
                stretches = [(recipe.splits[split], begin, end) for split, begin, end in piece.stretches]
            else:
                stretches = [_within(one, first, piece.rows) for one in drawn]
                stretches = [one for one in stretches if one[1] < one[2]]
                found.left_out += piece.rows - sum(end - begin for _, begin, end in stretches)
            first += piece.rows
            if stretches:
                _place(found, path, piece, stretches, recipe)
    if recipe.time is not None:
        found.time = _time_notes(reels, recipe, drawn)
    _check_splits(found, sum(reel.good_rows for reel in reels))
    return found


def _place(
    found: RowAssignment, path: Path, piece: PieceFacts, stretches: list[tuple[str, int, int]], recipe: Recipe
) -> None:
    """Add the rows of one piece."""
    number = len(found.pieces)
    train = recipe.splits[recipe.train]
    of_train = next(((begin, end) for name, begin, end in stretches if name == train), (0, 0))
    known = len(piece.stretches) > 1 or piece.stretches[0][0] >= 0  # the split was known while reading
    whole = known or of_train == (0, piece.rows)
    found.pieces.append(CountedPiece(path, piece.rows, of_train, whole))
    found.sizes.append(list(piece.sizes))
    for name, begin, end in stretches:
        found.spans[name].append(RowSpan(number, begin, end))
    if known or len(stretches) == 1 == (stretches[0][1:] == (0, piece.rows)):
        for (name, _, _), positives in zip(stretches, piece.positives):
            found.positives[name] += positives
    else:
        with ArrayFile(path) as arrays:
            for name, begin, end in stretches:
                found.positives[name] += int(np.count_nonzero(arrays.read("label", begin, end)))
    for i, moments in enumerate(found.moments):
        if whole:
            moments.merge(piece.moments[i])
        elif of_train[0] < of_train[1]:
            with ArrayFile(path) as arrays:
                moments.add(arrays.read(f"dense.{i}", *of_train))


def _drawn(reels: Sequence[ReelFacts], recipe: Recipe) -> list[SplitRange] | None:
    """The ranges of splits that depend on all rows; None if splits were known while reading."""
    if recipe.rule is None or recipe.rule.kind == "random":
        return None
    days: dict[int, int] = {}
    rows = 0
    for reel in reels:
        for piece in reel.pieces:
            for day, first in piece.days:
                days.setdefault(day, rows + first)
            rows += piece.rows
    return recipe.rule.stretches(rows, list(days.items()))


def _within(stretch: SplitRange, first: int, rows: int) -> tuple[str, int, int]:
    """The part of a range that lies in a piece, counted from the start of the piece."""
    return stretch.split, max(stretch.begin - first, 0), min(stretch.end - first, rows)


def _check_time(reels: Sequence[ReelFacts]) -> None:
    """Check the order of time between reels; within a reel it was checked while reading."""
    latest: int | None = None
    for reel in reels:
        for number, piece in enumerate(reel.pieces):
            if piece.times is None:
                continue
            if latest is not None and piece.times[0] < latest:
                assert number == 0, "the pieces of a reel are in order"
                raise out_of_order(reel.file, reel.first_line, piece.times[0], latest)
            latest = piece.times[1]


def _time_notes(reels: Sequence[ReelFacts], recipe: Recipe, drawn: list[SplitRange] | None) -> dict[str, object]:
    assert recipe.time is not None
    times = [piece.times for reel in reels for piece in reel.pieces if piece.times is not None]
    notes: dict[str, object] = {
        "column": recipe.time.name,
        "unit": recipe.time.unit,
        "first": show_time(times[0][0]),
        "last": show_time(times[-1][1]),
        "days": len({day for reel in reels for piece in reel.pieces for day, _ in piece.days}),
    }
    if drawn is not None and recipe.rule is not None and recipe.rule.kind == "days":
        firsts: dict[int, int] = {}
        rows = 0
        for reel in reels:
            for piece in reel.pieces:
                for day, first in piece.days:
                    firsts.setdefault(rows + first, day)
                rows += piece.rows
        notes["first_day"] = {
            one.split: show_time(firsts[one.begin] * DAY)[:10] for one in drawn if one.begin in firsts
        }
    return notes


def _check_splits(found: RowAssignment, good_rows: int) -> None:
    rows = {name: found.rows_of(name) for name in found.spans}
    empty = [name for name, count in rows.items() if count == 0]
    if empty:
        sizes = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        raise FormatError(
            f"split {', '.join(empty)} got no rows; the files hold {good_rows:,} good ones ({sizes}). "
            "Change --splits or the files."
        )
