"""`hotbed.load`: a run, a checkpoint or an export in, a Scorer out; columns or batches in, probabilities out.

Rows stay in their files. `memory` limits cached rows and their index, the id lists of vocabularies and dynamic ids, and the
marks of changed rows. Not counted: dense weights, batches being scored, Python and torch themselves, temporary memory while
loading, and the page cache. Scores are bit-identical to those of the whole model in memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checkpoint.chain import Entry
from hotbed.host.devices import pick_device
from hotbed.host.memory import parse_bytes
from hotbed.models import shown_name
from hotbed.run.predictions import Scores, scores_by_task
from hotbed.run.remote_folder import for_scoring, local_copy
from hotbed.scorer.budget import Budget
from hotbed.scorer.changes import try_changes
from hotbed.scorer.checkpoints import source_of
from hotbed.scorer.live import ScoredBatch, open_live
from hotbed.scorer.rows import RowCounts
from hotbed.scorer.source import ModelSource, open_source
from hotbed.types import Batch

DEFAULT_MEMORY = "100MB"
_SHOWN_TABLES = 8
_log = logging.getLogger("hotbed.scorer")


def load(
    path: str | Path,
    memory: str | int = DEFAULT_MEMORY,
    device: str = "cpu",
    scratch: str | Path | None = None,
    *,
    mapped: bool = False,
) -> Scorer:
    """A scorer of a run, a checkpoint or an export; its tables may be larger than memory. Of a URI a local copy is made.

    `memory` is the most memory for rows and their indexes. `device` is where the dense model runs (cpu, cuda, cuda:N, auto);
    rows are always looked up and pooled on the CPU, and scores agree to 1e-5. `scratch` is a folder for unnamed files, in
    which the rows of a checkpoint are put in order; left out, the folder of `path`. `mapped` maps files of rows into memory:
    uncached rows are read several times faster, the page cache counts as memory of the process, and a failing disk ends it.
    """
    place = local_copy(path, for_scoring)
    return Scorer(open_source(place), memory, device, Path(scratch) if scratch else place, mapped=mapped)


class Scorer:
    """A trained model that scores. Any thread may call it, and several at once."""

    def __init__(
        self,
        source: ModelSource,
        memory: str | int,
        device: str,
        scratch: Path,
        *,
        updated: bool = False,
        mapped: bool = False,
        processes: int = 1,
    ) -> None:
        """`updated`: newer versions will follow (`update`), for which some memory is reserved.

        `processes` divide the memory: this one, or every worker that is forked from it, uses its part.
        """
        part = parse_bytes(memory, "memory") // processes
        self._budget = Budget(part, scratch, pick_device(device), updated, mapped, processes)
        self._updating = threading.Lock()
        self.live = open_live(source, self._budget)

    @property
    def version(self) -> str:
        """The name of the model that scores now."""
        return str(self.live.rows.current.state.name)

    @property
    def source(self) -> ModelSource:
        """The files it was loaded from."""
        return self.live.source

    def __repr__(self) -> str:
        """The model, where it comes from, and its tables."""
        source = self.source
        at = f" at step {source.step:,}" if source.step is not None else ""
        sizes = [f"{one.name} {'dynamic' if one.rows is None else f'{one.rows:,}'}" for one in source.tables.values()]
        shown = ", ".join(sizes[:_SHOWN_TABLES]) + (", ..." if len(sizes) > _SHOWN_TABLES else "")
        tables = f"{len(sizes)} tables (rows: {shown})"
        return (
            f"<Scorer of {shown_name(source.model['name'])} from {source.place}{at}, version {self.version}, {tables}>"
        )

    def score(self, columns: Any) -> NDArray[np.float64]:
        """The probability of every sample [B], from raw values by column: a mapping, a DataFrame or a list of rows."""
        live = self.live
        return probabilities(live.logits(live.encoder.batch(columns)))

    def score_tasks(self, columns: Any) -> dict[str, NDArray[np.float64]]:
        """Like `score`, of every label that the model learned, by name: probabilities [B], or the numbers of a regression."""
        live = self.live
        return scores_by_task(live.logits(live.encoder.batch(columns)).outputs, live.schema.labels)

    def score_batch(self, batch: Batch) -> NDArray[np.float64]:
        """The probability of every sample [B] of a batch, as hotbed's loaders and readers give it."""
        return probabilities(self.live.logits(batch))

    def logits(self, batch: Batch) -> ScoredBatch:
        """The outputs for every sample, all by one version of the model."""
        return self.live.logits(batch)

    def update(self, entries: Sequence[Entry]) -> str:
        """Score with this checkpoint (one entry per rank) from now on; returns how it was loaded.

        Every concurrent request sees either the old version or the new one, never a mix. An error keeps the old one.
        """
        with self._updating:
            source = source_of(entries)
            how, why = try_changes(self.live, source, self._budget)
            if how is None:
                _log.info("%s is read anew: %s", source.version, why)
            return how or self._follow(source)

    def replace(self, source: ModelSource) -> str:
        """Like `update`, with any other model."""
        with self._updating:
            return self._follow(source)

    def share(self) -> None:
        """Before a fork: all processes read the files of rows that are there now, and none writes them."""
        self.live.share()

    def as_learner(self) -> Scores:
        """An adapter for code that scores with a learner."""
        return _AsLearner(self)

    def counts(self) -> RowCounts:
        """Where the rows of lookups were found, since the model was loaded."""
        return self.live.rows.counts()

    @property
    def num_bytes(self) -> int:
        """Memory of rows and their indexes: never more than `memory`."""
        return self.live.num_bytes

    def close(self) -> None:
        """Close all files; the scorer cannot be used afterwards."""
        self.live.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _follow(self, source: ModelSource) -> str:
        """Build the new version next to the old one, which keeps scoring until the new one has all its rows."""
        following = open_live(source, self._budget, before=self.live)
        following.make_cache(self.live)
        self.live = following
        return "whole"


def probabilities(scored: ScoredBatch) -> NDArray[np.float64]:
    """Probabilities in float64, so that confident scores do not collapse to 1."""
    return torch.sigmoid(scored.logits.double()).numpy()


class _AsLearner:
    """Batches in, logits out."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def ahead(self, batches: Iterable[Batch]) -> Generator[Batch, None, None]:
        yield from batches

    def score(self, batch: Batch) -> Tensor:
        return self._scorer.logits(batch).outputs
