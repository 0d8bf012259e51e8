"""One grammar for all commands: a name means one thing, examples run, `--json` prints what docs/json.md says."""

import json
import random
import shlex
import warnings

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jsonschema

from hotbed.cli import COMMANDS, main
from hotbed.cli.describe import describe_commands
from hotbed.cli.options import COMPARED, RENAMED
from hotbed.cli.schemas import SCHEMAS
from tests.cli.conftest import cache, hotbed  # noqa: F401  fixtures

TEXTS = {one.name: one for one in describe_commands()}
BY_NAME = {}
for text in TEXTS.values():
    for parameter in text.parameters:
        BY_NAME.setdefault(parameter.name.rstrip("."), []).append((text.name, parameter))
WRITE_NOTHING = {"evaluate", "models", "data describe", "data list", "plan", "simulate", "explain", "verify", "bench",
                 "top", "checkpoint list", "checkpoint verify", "checkpoint diff", "serve"}  # fmt: skip


def single(parameter):
    """An option that takes several values, as the option of one value that it compares."""
    if not parameter.help.endswith(COMPARED):
        return parameter.help, parameter.default, parameter.is_option, parameter.type.removeprefix("list of ")
    return parameter.help.removesuffix(COMPARED), parameter.default, parameter.is_option, "compared"


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_name_has_one_type_one_default_and_one_help(name):
    told = {command: single(parameter) for command, parameter in BY_NAME[name]}
    kinds = {kind for *_, kind in told.values() if kind != "compared"} - {"Path"}
    assert len({facts[:3] for facts in told.values()}) == 1, told
    assert len(kinds) <= 1, told
    assert all(parameter.help.endswith((".", "]")) for _, parameter in BY_NAME[name])


def test_every_command_has_the_options_that_all_have():
    for name, text in TEXTS.items():
        assert {"--quiet", "--verbose"} <= text.options.keys(), name
        assert "--json" in text.options or name == "serve", name
        assert ("--dry-run" in text.options) == (name not in WRITE_NOTHING), name
        assert text.examples, name


def test_groups_of_commands(hotbed):
    shown = hotbed("--help").out
    places = [shown.index(f"─ {group} ─") for group in ("Start", "Understand", "Operate")]
    assert places == sorted(places)
    assert {entry.group for entry in COMMANDS.values()} == {"Start", "Understand", "Operate"}


@pytest.mark.parametrize("name", TEXTS)
def test_help_has_a_short_form(hotbed, name):
    assert hotbed(*name.split(), "-h").out == hotbed(*name.split(), "--help").out


def test_square_brackets_are_shown(hotbed):
    assert "--set 'tables.dynamic=[user, ad]'" in " ".join(hotbed("train", "--help").out.replace("│", " ").split())


@pytest.mark.parametrize(("command", "old"), [(command, old) for command in RENAMED for old in RENAMED[command]])
def test_names_of_before_are_those_of_options(command, old):
    assert RENAMED[command][old] in TEXTS[command].options
    assert old not in TEXTS[command].options


def test_an_old_name_works_and_is_named(hotbed):
    found = hotbed("plan", "criteo-like:2000", "--calibrate", "no", "--no-curve", "--world", "2", "--json")
    assert found.code == 0, found.err
    assert found.err.startswith("note: --world is now --ranks")
    assert json.loads(found.out)["setting"]["world"] == 2


@pytest.mark.parametrize("share", ["0.3", "30%"])
def test_shares_have_two_spellings(hotbed, share):
    found = hotbed("simulate", "criteo-like:2000", "--batch-size", "64", "--cache", share, "--policy", "lru", "--json")
    assert [one["cache"] for one in json.loads(found.out)["caches"]] == [0.3]
    found = hotbed("plan", "criteo-like:2000", "--batch-size", "64", "--set", f"tables.cache={share}", "--json",
                   "--calibrate", "no", "--what-if", f"cache={share}")  # fmt: skip
    assert found.code == 0, found.err
    plan = json.loads(found.out)
    assert plan["what_if"]["cache"][share]["traffic"] == plan["traffic"]


