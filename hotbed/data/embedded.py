"""Datasets that need no download: a name in, an open Dataset out.

    criteo-like         generated: 2,000,000 train rows, 200,000 valid, 200,000 test; best AUC known
    criteo-like:N       the same log with N train rows
    criteo-1tb-like, criteo-1tb-bags-like, avazu-like: other shapes, in the same way
    adult               UCI Adult census income, real, 48,842 rows (ADULT-LICENCE.md)
    anything else       a dataset directory

A named dataset is built once, into $HOTBED_CACHE or ~/.cache/hotbed, and reused. It appears whole or not at all; a lock
makes a second process wait for the first; a damaged copy is built again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.data.schema import FORMAT_VERSION
from hotbed.data.synthetic import SHAPES, TRAIN_ROWS, other_rows, write_dataset
from hotbed.data.workspace import recover
from hotbed.errors import ConfigError, DataError, SchemaError
from hotbed.files import path_of
from hotbed.files.settings import CACHE_VARIABLE, cache_root

ADULT_FILE = Path(__file__).with_name("adult.parquet")
ADULT_GENERATION = 1  # raise it when the prepared rows change

Progress = Callable[[int, int], None]  # rows done, rows in all


class EmbeddedDataset(NamedTuple):
    """A dataset that is available by name."""

    name: str
    summary: str
    licence: str


EMBEDDED = (
    *(
        EmbeddedDataset(shape.name, f"generated: {shape.summary}; {shape.name}:N for N train rows", "none")
        for shape in SHAPES.values()
    ),
    EmbeddedDataset("adult", "UCI Adult census income, real, 48,842 rows", "CC BY 4.0, B. Becker and R. Kohavi, UCI"),
)


class _BuildPlan(NamedTuple):
    """The cache folder of a named dataset without its version, and the function that builds it."""

    name: str
    generation: str
    build: Callable[[Path], object]

    @property
    def folders(self) -> list[str]:
        """The folders of all format versions, newest first."""
        return [f"{self.name}-{version}.{self.generation}" for version in range(FORMAT_VERSION, 0, -1)]


def resolve(name_or_path: str | Path, cache_dir: str | Path | None = None, progress: Progress | None = None) -> Dataset:
    """Open an embedded dataset by name, building it on first use, or a dataset directory."""
    recipe = _build_plan(str(name_or_path), progress)
    if recipe is None:
        path = path_of(name_or_path)
        recover(path)
        if not path.exists():
            known = ", ".join(entry.name for entry in EMBEDDED)
            raise SchemaError(
                f"{name_or_path} is neither an embedded dataset ({known}; criteo-like:ROWS) nor an existing directory. "
                "`hotbed prepare RAW... --out DIR` makes one from raw logs."
            )
        return Dataset.open(path)
    cache = cache_root(cache_dir)
    for folder in recipe.folders:  # a run that resumes needs the files that it began with
        found = _open_whole(cache / folder)
        if found is not None:
            return found
    target = cache / recipe.folders[0]
    with _building(cache, target.name):
        found = _open_whole(target)  # another process may have built it while this one waited
        if found is None:
            if target.exists():
                shutil.rmtree(target) if target.is_dir() else target.unlink()
            recipe.build(target)
            found = Dataset.open(target)
    return found


def is_embedded(name: str) -> bool:
    """Whether a name is a dataset that can be built, and not a path."""
    return _build_plan(name, None) is not None


def _build_plan(name: str, progress: Progress | None) -> _BuildPlan | None:
    """How to build the dataset `name`; None if it is a path."""
    base, colon, rows_text = name.partition(":")
    if base == "adult" and not colon:
        return _BuildPlan("adult", f"{ADULT_GENERATION}", _build_adult)
    shape = SHAPES.get(base)
    if shape is None:
        return None
    rows = read_rows(name, rows_text) if colon else TRAIN_ROWS
    other = other_rows(rows)
    threads = min(os.cpu_count() or 1, 8)
    build = partial(write_dataset, shape=shape, train=rows, valid=other, test=other, threads=threads, progress=progress)
    is_long = (
        rows + 2 * other > shape.days * shape.rows_per_day
    )  # its days are longer than those that earlier versions made
    days = f"-{shape.days}d" if is_long else ""
    return _BuildPlan(shape.name, f"{shape.generation}-{rows}{days}", build)


def read_rows(name: str, rows_text: str) -> int:
    """The number after the colon of a name."""
    if not rows_text.replace("_", "").isdecimal() or int(rows_text) < 1:
        base = name.partition(":")[0]
        raise ConfigError(f"{name!r}: the number of train rows must be a positive integer, as in {base}:250000.")
    return int(rows_text)


def _build_adult(out: Path) -> None:
    prepare(
        [ADULT_FILE],
        out,
        format="parquet",
        label="income",
        positive=">50K",
        integers="both",
        split={"train": 0.8, "valid": 0.1, "test": 0.1},
    )


def _open_whole(directory: Path) -> Dataset | None:
    """The dataset if all of its files are intact."""
    try:
        dataset = Dataset.open(directory)
        for feature in dataset.schema.features:
            lines = pq.read_metadata(directory / "counts" / f"{feature.name}.parquet").num_rows
            if feature.mode == "vocabulary" and lines + 1 != feature.rows:
                return None
    except (SchemaError, OSError, ValueError):  # Arrow's errors are one or the other
        return None
    return dataset


@contextmanager
def _building(cache: Path, folder: str) -> Iterator[None]:
    """Hold the lock of one dataset of the cache; report a cache that cannot be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{folder}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise _unwritable(cache, error.strerror or str(error)) from error
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise _unwritable(cache, error.__cause__.strerror or str(error.__cause__)) from error
        raise


def _unwritable(cache: Path, reason: str) -> DataError:
    return DataError(
        f"the cache {cache} cannot be written ({reason}). Embedded datasets are built there once: "
        f"set {CACHE_VARIABLE} to a directory with 500 MB free."
    )
