"""`hotbed bench` as a user meets it."""

from __future__ import annotations

import csv

import pytest
import typer
from typer.testing import CliRunner

from hotbed.bench.systems import KINDS
from hotbed.cli.bench import bench_command
from hotbed.errors import ConfigError
from tests.bench.fakes import FakeSystem

app = typer.Typer()
app.command("bench")(bench_command)
SMALL = (
    "--rows-scale",
    "0.0005",
    "--batch-size",
    "64",
    "--dim",
    "8",
    "--steps",
    "10",
    "--warmup",
    "2",
    "--cache",
    "0.05",
)


def run(*arguments: object):
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_hotbed_beside_its_peer(tmp_path):
    path = tmp_path / "bench.csv"
    result = run(*SMALL, "--systems", "torch,hotbed-hbm,hotbed-cached", "--mlp", "0,8", "--csv", path)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["system"], row["dense"]) for row in rows] == [
        (system, dense) for dense in ("0", "8") for system in ("torch", "hotbed-hbm", "hotbed-cached")
    ]
    cached = rows[2]
    assert float(cached["misses_per_step"]) > 0
    assert float(cached["evictions_per_step"]) > 0
    assert 0 <= float(cached["stall_share"]) < 1
    assert rows[1]["misses_per_step"] == ""
    assert rows[0]["rule"] == "sgd"
    assert "rowwise_adagrad, dim 8, batch 64, MLP 8, 5 % cached" in result.stdout
    assert "commit" in result.stdout


def rows_of(path, *options):
    result = run(*SMALL, "--mlp", "0", "--csv", path, *options)
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(path.read_text().splitlines())), result


def test_every_row_is_written_beforehand_unless_the_start_is_cold(tmp_path):
    created = []
    for options in ((), ("--cold",)):
        (row,), _ = rows_of(tmp_path / f"{len(created)}.csv", "--systems", "hotbed-cached", *options)
        created.append(float(row["created_per_step"]))
        assert row["cold"] == str(bool(options))
    assert created[0] == 0
    assert created[1] > 0


def test_all_kinds_of_ids(tmp_path):
    path = tmp_path / "bench.csv"
    rows, result = rows_of(
        path, "--systems", "torch,hotbed-cached", "--id-kind", "single,bags,varying,dynamic", "--cache", "0.3"
    )
    assert [(row["ids"], row["system"]) for row in rows] == [
        (ids, system) for ids in ("single", "bags", "varying", "dynamic") for system in ("torch", "hotbed-cached")
    ]
    assert [row["ids_per_sample"] for row in rows[::2]] == ["26", "214", "214", "26"]
    assert all(float(row["misses_per_step"]) > 0 for row in rows[1::2])
    assert all(row["created_per_step"] in ("", "0.0") for row in rows)
    assert all(row["gpu_ms"] == "" for row in rows)
    assert "batch 64, varying, embedding step" in result.stdout


def test_all_outputs(tmp_path):
    path = tmp_path / "bench.csv"
    run(*SMALL, "--systems", "hotbed-hbm", "--mlp", "0,8", "--output", "stack,concat,dict", "--csv", path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    outputs = [(row["output"], row["dense"]) for row in rows]
    assert outputs == [(output, dense) for output in ("stack", "concat", "dict") for dense in ("0", "8")]


def test_a_sweep_of_the_cache_is_drawn(tmp_path):
    path = tmp_path / "bench.csv"
    rows, result = rows_of(path, "--systems", "hotbed-hbm,hotbed-cached", "--cache", "0.05,0.2,0.8")
    assert [row["cache"] for row in rows] == ["", "0.05", "", "0.2", "", "0.8"]
    misses = [float(row["misses_per_step"]) for row in rows[1::2]]
    assert misses[0] > max(misses[1:])  # these two hold most of what ten steps read
    drawing = result.stdout[result.stdout.index("embedding step: ms a step") :]
    assert "share of the rows on the device" in drawing
    assert "* hotbed-hbm" in drawing
    assert "5 %" in drawing
    assert "80 %" in drawing


def test_rows_on_an_ssd(tmp_path):
    folder = tmp_path / "fast"
    options = ("--systems", "hotbed-hbm,hotbed-cached", "--memory-share", "0.3", "--ssd-folder", folder)
    rows, result = rows_of(tmp_path / "bench.csv", *options)
    assert [row["memory"] for row in rows] == ["", "0.3"]
    assert "30 % in memory" in result.stdout
    assert 0 < float(rows[1]["memory_share"]) < 1
    assert "of the missed rows found in memory" in result.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("forked_ranks")
def test_ranks(tmp_path):
    rows, result = rows_of(tmp_path / "bench.csv", "--systems", "torch,hotbed-cached", "--ranks", "2", "--cache", "0.3")
    assert [row["ranks"] for row in rows] == ["", "2"]
    assert float(rows[1]["misses_per_step"]) > 0
    assert "2 ranks" in result.stdout


def test_a_missing_peer_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*SMALL, "--systems", "fbgemm-cpu", "--dim", "4,8")
    assert result.stderr.splitlines().count("fbgemm_gpu: not installed, skipped") == 1
    assert result.exit_code == 0


def test_a_system_that_breaks_shows_where_and_fails_the_command(monkeypatch):
    kind = KINDS["torch"]._replace(make=lambda setting: FakeSystem(setting, wrong="raises"))
    monkeypatch.setitem(KINDS, "torch", kind)
    result = run(*SMALL, "--systems", "torch")
    assert result.exit_code == 1
    assert "torch, rowwise_adagrad, dim 8, batch 64, embedding step: skipped, failed: RuntimeError" in result.stderr
    assert result.stderr.count("Traceback") == 1


def test_a_cache_too_small_is_told_and_is_no_failure():
    result = run(*SMALL[:-1], "0.001", "--systems", "hotbed-cached", "--mlp", "0")
    assert result.exit_code == 0
    assert "slots" in result.stderr
    assert "Traceback" not in result.stderr


def test_all_mistakes_at_once():
    more = ("--look-ahead", "234", "--policy", "lucky", "--device", "cpu")
    with pytest.raises(ConfigError) as caught:
        run(
            "--dim",
            "8,x",
            "--optimizer",
            "adamw",
            "--mlp",
            "-1",
            "--cache",
            "0.1,x,2",
            "--window",
            "234",
            "--id-kind",
            "dynamic,jagged",
            "--output",
            "tuple",
            "--memory-share",
            "30%",
            "--batch-size",
            "2",
            "--ranks",
            "3",
            "--zipf",
            "1",
            *more,
        )
    message = str(caught.value)
    for part in (
        "--dim takes",
        "adamw",
        "--mlp takes",
        "--cache is a share, above 0 and at most 1, not 2",
        "--cache takes shares separated by commas, not x",
        "--window is at most",
        "--look-ahead is at most 233",
        "lucky",
        "--id-kind is one or more of single, bags, varying, dynamic, not jagged",
        "--output is one or more of stack, concat, dict, not tuple",
        "--memory-share is a share of the rows, and dynamic ids",
        "--ranks is 0 for none",
        "--zipf must be above 0 and not 1",
    ):
        assert part in message


def test_steps_are_rounded_up_to_groups(tmp_path):
    path = tmp_path / "bench.csv"
    run(*SMALL, "--systems", "hotbed-hbm", "--mlp", "0", "--steps", "11", "--csv", path)
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert row["steps"] == "20"
