"""Dynamic ids from raw logs to scores, in the words of a user."""

import json
import re

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

SETS = ("model.dim=4", "model.options.hidden=[8]", "train.device=cpu", "data.batch_size=25")
SMALL = [part for one in SETS for part in ("--set", one)]
RULES = ("--dynamic", "--admit", "after 2", "--expire", "unused 30 steps, every 5")


def write_log(path, day, rows=500):
    lines = ["click,user,price"]
    for n in range(rows):
        user = (n * 7919 + day * 40) % (61 + 20 * day)
        lines.append(f"{int(user % 3 == 0)},u{user},{n % 13}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def days(hotbed, tmp_path):
    """Two days of one log; the second has ids that the first has not."""
    for day in (1, 2):
        made = hotbed(
            *("prepare", write_log(tmp_path / f"{day}.csv", day), "--out", tmp_path / f"day{day}", "--ids-mode", "raw"),
            *("--splits", "train=400,test=100"),
        )
        assert made.code == 0, made.err
        assert "dynamic" in made.out
        assert f"hotbed train --data {tmp_path / f'day{day}'} --dynamic" in made.out
    return tmp_path / "day1", tmp_path / "day2"


def test_from_raw_ids_to_scores(hotbed, days, tmp_path):
    run = tmp_path / "run"
    result = hotbed("train", "--data", days[0], "--epochs", 3, "--out", run, *SMALL, *RULES)
    assert result.code == 0, result.err
    assert re.search(r"400 train samples, dynamic ids in 1 tables with a cache of \d+ rows", result.err)
    final = json.loads((run / "summary.json").read_text())["final"]["test"]
    assert f"{final['auc']:.4f}" in hotbed("evaluate", run).out
    assert hotbed("evaluate", run, "--data", days[1]).code == 0  # raw ids mean the same in every log
    assert hotbed("evaluate", run, "--data", days[1], "--hbm", "16KiB", "--batch-size", 20).code == 0

    assert hotbed("predict", run, days[1], "--out", tmp_path / "a.parquet").code == 0
    assert hotbed("predict", run, tmp_path / "2.csv", "--out", tmp_path / "b.parquet").code == 0
    ours, theirs = (pq.read_table(tmp_path / f"{name}.parquet")["score"].to_pylist() for name in "ab")
    assert ours == pytest.approx(theirs[400:], abs=1e-6)

    assert hotbed("checkpoint", "verify", run).code == 0
    assert "user" in hotbed("checkpoint", "diff", run, run).out


def test_raw_ids_need_dynamic_tables(hotbed, days):
    result = hotbed("train", "--data", days[0], *SMALL)
    assert result.code == 2
    assert "tables.dynamic: must be true, or a list with user" in result.err
    assert "--ids-mode vocabulary or hash" in result.err


def test_rules_cannot_change_on_the_way(hotbed, days, tmp_path):
    run = tmp_path / "run"
    assert hotbed("train", "--data", days[0], "--out", run, *SMALL, *RULES).code == 0
    for change in (("--admit", "after 3"), ("--expire", ""), ("--set", "tables.dynamic=[user]")):
        result = hotbed("train", "--resume", run, "--epochs", 2, *change)
        assert result.code == 2
        assert "cannot be changed with --resume" in result.err
    result = hotbed("train", "--resume", run, "--epochs", 2, "--hbm", "32KiB")
    assert result.code == 0, result.err


def test_a_warm_start_from_dynamic_ids_and_from_a_vocabulary(hotbed, days, tmp_path):
    vocabulary = tmp_path / "vocabulary"
    assert hotbed("prepare", tmp_path / "1.csv", "--out", vocabulary, "--splits", "train=400,test=100").code == 0
    ids = set(pq.read_table(vocabulary / "counts" / "user.parquet")["id"].to_pylist())
    for data, flags in ((vocabulary, ()), (days[0], RULES)):
        old, new = tmp_path / f"old-{data.name}", tmp_path / f"new-{data.name}"
        assert hotbed("train", "--data", data, "--out", old, "--epochs", 2, *SMALL, *flags).code == 0
        result = hotbed("train", "--data", days[1], "--warm-start", old, "--dynamic", "--out", new, *SMALL)
        assert result.code == 0, result.err
        carried = json.loads((new / "warm_start.json").read_text())["rows"]["user"]
        assert carried > 20
        assert carried <= len(ids)
        found = set(load_file(new / "model" / "tables.safetensors")["user.id"].tolist())
        assert len(ids & found) >= carried  # they kept their rows under the ids of the raw log
        assert len(found - ids) > 0


def test_mistakes_come_together(hotbed):
    result = hotbed(
        *("train", "--dynamic", "--admit", "sometimes", "--expire", "unused", "--policy", "static", "--cache", "2")
    )
    assert result.code == 2
    assert "4 settings are wrong" in result.err
    for path in ("tables.admit", "tables.expire", "tables.policy", "tables.cache"):
        assert f"- {path}: must be" in result.err
    result = hotbed("train", "--admit", "after 3")
    assert "set tables.dynamic too (--dynamic)" in result.err


def test_help_teaches_the_rules(hotbed):
    text = hotbed("train", "--help").out
    for word in ("--dynamic", "after 3, sketch 64MiB", "probability 0.1", "unused 7d", "half-life 10000"):
        assert word in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--hash-rows", 9), "raw ids get rows in training"),
        (("--min-count", 3), "hotbed train --dynamic --admit 'after 3'"),
    ],
)
def test_what_raw_ids_do_not_have(hotbed, tmp_path, flags, told):
    log = write_log(tmp_path / "log.csv", 1)
    result = hotbed("prepare", log, "--out", tmp_path / "data", "--ids-mode", "raw", *flags)
    assert result.code == 2
    assert told in " ".join(result.err.split())


def test_a_trace_of_raw_ids(hotbed, days):
    result = hotbed("simulate", days[0], "--batch-size", 50, "--cache", "0.9", "--policy", "lfu,static")
    assert result.code == 0, result.err
