"""A model of the user's own goes through every command, also where its file has changed or is gone."""

import importlib
import json
import re
import shutil
from importlib.metadata import EntryPoint

import pytest
import torch

import hotbed as package
from hotbed.cli import fit
from hotbed.errors import ConfigError, ModelError, ShapeError
from hotbed.models import build_model, check_model, own_code, rebuild_model
from hotbed.run.config import RunConfig
from hotbed.train.build import dense_optimizer
from hotbed.train.build_ranks import merged_optimizer

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
    monkeypatch.setattr(own_code, "_trusted", [])
    monkeypatch.setattr(own_code.sys, "path", [*own_code.sys.path])
    monkeypatch.delenv(own_code.TRUST, raising=False)
    for name in [*own_code.sys.modules]:
        if name.startswith("hotbed_own_model_") or name == "helper":
            del own_code.sys.modules[name]
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
    monkeypatch.setattr(own_code, "_trusted", [])
    result = hotbed("evaluate", run)
    assert result.code == 1
    assert "HOTBED_TRUST_CODE=1" in result.err
    monkeypatch.setenv(own_code.TRUST, "1")
    assert hotbed("evaluate", run).code == 0
    for name in [one for one in own_code.sys.modules if one.startswith("hotbed_own_model_") or one == "helper"]:
        del own_code.sys.modules[name]
    (mine.parent / "helper.py").unlink()
    result = hotbed("evaluate", run)
    assert "needs a module that was not found" in result.err
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
    with pytest.raises(Exception, match=r"returned a tensor of shape \[\] and type torch.float32 for 3 samples"):
        build("code/mine.py:Mine")(torch.zeros(3, 2, 4), torch.zeros(3, 1))
    mine.write_text(TEXT.replace("len(schema.dense)", "len(schema.numbers)"))
    with pytest.raises(ModelError, match=r"^mine.py, line 12, in __init__"):
        build("code/mine.py:Mine")
    mine.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ModelError, match=r"^mine.py does not load: mine.py, line 2, .*SystemExit: 3"):
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


def install(entry, patch):
    """A package with an entry point, while this process runs: those that were found before are kept otherwise."""
    patch.setattr(own_code, "entry_points", lambda group: [entry] if group == own_code.GROUP else [])
    patch.setattr(own_code, "_entry_points", own_code._entry_points.__wrapped__)


