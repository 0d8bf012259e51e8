"""Batches -> a file of scores (Parquet or CSV by its name), written batch by batch, and renamed when complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.data.loader.loader import Loader
from hotbed.data.raw_reader import RawReader
from hotbed.data.schema import Task
from hotbed.errors import RunError
from hotbed.files import RemotePath
from hotbed.files.copies import scratch_folder
from hotbed.host.atomic import rewriting, writing
from hotbed.types import Batch

FORMATS = (".parquet", ".csv")


LocatedBatch = tuple[Batch, dict[str, Any]]  # samples, and columns with their origin


class Scores(Protocol):
    """A learner, or anything else that gives logits."""

    def ahead(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """The batches, ready to be scored."""

    def score(self, batch: Batch) -> Tensor:
        """Logits [B], or [B, T] of a model of several tasks."""


@torch.no_grad()
def predict(
    learner: Scores, samples: Iterable[LocatedBatch], path: Path, labels: Sequence[Task] = (Task("label"),)
) -> int:
    """Write one row per sample: its origin, its label if there is one, its score; returns their number.

    `labels` are those of the schema; the score of a further one, if the model learned it, is in the column score_NAME.
    """
    if path.suffix not in FORMATS:
        raise RunError(f"scores are written as .parquet or .csv; {path} ends in {path.suffix or 'nothing'!r}.")
    if isinstance(path, RemotePath):
        with scratch_folder("scores") as folder:
            count = predict(learner, samples, folder / path.name, labels)
            path.put(folder / path.name)
        return count
    count = 0
    writer: Any = None
    with writing(path), rewriting(path) as temporary:
        try:
            with closing(_scored(learner, samples, labels)) as tables:
                for table in tables:
                    if writer is None:
                        writer = _writer(temporary, path.suffix, table.schema)
                    writer.write_table(table)
                    count += table.num_rows
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            raise RunError("there is nothing to score: the input has no rows.")
    return count


def split_batches(loader: Loader) -> Iterator[LocatedBatch]:
    """The batches of a split; samples are named by their row number."""
    start = 0
    with closing(loader.epoch(0)) as batches:
        for batch in batches:
            yield batch, {"row": np.arange(start, start + batch.size)}
            start += batch.size


def raw_batches(reader: RawReader) -> Iterator[LocatedBatch]:
    """The batches of raw files; samples are named by file and line, so rows that were left out leave a gap."""
    for located in reader.located():
        names = pa.DictionaryArray.from_arrays(np.zeros(len(located.lines), np.int32), [located.file])
        yield located.batch, {"file": names.cast(pa.string()), "line": located.lines}


def scores_by_task(outputs: Tensor, labels: Sequence[Task]) -> dict[str, NDArray[np.float64]]:
    """The scores [B] of each label that a model learned: outputs are [B], the first label alone, or [B, T], all of them.

    A probability, or the number of a regression; in float64, so that confident scores do not collapse to 1.
    """
    columns = (outputs if outputs.dim() > 1 else outputs.unsqueeze(1)).cpu().unbind(1)
    found = [(task, one.double()) for task, one in zip(labels, columns)]
    return {task.name: (torch.sigmoid(one) if task.kind == "binary" else one).numpy() for task, one in found}


def _scored(
    learner: Scores, samples: Iterable[LocatedBatch], labels: Sequence[Task]
) -> Generator[pa.Table, None, None]:
    """Origin, then label (null where unknown) and score of every task that the model learned."""
    waiting: deque[LocatedBatch] = deque()  # read ahead, not yet scored

    def batches() -> Generator[Batch, None, None]:
        for located in samples:
            waiting.append(located)
            yield located[0]

    with closing(batches()) as read, closing(learner.ahead(read)) as moved:
        for batch in moved:
            scores = scores_by_task(learner.score(batch), labels)
            if any(np.isnan(one).any() for one in scores.values()):
                raise RunError("the scores of the model are not numbers (NaN); it has diverged in training.")
            here, origin = waiting.popleft()
            known = [here.labels, *(() if here.targets is None else here.targets.unbind(1))]
            columns: dict[str, Any] = {}
            for number, (name, score) in enumerate(scores.items()):
                suffix = f"_{name}" if number else ""
                if number < len(known):
                    columns[f"label{suffix}"] = pa.array(known[number].numpy(), from_pandas=True)
                columns[f"score{suffix}"] = score
            yield pa.table({**origin, **columns})


def _writer(path: Path, suffix: str, schema: pa.Schema) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(path, schema) if suffix == ".parquet" else pyarrow.csv.CSVWriter(path, schema)
