"""The steps of prepare, each from whole files in the workspace to whole files: read, count, write, commit.

A step first looks for what is there already, does the share of this rank, and meets the other ranks.

The unfinished work of one `prepare` is a job in its workspace: what it is work for, and what of it still holds.

    .OUT.partial/job.json     settings, files with their sizes and times, columns
    .OUT.partial/work/        reels (parse.py), features (merge.py)
    .OUT.partial/counts, ...  finished parts of the dataset

The same settings over the same files go on where the last job stopped. A file that was replaced is read again, and everything
that follows from it. Other settings, files or columns begin anew.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotbed.data.formats import Format
from hotbed.data.formats.chunk import REEL_BYTES
from hotbed.data.prepare.arrays import write_whole
from hotbed.data.prepare.inputs import Mark, Source
from hotbed.data.prepare.layout import Layout
from hotbed.data.prepare.merge import BYTES_OF_ID, IdRule, load_feature, merge_feature
from hotbed.data.prepare.parse import Progress, Recipe, ReelFacts, ReelTask, parse_reel
from hotbed.data.prepare.piece import PIECE_IDS
from hotbed.data.prepare.quarantine import MaxBad, Quarantine
from hotbed.data.prepare.ranks import PrepareRanks
from hotbed.data.prepare.settle import RowAssignment, used_reels
from hotbed.data.prepare.write import Finish, Part, cut_parts, write_part
from hotbed.data.schema import IdFeature, Schema
from hotbed.data.workspace import Workspace
from hotbed.errors import FormatError
from hotbed.host.ahead import run_ahead
from hotbed.host.atomic import flush_to_disk, make_folder

GENERATION = 1  # raise it when temporary files or the rows of a dataset change
_WORTH_KEEPING = 64 << 20  # bytes read; an error leaves such work for the next try


@dataclass(frozen=True)
class Job:
    """One call of prepare, after its settings were checked."""

    sources: list[Source]
    marks: list[Mark]
    readers: list[Format]
    recipe: Recipe
    ids: IdRule
    limit: MaxBad
    label_hint: str  # what to say when labels cannot be read
    memory: int
    workers: int
    crew: PrepareRanks
    report: Callable[[Progress], None]
    path: Path  # the workspace
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def raw_bytes(self) -> int:
        return sum(mark.size for mark in self.marks)


def no_rows(sources: list[Source]) -> FormatError:
    return FormatError(f"{', '.join(str(source.path) for source in sources[:3])}: not one good row was found.")


def read_files(job: Job, work: Workspace) -> tuple[list[ReelFacts], Quarantine]:
    """Pass 1; reels of all ranks, in order."""
    _read_reels(job, work, None)
    job.crew.meet("reading")
    if job.recipe.positive is not None:
        negative = negative_label(load_reels(job.work))
        job.crew.meet("reading labels")
        _read_reels(job, work, negative)
        job.crew.meet("reading again")
    reels = used_reels(load_reels(job.work), job.recipe)
    for source, mark in zip(job.sources, job.marks):
        source.check_mark(mark)
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


def _read_reels(job: Job, work: Workspace, negative: str | None) -> None:
    """Read what is not there yet; with `negative`, also what took another label for the negative one."""
    done = [0, 0]  # bytes, rows

    def step(num_bytes: int, rows: int) -> None:
        with job.lock:
            done[0] += num_bytes
            done[1] += rows
            job.report(Progress("reading", min(done[0], job.raw_bytes), job.raw_bytes, done[1]))

    def read(task: ReelTask) -> ReelFacts:
        path = job.work / f"{task.name}.json"
        if path.is_file():
            facts = ReelFacts.load(path)
            if negative is None or facts.negative in (None, negative):
                step(task.reel.num_bytes, facts.good_rows)
                return facts
        return parse_reel(task, job.recipe, negative, job.work, step)

    quarantine = Quarantine(job.limit, job.label_hint)
    rule = job.recipe.rule
    for facts in run_ahead(read, _reel_tasks(job), threads=job.workers, ahead=job.workers):
        quarantine.count(facts.reasons, facts.first_bad, facts.good_rows)
        work.keep = work.keep or done[0] >= _WORTH_KEEPING
        if rule is not None and rule.full(quarantine.good_rows):
            break


def _reel_tasks(job: Job) -> Iterator[ReelTask]:
    """The reels of the files that this rank takes; rows that are counted off in order are read by one rank."""
    ordered = job.recipe.rule is not None and job.recipe.rule.kind == "count"
    for file, (source, mark, reader) in enumerate(zip(job.sources, job.marks, job.readers)):
        if job.crew.rank == 0 if ordered else job.crew.takes(file):
            for number, reel in enumerate(reader.reels(source.path)):
                yield ReelTask(file, number, source, mark, reel, reader)


def count_features(job: Job, settled: RowAssignment) -> list[IdFeature]:
    """Merge what pieces know of every feature."""
    features = job.recipe.layout.features
    gate = _Gate(job.memory // 2)
    done = [0]

    def count(number: int) -> None:
        if load_feature(number, job.work) is None:
            ids = sum(sizes[number] for sizes in settled.sizes)
            with gate.take(ids * BYTES_OF_ID):
                merge_feature(number, features[number], settled.pieces, job.ids, job.memory // 2, job.work)
        with job.lock:
            done[0] += 1
            job.report(Progress("counting", done[0], len(features), 0))

    mine = [number for number in range(len(features)) if job.crew.takes(number)]
    for _ in run_ahead(count, mine, threads=job.workers, ahead=job.workers):
        pass
    job.crew.meet("counting")
    merged = [load_feature(number, job.work) for number in range(len(features))]
    return [feature for feature in merged if feature is not None]


class _Gate:
    """Lets tasks through while their memory together stays within a total; a larger one goes alone."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = threading.Condition()

    @contextmanager
    def take(self, amount: int) -> Iterator[None]:
        amount = min(amount, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._changed:
                self._free += amount
                self._changed.notify_all()


def write_parts(job: Job, settled: RowAssignment, finish: Finish) -> dict[str, list[Part]]:
    """Pass 2; the parts of every split. A piece is deleted when all parts made of it are there.

    Not where splits are drawn over all rows: a job that goes on reads the pieces at their borders again.
    """
    places = settled.places(job.work)
    parts = {name: cut_parts(name, settled.spans[name]) for name in job.recipe.splits}
    total = sum(part.rows for of_split in parts.values() for part in of_split)
    uses = [0] * len(settled.pieces)
    every = [part for of_split in parts.values() for part in of_split]
    for part in every:
        make_folder((job.path / part.file).parent)
        for number in {span.piece for span in part.spans}:
            uses[number] += 1

    flush_to_disk(job.work)  # what was counted from pieces is there for good before one of them goes

    def write(part: Part) -> Part:
        if not (job.path / part.file).is_file():
            write_part(part, places, finish, job.path)
        return part

    mine = [part for number, part in enumerate(every) if job.crew.takes(number)]
    settled_early = job.recipe.rule is None or job.recipe.rule.kind == "random"
    rows = 0
    for part in run_ahead(write, mine, threads=job.workers, ahead=job.workers):
        rows += part.rows
        job.report(Progress("writing", rows, total, rows))
        for number in {span.piece for span in part.spans}:
            uses[number] -= 1
            if uses[number] == 0 and settled_early:  # never in a crew of several: each sees its own parts done only
                settled.pieces[number].path.unlink(missing_ok=True)
    return parts


def commit(job: Job, work: Workspace, reels: Sequence[ReelFacts], schema: Schema) -> None:
    with (job.path / "quarantine.jsonl").open("wb") as file:
        for reel in reels:
            with (job.work / f"{reel.name}.bad").open("rb") as bad:
                shutil.copyfileobj(bad, file)
    schema.save(job.path)
    for left in job.path.rglob("*.tmp"):  # by a rank of a lost crew
        left.unlink(missing_ok=True)
    (job.path / "job.json").unlink()  # a job killed from here on begins anew: nobody takes over half of its files
    flush_to_disk(job.path)
    shutil.rmtree(job.work)
    shutil.rmtree(job.path / "ranks", ignore_errors=True)
    work.commit()


def describe_job(settings: dict[str, Any], sources: Sequence[Source], layout: Layout) -> dict[str, Any]:
    """All that the output follows from, as JSON."""
    return {
        "settings": settings,
        "files": [[source.split, str(source.path.absolute())] for source in sources],
        "columns": {
            "label": layout.label,
            "dense": [asdict(one) for one in layout.dense],
            "features": [asdict(one) for one in layout.features],
        },
        "versions": [GENERATION, REEL_BYTES, PIECE_IDS, pa.__version__],
    }


def take_over(work: Workspace, job: dict[str, Any], sources: Sequence[Source], marks: Sequence[Mark]) -> str:
    """Keep what still holds of earlier work and delete the rest; what to tell the user, if anything."""
    path = work.path / "job.json"
    said = ""
    left = _load(path)
    if left is not None and _differences(left, job) == [] and all(source.data is None for source in sources):
        said = _take_over(work, left, marks)
    else:
        if left is not None:
            what = ", ".join(_differences(left, job)) or "tables"
            said = f"the unfinished work in {work.path} was for other {what}: it is deleted and started again"
        work.clear(but=("ranks",))
    (work.path / "work").mkdir(exist_ok=True)
    work.keep = work.keep or any((work.path / "work").glob("file-*.json"))  # it outlived one end, so it outlives errors
    (work.path / "counts").mkdir(exist_ok=True)
    for folder in (work.path / "work", work.path):
        flush_to_disk(folder)  # what was deleted must not come back beside the new note
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


def _take_over(work: Workspace, left: dict[str, Any], marks: Sequence[Mark]) -> str:
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
    """Delete what follows from all files, and reels whose pieces were used up."""
    directory = work.path / "work"
    for path in work.path.iterdir():
        if path.is_dir() and path.name not in ("work", "ranks"):
            shutil.rmtree(path)
    for path in directory.glob("feature-*"):
        path.unlink()
    for path in directory.glob("file-*.json"):
        facts = ReelFacts.load(path)
        if not all(facts.piece_path(directory, number).is_file() for number in range(len(facts.pieces))):
            path.unlink()


def load_reels(directory: Path) -> list[ReelFacts]:
    """All reels that are done, in order."""
    return [ReelFacts.load(path) for path in sorted(directory.glob("file-*.json"))]
