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
SMALL = ("--rows-scale", "0.0005", "--batch", "64", "--dim", "8", "--steps", "10", "--warmup", "2", "--cache", "0.05")


def run(*arguments: object):
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_hotbed_beside_its_peer(tmp_path):
    path = tmp_path / "bench.csv"
    result = run(*SMALL, "--systems", "torch,hotbed-hbm,hotbed-cached", "--dense", "0,8", "--csv", path)
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


def test_a_warm_store_creates_no_rows(tmp_path):
    created = []
    for options in ((), ("--warm-store",)):
        path = tmp_path / f"{len(created)}.csv"
        run(*SMALL, "--systems", "hotbed-cached", "--dense", "0", "--csv", path, *options)
        (row,) = csv.DictReader(path.read_text().splitlines())
        created.append(float(row["created_per_step"]))
    assert created[0] > 0
    assert created[1] == 0


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
    result = run(*SMALL[:-1], "0.001", "--systems", "hotbed-cached", "--dense", "0")
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
            "--dense",
            "-1",
            "--cache",
            "2",
            "--steps",
            "0",
            "--window",
            "0",
            *more,
        )
    message = str(caught.value)
    for part in (
        "--dim takes",
        "adamw",
        "--dense takes",
        "--cache is",
        "--steps must",
        "--window must",
        "--look-ahead is at most 233",
        "lucky",
    ):
        assert part in message


def test_steps_are_rounded_up_to_groups(tmp_path):
    path = tmp_path / "bench.csv"
    run(*SMALL, "--systems", "hotbed-hbm", "--dense", "0", "--steps", "11", "--csv", path)
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert row["steps"] == "20"
