"""A followed log with sample weights and several labels learns what a dataset of the same rows does, bit for bit."""

import numpy as np
import pytest
import torch

from hotbed.data.dataset import Dataset
from hotbed.data.loader.loader import Loader
from hotbed.data.prepare.prepare import prepare
from hotbed.run.run_file import compose
from hotbed.train.build import build
from tests.train.small import lines

ROWS, SIZE = 200, 32
SETTINGS = (
    "model.dim=4",
    f"data.batch_size={SIZE}",
    "data.shuffle=false",
    "train.log_every=3",
    "train.device=cpu",
    "train.keep_best=false",
    "train.epochs=1",
)
START = 1_700_000_000 // 3600 * 3600


def write_log(path):
    """Clicks within one hour, in order of time, with a weight, and two further labels."""
    rng = np.random.default_rng(7)
    user, ad = rng.integers(0, 30, ROWS), rng.integers(0, 8, ROWS)
    click = (rng.random(ROWS) < 1 / (1 + np.exp(2 - ad / 2))).astype(int)
    weight, watched = rng.uniform(0.1, 3, ROWS), rng.normal(3, 1, ROWS)
    times = START + np.arange(ROWS)
    columns = zip(times, click, user, ad, rng.normal(size=ROWS), click & (ad % 2), watched, weight)
    rows = [f"{t},{c},u{u},a{a},{p:.3f},{like},{w:.3f},{v:.3f}" for t, c, u, a, p, like, w, v in columns]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["ts,click,user,ad,price,like,watched,value", *rows]) + "\n")
    return path


@pytest.fixture(scope="module", params=["weights", "tasks", "both", "neither"])
def dataset(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    log = write_log(folder / "logs" / "000.csv")
    has_weights, has_tasks = request.param in ("weights", "both"), request.param in ("tasks", "both")
    more = {"weight": "value"} if has_weights else {}
    more |= {"task": ["like", "watched:regression"]} if has_tasks else {}
    drop = [name for name in ("like", "watched", "value") if name not in str(more)]
    prepare([("train", log)], folder / "data", label="click", time_column="ts", drop=drop, **more)
    found = Dataset.open(folder / "data")
    assert (bool(found.schema.weight), len(found.schema.tasks)) == (has_weights, 2 * has_tasks)
    return found


def learned(training):
    """Rows and dense weights."""
    tables = training.learner.tables
    rows = {name: tables.weight(name).clone() for name in tables.tables}
    return rows | {name: one.clone() for name, one in training.learner.model.state_dict().items()}


def start(dataset, folder, *sets):
    model = "mmoe" if dataset.schema.tasks else "deepfm"
    given = [*SETTINGS, f"model.name={model}", "train.positive_weight=3", *sets]
    config, problems = compose(None, {"data.path": str(dataset.path)}, given)
    assert problems == []
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json())
    return build(config, dataset, folder).training


def test_it_learns_what_a_dataset_of_the_same_rows_does(dataset, tmp_path):
    plain = start(dataset, tmp_path / "plain")
    plain.train(lambda: False)
    follow = (f"follow.source={dataset.path.parent / 'logs'}", "follow.settle_seconds=0", "follow.idle_seconds=0.01")
    followed = start(dataset, tmp_path / "followed", *follow, "follow.poll_seconds=0.01")
    followed.train(lambda: False)
    for training in (plain, followed):
        training.close()
    assert followed.progress.step == plain.progress.step == -(-ROWS // SIZE)
    one, other = learned(plain), learned(followed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    hour = next(line for line in lines(tmp_path / "followed") if line["kind"] == "hour")
    assert hour["hour_samples"] == ROWS
    losses = [
        [line["loss"] for line in lines(tmp_path / name) if line["kind"] == "train"] for name in ("plain", "followed")
    ]
    assert losses[0] == losses[1]


def test_its_batches_are_those_of_the_dataset(dataset, tmp_path):
    follow = (f"follow.source={dataset.path.parent / 'logs'}", "follow.settle_seconds=0")
    training = start(dataset, tmp_path / "run", *follow)
    loader = training.follower.loader
    assert loader.look()
    found = list(loader.epoch(0))
    wanted = list(Loader(dataset, "train", batch_size=SIZE, shuffle=False).epoch(0))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        for name in ("labels", "dense", "ids", "targets", "weights"):
            mine, its = getattr(one, name), getattr(other, name)
            assert (mine is None) == (its is None), name
            assert mine is None or torch.equal(mine, its.to(mine.dtype)), name
    training.close()
