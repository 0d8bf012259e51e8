"""`hotbed checkpoint` as a person uses it."""

import json

import pytest
import torch

from hotbed.checkpoint import Policy, Saver, State
from hotbed.checkpoint.chain import find, folders_in
from hotbed.checkpoint.diff import DenseDiff, _dense, diff
from hotbed.cli import main
from tests.checkpoint.fakes import DictTables, state


@pytest.fixture
def hotbed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main([str(one) for one in arguments])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def run(tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path / "run" / "checkpoints", tables, Policy(full_every=3, keep=9))
    tables.write("user", *range(100))
    for step in range(1, 6):
        tables.write("user", step, value=step)
        saver.save(state(step, config={"tables": {"lr": step}}), wait=True)
    return tmp_path / "run"


def test_list(hotbed, run):
    code, out, _ = hotbed("checkpoint", "list", run)
    assert code == 0
    lines = [line for line in out.splitlines() if "0000000000" in line]
    assert [line.split("│")[3].strip() for line in lines] == [
        "full",
        "incremental",
        "incremental",
        "full",
        "incremental",
    ]
    assert [line.split("│")[6].strip() for line in lines] == ["100", "1", "1", "100", "1"]
    (run / "checkpoints" / "000000000002" / "manifest.json").write_text("")
    code, out, _ = hotbed("checkpoint", "list", run)
    assert code == 0
    assert "damaged" in out


def test_verify_finds_the_damaged_file(hotbed, run):
    code, out, _ = hotbed("checkpoint", "verify", run)
    assert code == 0
    assert "5 checkpoints are intact" in out
    path = next((run / "checkpoints" / "000000000004" / "rows").iterdir())
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    code, _, err = hotbed("checkpoint", "verify", run)
    assert code == 1
    assert f"{path} is damaged: its content does not match its checksum." in err
    assert "1 problem in" in err
    code, out, _ = hotbed("checkpoint", "verify", run / "checkpoints" / "000000000003")
    assert (code, "1 checkpoint is intact" in out) == (0, True)


def test_diff(hotbed, run):
    root = run / "checkpoints"
    code, out, _ = hotbed("checkpoint", "diff", root / "000000000001", run)
    assert code == 0
    assert "tables.lr: 1 -> 5" in out
    user = next(line for line in out.splitlines() if "user" in line)
    assert [cell.strip() for cell in user.split("│")[2:6]] == ["96", "4", "0", "0"]
    assert "dense weights: the same" in out
    code, out, _ = hotbed("checkpoint", "diff", run, root / "000000000001")
    assert code == 0


def test_dense_tensors_that_differ_are_named_with_the_largest_move():
    one = {"same": torch.ones(2), "moved": torch.zeros(2), "shaped": torch.ones(2), "old": torch.ones(1)}
    other = {"same": torch.ones(2), "moved": torch.tensor([0.5, -2.0]), "shaped": torch.ones(3), "new": torch.ones(1)}
    assert _dense(one, other) == [
        DenseDiff("moved", "changed", 2.0),
        DenseDiff("shaped", "shape [2] became [3]", None),
        DenseDiff("old", "only in the first", None),
        DenseDiff("new", "only in the second", None),
    ]


def test_diff_counts_added_and_gone_rows(hotbed, tmp_path):
    tables = DictTables()
    saver = Saver(tmp_path / "c", tables)
    tables.write("user", 1, 2, 3)
    saver.save(state(1), wait=True)
    tables.forget("user", 1)
    tables.write("user", 4, 5)
    saver.save(state(2), wait=True)
    _, out, _ = hotbed("checkpoint", "diff", tmp_path / "c" / "000000000001", tmp_path / "c" / "000000000002")
    user = next(line for line in out.splitlines() if "user" in line)
    assert [cell.strip() for cell in user.split("│")[2:6]] == ["2", "0", "2", "1"]


def test_all_rows_of_a_table_that_one_checkpoint_does_not_have_are_added_or_gone(tmp_path):
    entries = []
    for name, others in (("one", "old"), ("other", "new")):
        tables = DictTables(dims=(("user", 3), (others, 1)))
        tables.write("user", 1, value=1)
        tables.write(others, 4, 5)
        Saver(tmp_path / name, tables).save(state(1), wait=True)
        entries.append([find(tmp_path / name)])
    found = diff(*entries)
    assert found.shapes == {"old": "only in the first", "new": "only in the second"}
    counts = {name: (one.added, one.gone) for name, one in found.tables.items()}
    assert counts == {"user": (0, 0), "old": (0, 2), "new": (2, 0)}


def test_prune(hotbed, run):
    root = run / "checkpoints"
    code, out, _ = hotbed("checkpoint", "prune", run, "--keep", "1", "--dry-run")
    assert code == 0
    assert "3 checkpoints would be removed" in out
    assert len(folders_in(root)) == 5
    hotbed("checkpoint", "prune", run, "--keep", "1")
    assert [int(folder.name) for folder in folders_in(root)] == [4, 5]
    assert hotbed("checkpoint", "prune", run, "--keep", "0")[0] == 2


def test_prune_frees_what_killed_writers_left(hotbed, run):
    root = run / "checkpoints"
    for name in ("000000000001.gone", "000000000009.new"):
        (root / name).mkdir()
        (root / name / "rows.parquet").write_bytes(bytes(9))
    hotbed("checkpoint", "prune", run, "--keep", "9", "--dry-run")
    assert len(list(root.iterdir())) == 7
    hotbed("checkpoint", "prune", run, "--keep", "9")
    assert [int(path.name) for path in sorted(root.iterdir())] == [1, 2, 3, 4, 5]


def test_checkpoints_that_go_while_they_are_verified_are_no_problem(hotbed, run, monkeypatch):
    def vanish(*_):
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.rglob", vanish)
    assert hotbed("checkpoint", "verify", run)[0] == 0


def test_what_is_no_run_is_reported(hotbed, tmp_path):
    for command in ("list", "verify"):
        code, _, err = hotbed("checkpoint", command, tmp_path / "absent")
        assert code == 1
        assert "there is no" in err
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert "holds no checkpoint" in hotbed("checkpoint", "list", tmp_path)[2]


def test_help_teaches(hotbed):
    for command in ("list", "verify", "diff", "prune"):
        code, out, _ = hotbed("checkpoint", command, "--help")
        assert code == 0
        assert f"hotbed checkpoint {command} runs/" in out


def test_settings_that_differ_are_reported_from_the_first_to_the_second(tmp_path):
    tables = DictTables()
    for step, rate in ((1, 0.5), (2, 0.25)):
        document = {"config": {"dense": {"lr": rate, "optimizer": "adam"}}}
        Saver(tmp_path, tables).save(State(step, {"dense": {}}, document), wait=True)
    one, other = ([find(tmp_path / f"{step:012}")] for step in (1, 2))
    assert diff(one, other).settings == {"dense.lr": (0.5, 0.25)}
    assert diff(one, one).settings == {}
