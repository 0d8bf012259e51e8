from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotbed.data.dataset import Dataset
from hotbed.run.run_file import compose
from hotbed.train.build import build
from tests.train.small import SMALL, write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    return Dataset.open(write_dataset(tmp_path_factory.mktemp("data") / "clicks"))


@pytest.fixture(scope="module", autouse=True)
def _leave_torch_alone():
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def ready_for(dataset: Dataset):
    """start(folder, "path=value", ...) -> a run of the small dataset, ready to train."""

    def ready(folder: Path, *sets: str, data: Dataset = dataset, observers=()):
        folder.mkdir(parents=True, exist_ok=True)
        config, problems = compose(None, {"data.path": "clicks", "data.batch_size": 64}, [*SMALL, *sets])
        assert problems == []
        return build(config, data, folder, observers)

    return ready


@pytest.fixture(scope="session")
def start(dataset):
    return ready_for(dataset)
