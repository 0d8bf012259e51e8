"""The steps of prepare: read, count, write, commit. Each reads and writes complete files in the workspace.

A step does the tasks whose results are missing, on the workers that the job was given (workers.py): functions with arguments
that travel to other machines.

    .OUT.partial/job.json     settings, files with their sizes and times, columns
    .OUT.partial/work/        reels (parse.py), features (merge.py)
    .OUT.partial/counts, ...  finished parts of the dataset

With the same settings and files, a job resumes where the last one stopped. A file that was replaced is read again, and
everything that depends on it is computed again. With other settings, files or columns the job starts over.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.data.formats import Format
from hotbed.data.formats.chunk import REEL_BYTES
from hotbed.data.prepare.arrays import write_whole
from hotbed.data.prepare.assign import RowAssignment, used_reels
from hotbed.data.prepare.inputs import FileStamp, RawSource
from hotbed.data.prepare.layout import ColumnLayout
from hotbed.data.prepare.merge import BYTES_OF_ID, CountedPiece, IdRule, load_feature, merge_table
from hotbed.data.prepare.parse import PrepareProgress, Recipe, ReelFacts, ReelTask, parse_reel
from hotbed.data.prepare.piece import PIECE_IDS
from hotbed.data.prepare.quarantine import MaxBad, Quarantine
from hotbed.data.prepare.workers import Progress, Workers
from hotbed.data.prepare.write import DatasetPart, FinalColumns, Pieces, cut_parts, write_part
from hotbed.data.schema import IdFeature, Schema, features_by_table
from hotbed.data.workspace import Workspace
from hotbed.errors import FormatError
from hotbed.host.atomic import flush_to_disk, make_folder

GENERATION = 2  # raise it when temporary files or the rows of a dataset change
_WORTH_KEEPING = 64 << 20  # bytes read; after an error, work beyond this is kept for the next attempt


@dataclass(frozen=True)
class PrepareJob:
    """One call of prepare, with checked settings."""

    sources: list[RawSource]
    marks: list[FileStamp]
    readers: list[Format]
    recipe: Recipe
    ids: IdRule
    limit: MaxBad
    label_hint: str  # the way out if labels cannot be read
    memory: int
    workers: Workers
    report: Callable[[PrepareProgress], None]
    path: Path  # the workspace
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def raw_bytes(self) -> int:
        return sum(mark.size for mark in self.marks)


def no_rows(sources: list[RawSource]) -> FormatError:
    return FormatError(f"{', '.join(str(source.path) for source in sources[:3])}: no good row was found.")


def read_files(job: PrepareJob, work: Workspace) -> tuple[list[ReelFacts], Quarantine]:
    """Pass 1; all reels, in order."""
    _read_reels(job, work, None)
    if job.recipe.positive is not None:
        _read_reels(job, work, negative_label(load_reels(job.work)))
    reels = used_reels(load_reels(job.work), job.recipe)
    for source, mark in zip(job.sources, job.marks):
        source.check_stamp(mark)
    quarantine = Quarantine(job.limit, job.label_hint)
    for reel in reels:
        quarantine.count(reel.reasons, reel.first_bad, reel.good_rows)
    quarantine.check()
    if quarantine.good_rows == 0:
        raise no_rows(job.sources)
    return reels, quarantine


def negative_label(reels: Sequence[ReelFacts]) -> str | None:
    """The first label found that is not the positive one."""
    return next((reel.negative for reel in reels if reel.negative is not None), None)


def _read_reels(job: PrepareJob, work: Workspace, negative: str | None) -> None:
    """Read the reels that are missing; with `negative`, also those that took another label for the negative one."""
    done = [0, 0]  # bytes, rows

    def step(num_bytes: int, rows: int) -> None:
        with job.lock:
            done[0] += num_bytes
            done[1] += rows
            job.report(PrepareProgress("reading", min(done[0], job.raw_bytes), job.raw_bytes, done[1]))

    quarantine = Quarantine(job.limit, job.label_hint)
    rule = job.recipe.rule
    read = partial(_read_reel, recipe=job.recipe, negative=negative, directory=job.work)
    with closing(job.workers.run(read, _reel_tasks(job), step)) as reels:
        for facts in reels:
            quarantine.count(facts.reasons, facts.first_bad, facts.good_rows)
            work.keep = work.keep or done[0] >= _WORTH_KEEPING
            if rule is not None and rule.full(quarantine.good_rows):
                break


def _read_reel(
    task: ReelTask, progress: Progress, *, recipe: Recipe, negative: str | None, directory: Path
) -> ReelFacts:
    path = directory / f"{task.name}.json"
    if path.is_file():
        facts = ReelFacts.load(path)
        if negative is None or facts.negative in (None, negative):
            progress(task.reel.num_bytes, facts.good_rows)
            return facts
    return parse_reel(task, recipe, negative, directory, progress)


def _reel_tasks(job: PrepareJob) -> Iterator[ReelTask]:
    for file, (source, mark, reader) in enumerate(zip(job.sources, job.marks, job.readers)):
        for number, reel in enumerate(reader.reels(source.path)):
            yield ReelTask(file, number, source, mark, reel, reader)


def count_features(job: PrepareJob, assigned: RowAssignment) -> list[IdFeature]:
    """Merge the id lists of all pieces, table by table."""
    features = job.recipe.layout.features
    numbers = {
        table: [features.index(one) for one in of_table] for table, of_table in features_by_table(features).items()
    }
    tables = [{number: features[number] for number in of_table} for of_table in numbers.values()]
    count = partial(_count_table, pieces=assigned.pieces, rule=job.ids, memory=job.memory // 2, work=job.work)
    counted = job.workers.run(count, tables, _no_progress, lambda table: _bytes_to_count(job, assigned, table))
    for done, _ in enumerate(counted, 1):
        job.report(PrepareProgress("counting", done, len(tables), 0))
    merged = [load_feature(number, job.work) for number in range(len(features))]
    return [feature for feature in merged if feature is not None]


def _count_table(
    features: Mapping[int, IdFeature],
    progress: Progress,
    *,
    pieces: list[CountedPiece],
    rule: IdRule,
    memory: int,
    work: Path,
) -> None:
    if any(load_feature(number, work) is None for number in features):
        merge_table(features, pieces, rule, memory, work)


def _bytes_to_count(job: PrepareJob, assigned: RowAssignment, table: Mapping[int, IdFeature]) -> int:
    return min(sum(sizes[number] for sizes in assigned.sizes for number in table) * BYTES_OF_ID, job.memory // 2)


def _no_progress(num_bytes: int, rows: int) -> None:
    pass


def write_parts(job: PrepareJob, assigned: RowAssignment, finish: FinalColumns) -> dict[str, list[DatasetPart]]:
    """Pass 2: write the parts of every split. A piece is deleted when all parts made from it are written.

    Not if splits depend on all rows: a resumed job reads the pieces at their borders again.
    """
    places = assigned.places(job.work)
    parts = {name: cut_parts(name, assigned.spans[name]) for name in job.recipe.splits}
    total = sum(part.rows for of_split in parts.values() for part in of_split)
    uses = [0] * len(assigned.pieces)
    every = [part for of_split in parts.values() for part in of_split]
    for part in every:
        make_folder((job.path / part.file).parent)
        for number in {span.piece for span in part.spans}:
            uses[number] += 1

    flush_to_disk(job.work)  # the counts are durable before a piece is deleted

    write = partial(_write_part, places=places, finish=finish, directory=job.path)
    split_while_reading = job.recipe.rule is None or job.recipe.rule.kind == "random"
    rows = 0
    for part in job.workers.run(write, every, _no_progress):
        rows += part.rows
        job.report(PrepareProgress("writing", rows, total, rows))
        for number in {span.piece for span in part.spans}:
            uses[number] -= 1
            if uses[number] == 0 and split_while_reading:
                assigned.pieces[number].path.unlink(missing_ok=True)
    return parts


def _write_part(
    part: DatasetPart, progress: Progress, *, places: Pieces, finish: FinalColumns, directory: Path
) -> DatasetPart:
    if not (directory / part.file).is_file():
        write_part(part, places, finish, directory)
    return part


def commit(job: PrepareJob, work: Workspace, reels: Sequence[ReelFacts], schema: Schema) -> None:
    with (job.path / "quarantine.jsonl").open("wb") as file:
        for reel in reels:
            with (job.work / f"{reel.name}.bad").open("rb") as bad:
                shutil.copyfileobj(bad, file)
    schema.save(job.path)
    for left in job.path.rglob("*.tmp"):  # of machines that were lost
        left.unlink(missing_ok=True)
    (job.path / "job.json").unlink()  # a job killed from here on starts over: its files are incomplete
    flush_to_disk(job.path)
    shutil.rmtree(job.work)
    work.commit()


def describe_job(settings: dict[str, Any], sources: Sequence[RawSource], layout: ColumnLayout) -> dict[str, Any]:
    """Everything that determines the output, as JSON."""
    return {
        "settings": settings,
        "files": [[source.split, str(source.path.absolute())] for source in sources],
        "columns": {
            "label": layout.label,
            "dense": [asdict(one) for one in layout.dense],
            "targets": layout.targets,
            "features": [asdict(one) for one in layout.features],
        },
        "versions": [GENERATION, REEL_BYTES, PIECE_IDS, pa.__version__],
    }


def take_over(work: Workspace, job: dict[str, Any], sources: Sequence[RawSource], marks: Sequence[FileStamp]) -> str:
    """Keep the valid results of an earlier job and delete the rest; returns a message for the user, if any."""
    path = work.path / "job.json"
    said = ""
    left = _load(path)
    if left is not None and _differences(left, job) == [] and all(source.data is None for source in sources):
        said = _take_over(work, left, marks)
    else:
        if left is not None:
            what = ", ".join(_differences(left, job)) or "tables"
            said = f"the unfinished work in {work.path} was for other {what}: it is deleted, and prepare starts over"
        work.clear()
    (work.path / "work").mkdir(exist_ok=True)
    work.keep = work.keep or any((work.path / "work").glob("file-*.json"))  # work of an earlier job is kept on errors
    (work.path / "counts").mkdir(exist_ok=True)
    for folder in (work.path / "work", work.path):
        flush_to_disk(folder)  # deleted files must not reappear next to the new job.json
    write_whole(path, json.dumps({**job, "marks": marks}))
    return said


def _load(path: Path) -> dict[str, Any] | None:
    try:
        left: dict[str, Any] = json.loads(path.read_text())
        return left if isinstance(left, dict) else None
    except (OSError, ValueError):
        return None


def _differences(left: dict[str, Any], job: dict[str, Any]) -> list[str]:
    now = json.loads(json.dumps(job))
    return [name for name in now if left.get(name) != now[name]]


def _take_over(work: Workspace, left: dict[str, Any], marks: Sequence[FileStamp]) -> str:
    directory = work.path / "work"
    changed = [number for number, mark in enumerate(marks) if list(mark) != left["marks"][number]]
    for number in changed:
        for path in directory.glob(f"file-{number:05d}.*"):
            path.unlink()
    if changed:
        _forget_results(work)
    for path in work.path.rglob("*.tmp"):
        path.unlink(missing_ok=True)
    reels = list(directory.glob("*.json"))
    if not reels:
        return ""
    again = f"; {len(changed)} files have changed since and are read again" if changed else ""
    return f"resuming the unfinished work in {work.path}{again}"


def _forget_results(work: Workspace) -> None:
    """Delete results that depend on all files, and reels whose pieces were deleted."""
    directory = work.path / "work"
    for path in work.path.iterdir():
        if path.is_dir() and path.name != "work":
            shutil.rmtree(path)
    for path in directory.glob("feature-*"):
        path.unlink()
    for path in directory.glob("file-*.json"):
        facts = ReelFacts.load(path)
        if not all(facts.piece_path(directory, number).is_file() for number in range(len(facts.pieces))):
            path.unlink()


def load_reels(directory: Path) -> list[ReelFacts]:
    """All finished reels, in order."""
    return [ReelFacts.load(path) for path in sorted(directory.glob("file-*.json"))]
