"""What hotbed 0.1 wrote is read: checkpoints, datasets, run folders and exports, and what they hold is what they held.

tests/golden/written.py says what the files are, and how they came to be.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks.golden import environment
from tests.golden.test_golden import GOLDEN
from tests.golden.written import RUNS, SAVED, command, read_chain, read_dataset, read_scores, resume

HERE = Path(__file__).parent
VALUES = json.loads((HERE / "written_by_0_1.json").read_text())
CHAINS = [(name, steps) for name, saved in SAVED.items() for steps in saved]


@pytest.fixture(scope="module", autouse=True)
def _leave_torch_alone():
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(HERE / "written_by_0_1.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(("name", "steps"), CHAINS)
def test_a_checkpoint_has_its_rows_and_training_goes_on_from_it(written, tmp_path, name, steps):
    """The full one and the incremental one of each: rows as saved, then the losses and rows of training without a stop."""
    chain = f"{name}/{steps:012}"
    step, rows, losses, rows_at_the_end = read_chain(name, written / "chains" / chain, tmp_path)
    assert step == steps
    assert rows == VALUES["chains"][chain]
    if environment("cpu")["device"] == GOLDEN["environment"]["device"]:
        golden = GOLDEN["configurations"][name]
        assert losses == golden["losses"][steps:]
        assert rows_at_the_end == golden["rows"]


@pytest.mark.parametrize("name", ["clicks", "raw"])
def test_a_dataset_has_its_batches(written, name):
    assert read_dataset(written / name) == VALUES["datasets"][name]


@pytest.mark.parametrize("folder", [*(f"runs/{name}" for name in RUNS), "export"])
def test_scores_are_those_of_before(written, folder):
    assert read_scores(written / folder) == pytest.approx(VALUES["scores"][folder], rel=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on(written, tmp_path, name):
    """One more epoch, in one process: the metrics that the version which wrote the run would have had."""
    shutil.copytree(written, tmp_path / "copy", ignore=shutil.ignore_patterns("chains", "export"))
    run = str(tmp_path / "copy" / "runs" / name)
    command("checkpoint", "verify", run)
    command("report", run)
    lines = resume(tmp_path / "copy", name)
    golden = VALUES["resumed"][name]
    assert [line[:2] for line in lines] == [line[:2] for line in golden]
    where = environment("cpu")
    if where != VALUES["environment"]:
        pytest.skip(f"read and resumed; losses were recorded on {VALUES['environment']}, and this is {where}")
    assert lines == golden
