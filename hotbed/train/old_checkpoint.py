"""RUN/checkpoint, as format version 1 wrote it: one folder, tables as one safetensors file. Read, never written.

The first checkpoint of a run that goes on from it takes its place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotbed.checkpoint.dense import load_optimizer
from hotbed.checkpoint.lineage import forget
from hotbed.errors import RunError
from hotbed.run.files import check_folder, read_tensors, recover_folder
from hotbed.train.interval import Interval
from hotbed.train.step import Learner

FORMAT_VERSION = 1


def old_folder(run: Path) -> Path:
    return run / "checkpoint"


def load_old_checkpoint(run: Path, learner: Learner) -> tuple[dict[str, Any], Interval]:
    """Load rows and dense weights; what the run stood at, and the open interval."""
    folder = old_folder(run)
    recover_folder(folder)
    check_folder(folder)
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        if state["format_version"] > FORMAT_VERSION:
            raise RunError(
                f"{folder} has format version {state['format_version']}; this hotbed reads up to {FORMAT_VERSION}."
            )
        learner.model.load_state_dict(read_tensors(folder / "dense.safetensors"))
        if learner.optimizer is not None:
            load_optimizer(learner.optimizer, read_tensors(folder / "dense_optimizer.safetensors"))
        forget(learner.tables)
        learner.tables.load_state_dict(read_tensors(folder / "tables.safetensors"))
        interval = Interval.from_state(read_tensors(folder / "interval.safetensors"), learner.device)
    except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{folder} does not fit this run ({type(error).__name__}: {error}).") from error
    return state, interval