def test_packages_offer_models(mine, monkeypatch, tmp_path):
    (mine.parent / "__init__.py").write_text("")
    mine.write_text(TEXT.replace("from helper", "from .helper"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(mine.parent, tmp_path / "their_models")
    install(EntryPoint("theirs", "their_models.mine:Mine", own_code.GROUP), monkeypatch)
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
    again = package.fit(
        "code/mine.py:Mine", "criteo-like:3000", out=run.folder, resume=True, epochs=3, quiet=True
    )  # the same call
    assert again.summary["steps"] == 3 * run.summary["steps"]
    with pytest.raises(ConfigError, match=r"model.name, model.source cannot be changed with --resume"):
        package.fit("deepfm", out=run.folder, resume=True, epochs=4)
    with pytest.raises(ConfigError, match=r"not an instance \(given: a Linear\)"):
        package.fit(torch.nn.Linear(1, 1))
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


def test_a_run_cannot_choose_what_is_executed(hotbed, mine, tmp_path, monkeypatch):
    """The file that a foreign run names says the same as the text in the run: both came from the same hand."""
    run = tmp_path / "run"
    assert hotbed("train", "--model", "code/mine.py:Mine", *CLICKS, "--out", run, "--quiet").code == 0
    monkeypatch.setattr(own_code, "_trusted", [])
    for name in [*own_code.sys.modules]:
        if name.startswith("hotbed_own_model_") or name == "helper":
            del own_code.sys.modules[name]
    card, evil = run / "model" / "model.json", tmp_path / "evil"
    shutil.copytree(mine.parent, evil)
    (evil / "__init__.py").write_text("raise SystemExit('executed')\n")
    (evil / "helper.py").write_text("raise SystemExit('executed')\n")
    text = (run / "config.json").read_text()
    settings = json.loads(card.read_text())["model"]
    for name in ("evil/mine.py:Mine", "evil.mine:Mine"):
        assert (
            rebuild_model({**settings, "name": name}) is not None
        )  # a text of this user's, with the helper of this user's
        with pytest.raises(ModelError, match="is not in model"):
            rebuild_model({**settings, "name": name, "source": {}})
    shutil.rmtree(tmp_path / "state")
    for name in ("evil/mine.py:Mine", "evil.mine:Mine", "code/mine.py:Mine"):
        with pytest.raises(ModelError, match="HOTBED_TRUST_CODE=1"):
            rebuild_model({**settings, "name": name})
        (run / "config.json").write_text(text.replace("code/mine.py:Mine", name))
        for command in (("train", "--resume", run, "--epochs", "2"), ("train", run / "config.json", "--out", "new")):
            result = hotbed(*command)
            assert (result.code, "HOTBED_TRUST_CODE=1" in result.err) == (1, True), result.err
        assert hotbed("report", run).code == 0  # reads, and executes nothing
    (run / "config.json").write_text(json.dumps({**json.loads(text), "model": {"name": "evil/mine.py:Mine"}}))
    assert "does not hold the text" in hotbed("train", "--resume", run, "--epochs", "2").err
    with pytest.raises(ModelError, match="damaged"):
        rebuild_model({**settings, "source": {"code": "print(1)"}})


def test_another_name_means_another_text(hotbed, mine, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", "--model", "code/mine.py:Mine", *CLICKS, "--out", run, "--quiet").code == 0
    (mine.parent / "other.py").write_text(TEXT.replace("Mine", "Other").replace("nn.ReLU", "nn.Tanh"))
    for flags in (("--model", "code/other.py:Other"), ("--set", "model.name=code/other.py:Other")):
        result = hotbed("train", run / "config.json", *flags, "--out", tmp_path / "new", "--overwrite", "--quiet")
        assert result.code == 0, result.err
        kept = json.loads((tmp_path / "new" / "config.json").read_text())["model"]["source"]
        assert (kept["name"], kept["file"]) == ("Other", "other.py")


def test_files_beside_a_model_are_its_own(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(mine.parent, tmp_path / "copy")
    (tmp_path / "copy" / "helper.py").write_text("WIDTH = 9\n")
    assert build("code/mine.py:Mine").net.layers[0].out_features == 8
    with pytest.raises(ModelError, match=r"imports helper from .* another helper: .*code"):
        build("copy/mine.py:Mine")
    del own_code.sys.modules["helper"]
    assert build("copy/mine.py:Mine").net.layers[0].out_features == 9
    assert build("code/mine.py:Mine").net.layers[0].out_features == 8


def test_a_run_outlives_the_package_that_named_its_model(hotbed, mine, tmp_path, monkeypatch):
    entry = EntryPoint("theirs", "mine:Mine", own_code.GROUP)
    monkeypatch.syspath_prepend(mine.parent)
    with monkeypatch.context() as installed:
        install(entry, installed)
        assert hotbed("train", "--model", "theirs", *CLICKS, "--out", "run", "--quiet").code == 0
    result = hotbed("evaluate", "run")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("nn.Linear(hidden, 1)", "nn.LazyLinear(1)", r"has lazy parameters: layers.2.weight"),
        (
            "self.names =",
            "self.a = nn.Parameter(torch.zeros(1, dtype=torch.complex64)); self.names =",
            "has a in its state_dict, but a run",
        ),
        (
            "def forward",
            "def get_extra_state(self): return {}\n\n    def forward",
            "has _extra_state in its state_dict, but a run",
        ),
        ("vectors = [", "self.b = nn.Parameter(torch.zeros(1)); vectors = [", "forward added b to the model"),
        ("return self", "return 0 * self", ""),
        ("dim=1))", "dim=1)).detach()", "logits without a gradient"),
        ("dim=1))", "dim=1)).long()", "type torch.int64"),
    ],
)
def test_what_could_not_be_trained_or_kept_is_refused(mine, monkeypatch, tmp_path, before, after, message):
    monkeypatch.chdir(tmp_path)
    mine.write_text("import torch\n" + TEXT.replace(before, after))
    vectors = torch.zeros(3, 2, 4, requires_grad=True)
    if not message:
        assert build("code/mine.py:Mine")(vectors, torch.zeros(3, 1)).requires_grad
        return
    with pytest.raises((ModelError, ShapeError), match=message):
        build("code/mine.py:Mine")(vectors, torch.zeros(3, 1))


def test_parameters_of_whole_numbers_are_constants(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    order = "self.order = nn.Parameter(torch.arange(2), requires_grad=False); self.names ="
    mine.write_text("import torch\n" + TEXT.replace("self.names =", order))
    model = build("code/mine.py:Mine")
    for make in (dense_optimizer, merged_optimizer):
        optimizer = make(RunConfig(), model)
        assert len(optimizer.param_groups[0]["params"]) == 4
        model(torch.ones(3, 2, 4), torch.ones(3, 1)).sum().backward()
        optimizer.step()
    assert model.net.order.tolist() == [0, 1]


def test_classes_of_packages_and_in_classes(mine, monkeypatch, tmp_path):
    inner = tmp_path / "a_package" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner.parent / "helper.py").write_text("WIDTH = 5\n")
    (inner / "mine.py").write_text(TEXT.replace("from helper", "from ..helper") + "\nclass All:\n    Mine = Mine\n")
    monkeypatch.chdir(tmp_path)
    assert build("a_package.inner.mine:All.Mine").net.layers[0].out_features == 5
    with pytest.raises(ModelError, match=r"by its package: my_package.models:MyModel"):
        build("a_package/inner/mine.py:Mine")
    module = importlib.import_module("a_package.inner.mine")
    assert fit._name_of(module.Mine) == "a_package.inner.mine:Mine"
    assert build(fit._name_of(module.Mine)).net.layers[0].out_features == 5