def test_completion_knows_options_of_commands(hotbed, monkeypatch):
    monkeypatch.setenv("_HOTBED_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "hotbed plan --batch")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert "--batch-size" in hotbed().out


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the examples read: clicks.csv, new.csv, ids.npy, mydata, runs/demo and runs/mine."""
    folder = tmp_path_factory.mktemp("examples")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("HOTBED_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr("hotbed.data.embedded.TRAIN_ROWS", 3000)
    monkeypatch.chdir(folder)
    write_clicks(folder)
    for line in (
        "prepare clicks.csv --label click --ids ad,user --out mydata --splits train=0.8,valid=0.1,test=0.1 -q",
        "train --data mydata --batch-size 64 --cache 90% --checkpoint-every 5 --set train.keep_checkpoints=2 "
        "--set train.checkpoint_full_every=1 --out runs/mine -q",
        "train --out runs/demo -q",
    ):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line))
        assert ended.value.code == 0, line
    yield folder
    monkeypatch.undo()


def write_clicks(folder):
    chance = random.Random(7)
    lines = ["click,ad,user,price"]
    for _ in range(1500):
        ad = min(int(chance.expovariate(0.2)), 30)
        lines.append(
            f"{int(chance.random() < 0.1 + 0.02 * (ad % 9))},a{ad},u{chance.randrange(200)},{chance.random():.2f}"
        )
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    (folder / "new.csv").write_text("\n".join(lines[:40]) + "\n")
    ids = np.minimum(np.random.default_rng(1).zipf(1.3, (900, 2)), 400) - 1
    np.save(folder / "ids.npy", ids.astype(np.int64))


# the example of each command that is run here; it is one of those in its help
EXAMPLES = {
    "train": "hotbed train --data mydata --batch-size 64 --cache 90%",
    "prepare": "hotbed prepare clicks.csv --label click --out mydata --splits train=0.8,valid=0.1,test=0.1",
    "evaluate": "hotbed evaluate runs/demo",
    "predict": "hotbed predict runs/mine new.csv --out scores.csv",
    "models": "hotbed models",
    "data describe": "hotbed data describe mydata",
    "data list": "hotbed data list",
    "data get": "hotbed data get movielens-100k --dry-run",
    "data make": "hotbed data make criteo-like:20_000 --out clicks",
    "report": "hotbed report runs/demo runs/mine --out compare.html",
    "plan": "hotbed plan mydata --batch-size 64 --cache 90% --what-if cache=50%,100% --html plan.html",
    "simulate": "hotbed simulate ids.npy --batch-size 64 --cache 30% --curve --html curves.html",
    "explain": "hotbed explain runs/mine --table ad --value a7",
    "verify": "hotbed verify --data mydata --steps 5",
    "bench": "hotbed bench --device cpu --rows-scale 0.001 --batch-size 64 --dim 8 --mlp 0 --cache 30% --steps 10",
    "top": "hotbed top runs/demo",
    "checkpoint list": "hotbed checkpoint list runs/mine",
    "checkpoint verify": "hotbed checkpoint verify runs/mine",
    "checkpoint diff": "hotbed checkpoint diff runs/demo runs/mine",
    "checkpoint prune": "hotbed checkpoint prune runs/mine --keep 1 --dry-run",
    "export": "hotbed export runs/mine",
}
AGAIN = {
    "prepare": "--overwrite",
    "predict": "--overwrite",
    "data make": "--overwrite --dry-run",
    "export": "--overwrite",
}


def test_every_command_has_an_example_here():
    assert EXAMPLES.keys() | {"serve"} == TEXTS.keys()  # tests/serve starts `hotbed serve`
    for name, line in EXAMPLES.items():
        assert line in TEXTS[name].examples, name


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_and_its_json_is_as_documented(place, capsys, name):
    found = []
    for more in (" --overwrite" if name == "prepare" else "", f" --json {AGAIN.get(name, '')}"):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(EXAMPLES[name] + more)[1:])
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        found.append(printed.out)
    assert found[0].strip()
    jsonschema.validate(json.loads(found[1]), SCHEMAS[name], cls=jsonschema.Draft202012Validator)


def test_every_schema_belongs_to_a_command():
    assert SCHEMAS.keys() == {name for name, text in TEXTS.items() if "--json" in text.options}
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if "--dry-run" in text.options])
def test_a_dry_run_writes_nothing(place, capsys, name):
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if "cache" not in path.parts}
    line = shlex.split(EXAMPLES[name])[1:]
    line = [*line, "--dry-run", *AGAIN.get(name, "").replace("--dry-run", "").split()]
    with pytest.raises(SystemExit) as ended:
        main(line)
    printed = capsys.readouterr()
    assert not ended.value.code, printed.err
    assert "Nothing was written" in printed.out or "would be" in printed.out
    after = {path: path.stat().st_mtime_ns for path in place.rglob("*") if "cache" not in path.parts}
    assert after.keys() == before.keys()
    assert {path for path in after if path.is_file() and after[path] != before[path]} == set()


def test_quiet_and_verbose(place, capsys):
    line = shlex.split("train --data mydata --batch-size 64 --dry-run")
    told = {}
    for voice in ("-q", "-v"):
        with pytest.raises(SystemExit):
            main(["evaluate", "runs/missing", voice])
        told[voice] = capsys.readouterr().err
        with pytest.raises(SystemExit):
            main([*line, voice])
        capsys.readouterr()
    assert told["-q"].startswith("error: ")
    assert "Traceback" not in told["-q"]
    assert "Traceback" in told["-v"]
    assert told["-v"].rstrip().endswith(told["-q"].rstrip())
