"""Batches -> a file of scores (Parquet or CSV by its name), written batch by batch, and renamed when complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch
from torch import Tensor

from hotbed.data.loader.loader import Loader
from hotbed.data.raw_reader import RawReader
from hotbed.errors import RunError
from hotbed.host.atomic import rewriting, writing
from hotbed.types import Batch

FORMATS = (".parquet", ".csv")


LocatedBatch = tuple[Batch, dict[str, Any]]  # samples, and columns with their origin


class Scores(Protocol):
    """A learner, or anything else that gives logits."""

    def ahead(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        """The batches, ready to be scored."""

    def score(self, batch: Batch) -> Tensor:
        """Logits [B]."""


@torch.no_grad()
def predict(learner: Scores, samples: Iterable[LocatedBatch], path: Path) -> int:
    """Write one row per sample: its origin, its label if there is one, its score; returns their number."""
    if path.suffix not in FORMATS:
        raise RunError(f"scores are written as .parquet or .csv; {path} ends in {path.suffix or 'nothing'!r}.")
    count = 0
    writer: Any = None
    with writing(path), rewriting(path) as temporary:
        try:
            with closing(_scored(learner, samples)) as tables:
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


def _scored(learner: Scores, samples: Iterable[LocatedBatch]) -> Generator[pa.Table, None, None]:
    """Origin, label (null where unknown) and probability in float64, so that confident scores do not collapse to 1."""
    waiting: deque[LocatedBatch] = deque()  # read ahead, not yet scored

    def batches() -> Generator[Batch, None, None]:
        for located in samples:
            waiting.append(located)
            yield located[0]

    with closing(batches()) as read, closing(learner.ahead(read)) as moved:
        for batch in moved:
            outputs = learner.score(batch).double().cpu()
            logits = outputs if outputs.dim() == 1 else outputs[:, 0]  # of several tasks, the label
            if bool(torch.isnan(logits).any()):
                raise RunError("the scores of the model are not numbers (NaN); it has diverged in training.")
            here, origin = waiting.popleft()
            labels = pa.array(here.labels.numpy(), from_pandas=True)
            yield pa.table({**origin, "label": labels, "score": torch.sigmoid(logits).numpy()})


def _writer(path: Path, suffix: str, schema: pa.Schema) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return pq.ParquetWriter(path, schema) if suffix == ".parquet" else pyarrow.csv.CSVWriter(path, schema)
