"""One grammar for all commands: a name means one thing, examples run, `--json` prints what docs/json.md says."""

import inspect
import json
import shlex
import warnings
from importlib import import_module

import pytest
from typer.models import OptionInfo

from hotbed.cli import COMMANDS, main, options
from hotbed.cli.describe import describe_commands
from hotbed.cli.options import COMPARED, RENAMED
from hotbed.cli.schemas import SCHEMAS
from tests.cli.conftest import cache, hotbed  # noqa: F401  fixtures
from tests.sessions import AGAIN, DEMO_ROWS, EXAMPLES, WIDTH, make_place

TEXTS = {one.name: one for one in describe_commands()}
BY_NAME = {}
for text in TEXTS.values():
    for parameter in text.parameters:
        BY_NAME.setdefault(parameter.name.rstrip("."), []).append((text.name, parameter))
WRITE_NOTHING = {"evaluate", "models", "data describe", "data list", "plan", "simulate", "explain", "verify", "bench",
                 "topo", "top", "checkpoint list", "checkpoint verify", "checkpoint diff", "serve"}  # fmt: skip


def load_jsonschema():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("jsonschema")


def single(parameter):
    """An option that takes several values, as the option of one value that it compares."""
    if not parameter.help.endswith(COMPARED):
        return parameter.help, str(parameter.default), parameter.is_option, parameter.type.removeprefix("list of ")
    return parameter.help.removesuffix(COMPARED), str(parameter.default), parameter.is_option, "compared"


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


def test_an_option_whose_metavar_is_its_name_is_named():
    """Else typer 0.27 makes it --DEVICE."""
    shared = [(name, kind.__metadata__[0]) for name, kind in vars(options).items() if hasattr(kind, "__metadata__")]
    own = [
        (name, one.default)
        for entry in COMMANDS.values()
        for command in [getattr(import_module(entry.module), entry.attribute)]
        for name, one in (inspect.signature(command).parameters.items() if inspect.isfunction(command) else ())
    ]
    checked = 0
    for name, one in (*shared, *own):
        if isinstance(one, OptionInfo) and one.metavar is not None:
            checked += 1
            is_named = one.param_decls or str(one.default).startswith("--")  # in an annotation the first is a name
            assert is_named or one.metavar.lower() != name.lower(), name
    assert checked > 20


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
    """A folder with what the examples read."""
    folder = tmp_path_factory.mktemp("examples")
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as changed:
        changed.setenv("HOTBED_CACHE", str(folder / "cache"))
        changed.setenv("COLUMNS", str(WIDTH))
        changed.setattr("hotbed.data.embedded.TRAIN_ROWS", DEMO_ROWS)
        changed.chdir(folder)
        make_place(folder)
        yield folder


def test_every_command_has_an_example_here():
    assert EXAMPLES.keys() | {"serve"} == TEXTS.keys()  # tests/serve starts `hotbed serve`
    for name, line in EXAMPLES.items():
        assert line in TEXTS[name].examples, name


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_and_its_json_is_as_documented(place, capsys, name):
    jsonschema, found = load_jsonschema(), []
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
    jsonschema = load_jsonschema()
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
