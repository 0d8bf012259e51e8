from pathlib import Path

import pytest

import hotbed
from hotbed.checkpoint import Saver, State
from hotbed.errors import RunError
from hotbed.parallel.world import ALONE
from hotbed.run.folder import CONTENT, alone, check_free, default_run, make_run, read_json
from hotbed.telemetry.observer import Best, Progress
from hotbed.train.checkpoint import BestWeights, checkpoint_root


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("criteo-like:5000", "fm-criteo-like-5000-1"),
        ("data/my set/", "fm-my-set-1"),
        ("..", "fm-..-1"),
        ("/", "fm-data-1"),
    ],
)
def test_default_names(tmp_path, dataset, name):
    assert default_run("fm", dataset, tmp_path) == tmp_path / name


def test_default_names_count_up(tmp_path):
    (tmp_path / "fm-adult-1").mkdir()
    (tmp_path / "fm-adult-2").write_text("")
    assert default_run("fm", "adult", tmp_path).name == "fm-adult-3"


def a_run(folder: Path) -> Path:
    make_run(folder)
    for name in CONTENT:
        if "." in name:
            (folder / name).write_text("{}")
        else:
            (folder / name).mkdir()
            (folder / name / "x").write_text("")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_run_is_kept_unless_told_otherwise(tmp_path):
    folder = a_run(tmp_path / "a" / "run")
    with pytest.raises(RunError, match=r"already holds a run\. --overwrite .* --resume"):
        make_run(folder)
    make_run(folder, overwrite=True)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_what_is_no_run_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunError, match="holds no run"):
        make_run(tmp_path, overwrite=True)
    with pytest.raises(RunError, match="is a file"):
        check_free(tmp_path / "thesis.tex", overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_is_free(tmp_path):
    check_free(tmp_path)
    check_free(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    make_run(tmp_path / "absent")
    assert list((tmp_path / "absent").iterdir()) == []


def test_a_run_that_was_killed_at_once_left_its_folder_free(tmp_path):
    (tmp_path / "config.json.tmp").write_text("{")
    check_free(tmp_path)
    make_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def unbegun(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "data.json", "forecast.json"):
        (folder / name).write_text("{}")
    (folder / "metrics.jsonl").write_text("")
    (folder / "tensorboard").mkdir()
    return folder


def test_a_run_that_died_before_its_first_step_does_not_block_its_name(tmp_path):
    check_free(unbegun(tmp_path / "a"))
    (tmp_path / "a" / "summary.json").write_text('{"steps": 0}')
    make_run(tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == []
    with alone(tmp_path / "b"):
        unbegun(tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [("metrics.jsonl", "{}\n"), ("summary.json", '{"steps": 1}'), ("summary.json", "{"), ("notes.txt", ""),
     ("checkpoints", None), ("watched.jsonl", "{}\n")],
)  # fmt: skip
def test_what_a_run_has_done_blocks_its_name(tmp_path, name, text):
    folder = unbegun(tmp_path / "a")
    (folder / name).mkdir() if text is None else (folder / name).write_text(text)
    with pytest.raises(RunError, match="already holds a run"):
        make_run(folder)
    assert (folder / name).exists()


def test_settings_of_the_user_are_no_run_that_died(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="already holds a run"):
        make_run(tmp_path)


@pytest.mark.parametrize("removed", range(len(CONTENT)))
def test_who_is_killed_while_removing_an_old_run_can_start_again(tmp_path, monkeypatch, removed):
    for name in CONTENT:
        (tmp_path / name).write_text("{}")
    unlink, left = Path.unlink, [removed]

    def killed(path, missing_ok=False):
        if path.exists():
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path, overwrite=True)
    monkeypatch.undo()
    make_run(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_one_process_at_a_time(tmp_path):
    folder = tmp_path / "runs" / "a"
    with alone(folder):
        with pytest.raises(RunError, match="another process is training in"), alone(folder):
            pass
        with alone(tmp_path / "runs" / "b"):
            pass
    with alone(folder):
        assert list(folder.iterdir()) == []
    assert not folder.exists()  # what was made for nothing goes
    with alone(folder):
        (folder / "config.json").write_text("{}")
    assert folder.is_dir()


def test_files_of_a_run_are_read_or_told(tmp_path):
    with pytest.raises(RunError, match=r"is not a run: config\.json cannot be read"):
        read_json(tmp_path / "config.json")
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RunError, match="is damaged"):
            read_json(tmp_path / "config.json")


def test_best_weights_stay_as_long_as_a_checkpoint_counts_on_them(tmp_path):
    """Of three, one is named by a checkpoint, one is the best by now, and one is neither."""
    for step in (1, 5, 9):
        (tmp_path / "best" / str(step)).mkdir(parents=True)
    tables = hotbed.EmbeddingTables({"a": hotbed.Table(10, 4)})
    document = {"progress": {"best": {"auc": 0.6, "epoch": 1, "step": 5, "samples": 50}}}
    Saver(checkpoint_root(tmp_path), tables).save(State(6, {}, document), wait=True)
    BestWeights(tmp_path, ALONE).tidy(Progress(best=Best(0.7, 1, 9, 90)))
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["5", "9"]
