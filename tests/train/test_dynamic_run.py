"""`hotbed train` with dynamic ids: the same rows in every tier, after a stop, from the model folder; ids nobody trained."""

import json

import pytest
import torch
from safetensors.torch import load_file

from hotbed.errors import BudgetError, ConfigError
from hotbed.train.evaluation import evaluate
from hotbed.train.loop import INTERRUPTED
from hotbed.train.model_folder import load_learner
from hotbed.train.run import run
from tests.train.small import lines, model_bytes

RULES = ("tables.dynamic=true", "tables.admit=after 2", "tables.expire=unused 12 steps, every 4")
LONG = ("train.epochs=3", "train.eval_every=7", "train.checkpoint_every=5")
TIERS = {
    "all on the device": (),
    "share": ("tables.cache=0.3",),
    "bytes": ("tables.hbm=32KiB", "tables.memory=1MiB"),
    "memory over ssd": ("tables.memory=256KiB", "tables.ssd={ssd}:16MiB"),
    "three tiers": ("tables.hbm=32KiB", "tables.memory=256KiB", "tables.ssd={ssd}:16MiB"),
}


def tier(name, folder):
    return [one.format(ssd=folder / "ssd") for one in TIERS[name]]


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    built = start(folder, *RULES, *LONG)
    run(built.training, built.subject)
    return folder, built.training


def test_ids_of_a_vocabulary_train_as_its_rows(start, tmp_path):
    """Initial values come from (seed, table, id): without rules, dynamic tables of row numbers are those of a vocabulary."""
    for name, sets in (("preset", ()), ("dynamic", ("tables.dynamic=[user, tags, ad]",))):
        built = start(tmp_path / name, *LONG, *sets)
        run(built.training, built.subject)
    assert lines(tmp_path / "preset") != []
    names = ("loss", "auc", "log_loss")
    ours, theirs = (
        [[line.get(name) for name in names] for line in lines(tmp_path / kind)] for kind in ("preset", "dynamic")
    )
    assert ours == theirs
    preset, dynamic = (load_file(tmp_path / name / "model" / "tables.safetensors") for name in ("preset", "dynamic"))
    for table in ("user", "tags", "ad"):
        assert torch.equal(preset[f"{table}.weight"][dynamic[f"{table}.id"]], dynamic[f"{table}.weight"])
    assert torch.equal(preset["site.weight"], dynamic["site.weight"])


@pytest.mark.parametrize("name", list(TIERS)[1:])
def test_tiers_change_nothing(start, whole, tmp_path, name):
    built = start(tmp_path / "run", *RULES, *LONG, *tier(name, tmp_path))
    run(built.training, built.subject)
    assert lines(tmp_path / "run") == lines(whole[0])
    assert model_bytes(tmp_path / "run") == model_bytes(whole[0])


@pytest.mark.parametrize("name", ["bytes", "three tiers"])
def test_a_run_that_stops_continues(start, whole, tmp_path, name):
    """Row by row, with who waits for a row and who is about to lose one."""
    sets, left = (*RULES, *LONG, *tier(name, tmp_path)), 17

    def stop():
        return first.training.progress.step >= left

    first = start(tmp_path / "run", *sets)
    assert first.training.train(stop) == INTERRUPTED
    first.training.close()
    for group in first.training.learner.tables.groups:
        group.residency.store.close()
    again = start(tmp_path / "run", *sets)
    again.training.resume()
    assert again.training.progress.step == left
    run(again.training, again.subject)
    assert lines(tmp_path / "run") == lines(whole[0])
    assert model_bytes(tmp_path / "run") == model_bytes(whole[0])


def test_the_rules_had_something_to_do(whole):
    counts = whole[1].learner.tables.id_counts()
    assert counts["site"].rejected > 0
    summary = json.loads((whole[0] / "summary.json").read_text())
    assert 0 < summary["parameters"]["rows"] < 1100


def test_a_model_folder_holds_ids_and_vectors(whole, dataset):
    folder, training = whole
    tensors = load_file(folder / "model" / "tables.safetensors")
    tables = training.learner.tables
    for table in tables.tables:
        ids, columns = tables.rows(table)
        assert torch.equal(tensors[f"{table}.id"], ids)
        assert torch.equal(tensors[f"{table}.weight"], columns["weight"])
        assert torch.equal(tensors[f"{table}.shared"], tables.shared_row(table)["weight"])
    assert json.loads((folder / "model" / "model.json").read_text())["format_version"] == 2


@pytest.mark.parametrize(
    ("admit", "size"), [("", {}), ("after 2", {}), ("after 2", {"cache": 0.9}), ("", {"hbm": "64KiB"})]
)
def test_a_saved_model_scores_as_the_trained_one(start, tmp_path, admit, size):
    """Sites of the test split were never trained: they read their initial values, or the row that they share."""
    built = start(tmp_path, "tables.dynamic=true", f"tables.admit={admit}", "train.epochs=1", "tables.precision=bf16")
    run(built.training, built.subject)
    trained, loader = built.training.learner, built.training.loaders.held_out["test"]
    loaded = load_learner(tmp_path / "model", "cpu", **size, batch_size=64)
    ours, theirs = evaluate(trained, loader), evaluate(loaded, loader)
    assert ours.logits.tolist() == theirs.logits.tolist()
    assert len(loaded.tables.ids("site")) == len(trained.tables.ids("site"))  # scoring gives no rows


def test_the_best_weights_come_back_with_their_ids(start, tmp_path):
    built = start(tmp_path, *RULES, "train.epochs=12", "train.eval_every=4", "tables.lr=0.5", "dense.lr=0.05")
    run(built.training, built.subject)
    best, last = built.training.progress.best, built.training.progress.step
    assert best.step < last
    final = json.loads((tmp_path / "summary.json").read_text())["final"]["valid"]
    assert final["auc"] == best.auc


def test_mistakes_come_together_before_anything_is_built(start, tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)2 settings.*no id feature 'usr'; did you mean user\?.*'x'; there are"):
        start(tmp_path, "tables.dynamic=[usr, x]")
    with pytest.raises(ConfigError, match=r"(?s)2 settings.*tables\.admit: must be 'after 3'.*tables\.expire: Expire"):
        start(tmp_path, "tables.dynamic=true", "tables.admit=often", "tables.expire=unused 0 steps")


def test_a_batch_that_does_not_fit_is_reported_before_training(start, tmp_path):
    with pytest.raises(
        BudgetError, match=r"needs \d+ rows at once, and the cache holds \d+\. Take --hbm (\S+) or more"
    ) as told:
        start(tmp_path, "tables.dynamic=true", "tables.hbm=6KiB")
    enough = str(told.value).partition("--hbm ")[2].split()[0]
    run(*start(tmp_path, "tables.dynamic=true", f"tables.hbm={enough}", "train.max_steps=3"))
