import csv
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hotbed.bench import run
from hotbed.bench.results import CsvFile, Result, columns, commit, environment
from hotbed.bench.run import copy_speed, step_bytes
from hotbed.bench.setting import KAGGLE_ROWS
from hotbed.bench.timing import Timing
from hotbed.errors import ConfigError


def result_of(setting, system="hotbed-cached"):
    timing = Timing([2.0, 4.0, 6.0], {"hits": 5.0, "misses": 2.0}, 0.25)
    return Result(system, "sgd", setting, timing, 2**30, 8e6, 4e9, "fbgemm-cpu", 0.5)


def test_a_row_has_the_figures(setting):
    row = result_of(setting).row()
    assert list(row) == columns(setting)
    assert row["ms_p50"] == 4
    assert row["samples_per_s"] == 16_000
    assert row["gb_per_s"] == 2
    assert row["share_of_copy"] == 0.5
    assert row["hits_per_step"] == 5
    assert row["created_per_step"] == ""
    assert row["stall_share"] == 0.25
    assert row["cache"] == 0.2
    assert row["benchmark"] == "embedding_step"


def test_a_row_without_a_cache_names_none(setting):
    row = result_of(setting, "hotbed-hbm").row()
    assert (row["cache"], row["policy"], row["window"]) == ("", "", "")


def test_speed_over_bytes_is_for_the_embedding_alone(setting):
    row = result_of(replace(setting, dense=8)).row()
    assert row["gb_per_s"] == ""
    assert row["benchmark"] == "training_step"


def test_rows_are_appended_under_one_header(setting, tmp_path):
    path = tmp_path / "bench.csv"
    names = [*columns(setting), *environment(setting.device)]
    for _ in range(2):
        CsvFile(path, names).add({**result_of(setting).row(), **environment(setting.device)})
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 2
    assert rows[0] == rows[1]
    assert rows[0]["ms_p80"] == "5.2"
    assert rows[0]["torch"]


def test_a_file_of_other_columns_is_left_alone(setting, tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="other columns"):
        CsvFile(path, columns(setting))
    assert path.read_text() == "a,b\n1,2\n"


def test_a_folder_that_is_not_there_is_told_before_timing(setting, tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        CsvFile(tmp_path / "no" / "bench.csv", columns(setting))


def test_the_commit_is_that_of_the_sources(tmp_path):
    inside = tmp_path / "repo" / "site-packages"
    inside.mkdir(parents=True)
    assert commit(inside) == "unknown"
    git = ["git", "-C", str(inside.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    assert commit(inside) == "unknown"  # installed within another project
    name = commit(inside.parent)
    assert len(name) >= 7
    Path(inside.parent, "file").write_text("new")
    subprocess.run([*git, "add", "file"], check=True, timeout=60)
    assert commit(inside.parent) == f"{name}-dirty"


def test_the_fewest_bytes_of_the_anchor_step(setting):
    """Dim 128, batch 16,384, 78.5k distinct rows: about 0.13 ms at 4.2 TB/s."""
    anchor = replace(setting, dim=128, batch=16384, rows=KAGGLE_ROWS)
    assert step_bytes(anchor, 78_500) / 4.2e12 == pytest.approx(0.13e-3, rel=0.05)
    assert anchor.record_bytes == 4 * 129
    assert replace(anchor, optimizer="adam").record_bytes == 4 * (3 * 128 + 1)


def test_the_copy_limit_is_measured(setting, monkeypatch):
    monkeypatch.setattr(run, "_TRIALS", 1)
    assert 1e8 < copy_speed(setting.device) < 1e13
