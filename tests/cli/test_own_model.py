"""A model of the user's own goes through every command, also where its file has changed or is gone."""

import json
import re
import shutil
from importlib.metadata import EntryPoint

import pytest
import torch

import hotbed as package
from hotbed.errors import ConfigError, ModelError
from hotbed.models import build_model, check_model, own

TEXT = '''
from torch import nn
from helper import WIDTH

class Mine(nn.Module):
    """Everything into one layer."""

    def __init__(self, schema, *, hidden=WIDTH):
        super().__init__()
        self.names = schema.features
        self.layers = nn.Sequential(
            nn.Linear(len(schema.features) * schema.dim + len(schema.dense), hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, inputs):
        import torch
        vectors = [inputs.vectors[name] for name in self.names]
        return self.layers(torch.cat([*vectors, inputs.dense], dim=1))
'''
CLICKS = (
    "--data",
    "criteo-like:3000",
    "--set",
    "data.batch_size=256",
    "--set",
    "model.dim=4",
    "--set",
    "train.device=cpu",
)


@pytest.fixture(autouse=True)
def stranger(monkeypatch, tmp_path):
    """Nobody has run any model here before."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(own, "_trusted", set())
    monkeypatch.setattr(own.sys, "path", [*own.sys.path])
    monkeypatch.delenv(own.TRUST, raising=False)
    for name in [*own.sys.modules]:
        if name.startswith("hotbed_own_model_") or name == "helper":
            del own.sys.modules[name]
    return tmp_path


@pytest.fixture
def mine(stranger):
    folder = stranger / "code"
    folder.mkdir()
    (folder / "helper.py").write_text("WIDTH = 8\n")
    (folder / "mine.py").write_text(TEXT)
    return folder / "mine.py"


def test_every_command_takes_it(hotbed, mine, tmp_path):
    name, run = "code/mine.py:Mine", tmp_path / "run"
    result = hotbed(
        "train", "--model", name, *CLICKS, "--set", "model.options.hidden=16", "--cache", "0.5", "--out", run
    )
    assert result.code == 0, result.err
    assert "Mine on criteo-like:3000" in result.out
    auc = re.search(r"AUC\s+│[^│]*│\s*([\d.]+)", result.out)
    kept = json.loads((run / "config.json").read_text())["model"]["source"]
    assert kept == {"name": "Mine", "file": "mine.py", "package": "", "code": TEXT}
    assert json.loads((run / "model" / "model.json").read_text())["model"]["source"] == kept
    result = hotbed("evaluate", run)
    assert auc is not None
    assert auc[1] in result.out, result.err
    for command in (
        ("predict", run, "criteo-like:3000", "--out", tmp_path / "scores.csv"),
        ("report", run),
        ("plan", "criteo-like:3000", "--model", name, "--batch-size", "256"),
        ("verify", "--model", name, *CLICKS[:4], "--steps", "3"),
        ("export", run, "--out", tmp_path / "export"),
        ("models",),
    ):
        result = hotbed(*command)
        assert result.code == 0, (command, result.err)
    scorer = package.load(tmp_path / "export")
    assert "Mine" in str(scorer)


def test_a_run_goes_on_with_the_text_it_began_with(hotbed, mine, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = ("train", "--model", "code/mine.py:Mine", *CLICKS, "--quiet")
    assert hotbed(*common, "--epochs", "2", "--out", whole).code == 0
    assert hotbed(*common, "--epochs", "1", "--out", parts).code == 0
    mine.write_text(TEXT.replace("nn.ReLU", "nn.Tanh"))
    result = hotbed("train", "--resume", parts, "--epochs", "2", "--quiet")
    assert result.code == 0, result.err
    assert "has changed since this run began" in result.err
    ends = [json.loads((run / "summary.json").read_text())["final"] for run in (whole, parts)]
    assert ends[0] == ends[1]
    result = hotbed(*common, "--epochs", "2", "--out", tmp_path / "other")
    assert json.loads((tmp_path / "other" / "summary.json").read_text())["final"] != ends[0]


def test_a_text_that_nobody_here_has_run_is_not_executed(hotbed, mine, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert hotbed("train", "--model", "code/mine.py:Mine", *CLICKS, "--out", run, "--quiet").code == 0
    mine.unlink()
    assert hotbed("evaluate", run).code == 0  # this user trained it
    shutil.rmtree(tmp_path / "state")
    monkeypatch.setattr(own, "_trusted", set())
    result = hotbed("evaluate", run)
    assert result.code == 2
    assert "HOTBED_TRUST_CODE=1" in result.err
    monkeypatch.setenv(own.TRUST, "1")
    assert hotbed("evaluate", run).code == 0
    for name in [one for one in own.sys.modules if one.startswith("hotbed_own_model_") or one == "helper"]:
        del own.sys.modules[name]
    (mine.parent / "helper.py").unlink()
    result = hotbed("evaluate", run)
    assert "needs a module that is not here" in result.err
    assert "helper" in result.err


def build(name, **options):
    names = ["user", "ad"]
    return build_model(name, num_features=2, dim=4, num_dense=1, options=options, features=names, dense=["price"])


def test_errors_begin_with_the_line_of_the_user(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mine.write_text(TEXT.replace("inputs.vectors[name]", "inputs.vectors[name + '?']"))
    with pytest.raises(ModelError, match=r"^mine.py, line 17, in .*vectors = .*KeyError: 'user\?'"):
        build("code/mine.py:Mine")(torch.zeros(3, 2, 4), torch.zeros(3, 1))
    mine.write_text(TEXT.replace("dim=1))", "dim=1)).sum()"))
    with pytest.raises(Exception, match=r"returned a tensor of shape \[\] for 3 samples"):
        build("code/mine.py:Mine")(torch.zeros(3, 2, 4), torch.zeros(3, 1))
    mine.write_text(TEXT.replace("len(schema.dense)", "len(schema.numbers)"))
    with pytest.raises(ModelError, match=r"^mine.py, line 12, in __init__"):
        build("code/mine.py:Mine")
    mine.write_text("def broken(:\n")
    with pytest.raises(ModelError, match=r"^mine.py does not load: line 1: SyntaxError"):
        build("code/mine.py:Mine")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("code/none.py:Mine", "there is no file code/none.py"),
        ("code/mine.py:Yours", "has no torch module class Yours"),
        ("no_such_package.models:Mine", "no model"),
        ("mine", "my_model.py:MyModel"),
    ],
)
def test_names_that_stand_for_nothing(mine, monkeypatch, tmp_path, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        check_model(name, {})


def test_options_are_those_of_the_constructor(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert build("code/mine.py", hidden=3).net.layers[0].out_features == 3
    with pytest.raises(ConfigError, match=r"no option depth; .* hidden=8"):
        check_model("code/mine.py:Mine", {"depth": 2})
    mine.write_text(TEXT.replace("hidden=WIDTH", "hidden"))
    with pytest.raises(ConfigError, match=r"needs the option hidden; give --set model.options.hidden="):
        check_model("code/mine.py:Mine", {})
    mine.write_text(TEXT + "\nclass Other(nn.Module):\n    pass\n")
    with pytest.raises(ConfigError, match=r"say which class of the file.* Mine, Other"):
        check_model("code/mine.py", {})


def test_packages_offer_models(mine, monkeypatch, tmp_path):
    (mine.parent / "__init__.py").write_text("")
    mine.write_text(TEXT.replace("from helper", "from .helper"))
    monkeypatch.chdir(tmp_path)
    assert build("code.mine:Mine") is not None if "code" not in own.sys.modules else True
    shutil.copytree(mine.parent, tmp_path / "their_models")
    entry = EntryPoint("theirs", "their_models.mine:Mine", own.GROUP)
    monkeypatch.setattr(own, "entry_points", lambda group: [entry] if group == own.GROUP else [])
    assert build("theirs").vector_width(4) == 4
    with pytest.raises(ConfigError, match=r"there are lr, .*theirs"):
        check_model("nothing", {})


def test_fit_does_what_train_does(hotbed, mine, tmp_path, monkeypatch):
    assert hotbed("train", "--model", "code/mine.py:Mine", *CLICKS, "--out", tmp_path / "a", "--quiet").code == 0
    settings = {"data.batch_size": 256, "model.dim": 4, "train.device": "cpu"}
    run = package.fit("code/mine.py:Mine", "criteo-like:3000", out=tmp_path / "b", settings=settings, quiet=True)
    assert run.summary["final"] == json.loads((tmp_path / "a" / "summary.json").read_text())["final"]
    assert "Mine" in str(run.load())
    longer = package.fit(out=run.folder, resume=True, epochs=2, quiet=True)
    assert longer.summary["steps"] == 2 * run.summary["steps"]
    with pytest.raises(ConfigError, match=r"no such setting; did you mean model.dim"):
        package.fit(settings={"model.dimm": 4})
    with pytest.raises(ConfigError, match="give its folder"):
        package.fit(resume=True)
    here = type("Here", (torch.nn.Module,), {"__module__": "nowhere"})
    with pytest.raises(ConfigError, match="not defined in a file"):
        package.fit(here)
    mine.write_text(TEXT + "\nimport hotbed\nhotbed.fit(Mine)\n")
    with pytest.raises(ModelError, match="__main__"):
        package.fit("code/mine.py:Mine", out=tmp_path / "c", quiet=True)
