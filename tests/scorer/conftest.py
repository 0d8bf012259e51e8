from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hotbed.checkpoint.saver import Saver
from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.run.run_file import compose
from hotbed.train.build import build
from hotbed.train.run import run
from tests.train.small import SMALL, write_dataset

KINDS = {
    "plain": (),
    "bf16": ("tables.precision=bf16",),
    "dynamic": ("tables.dynamic=[user, site]", "tables.precision=bf16"),
    "shared": ("tables.dynamic=true", "tables.admit=after 3", "tables.expire=unused 9 steps, every 4"),
    "ssd": ("tables.memory=16KiB", "tables.ssd={run}/ssd:16MiB"),
    "dynamic ssd": ("tables.dynamic=true", "tables.memory=256KiB", "tables.ssd={run}/ssd:16MiB"),
}


def start(folder: Path, dataset: Dataset, *sets: str):
    """A run of the small dataset, ready to train, with its settings beside it."""
    folder.mkdir(parents=True)
    given = [*SMALL, "train.checkpoint_every=5", *(one.format(run=folder) for one in sets)]
    config, problems = compose(None, {"data.path": str(dataset.path), "data.batch_size": 64}, given)
    assert problems == []
    (folder / "config.json").write_text(config.to_json())
    return build(config, dataset, folder)


def trained_with_every_checkpoint(built):
    """None is left out because the one before is still being written, which depends on how busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "busy", False)
        run(built.training, built.subject)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return Dataset.open(write_dataset(tmp_path_factory.mktemp("data") / "clicks"))


@pytest.fixture(scope="session")
def trained(dataset, tmp_path_factory):
    """trained("bf16") -> the folder of a finished run, trained once."""
    runs: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("runs")

    def folder(kind: str) -> Path:
        if kind not in runs:
            built = start(root / kind.replace(" ", "-"), dataset, *KINDS[kind])
            trained_with_every_checkpoint(built)
            runs[kind] = root / kind.replace(" ", "-")
        return runs[kind]

    return folder


def raw_table(count: int = 800, seed: int = 3) -> pa.Table:
    """A raw log: numbers, strings, whole numbers, lists."""
    rng = np.random.default_rng(seed)
    user, ad = rng.integers(0, 40, count), rng.integers(0, 12, count)
    return pa.table(
        {
            "click": (rng.random(count) < 0.2 + 0.6 * (user % 2)).astype(np.int64),
            "price": rng.normal(size=count).round(3),
            "age": rng.integers(0, 90, count),
            "user": [f"u{one}" for one in user],
            "tags": [["a", "b", "c"][: one % 4] for one in user],
            "ad": ad * 1_000_003,
        }
    )


@pytest.fixture(scope="session")
def from_raw(tmp_path_factory):
    """A run over a prepared raw log."""
    root = tmp_path_factory.mktemp("raw")
    dense = ("price", "age")
    prepare(raw_table(), root / "clicks", label="click", dense=dense, ids=("user", "ad", "tags"), workers=1)
    dataset = Dataset.open(root / "clicks")
    built = start(root / "run", dataset, "train.epochs=2", "train.keep_checkpoints=20")
    trained_with_every_checkpoint(built)
    return root / "run"
