"""`hotbed data make` from the outside."""

import pytest

from hotbed.data.dataset import Dataset
from tests.cli.test_data import run


def test_names_carry_rows(tmp_path, capsys):
    code, out, err = run(capsys, "make", "avazu-like:300", "--out", tmp_path / "d")
    assert code == 0, err
    assert "300 + 300 + 300 rows; best possible AUC: train 0." in out
    assert Dataset.open(tmp_path / "d").schema.label == "click"


def test_days(tmp_path, capsys):
    code, out, err = run(
        capsys, "make", "criteo-1tb-like:300", "--days", 3, "--out", tmp_path / "d", "--text", tmp_path / "raw"
    )
    assert code == 0, err
    assert "900 rows, 3 days" in out
    assert sorted(path.name for path in (tmp_path / "raw").glob("day*")) == [f"day_0{day}.tsv" for day in range(3)]
    assert Dataset.open(tmp_path / "d").schema.splits["test"].files == ("test/day-00002.arrow",)
    again, _, _ = run(capsys, "make", "criteo-1tb-like:300", "--days", 3, "--text", tmp_path / "raw")
    assert again == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "avazu", "--out", "x"], "these can: criteo-like"),
        (["make", "avazu-like:many", "--out", "x"], "as in avazu-like:250000"),
        (["make", "avazu-like:0", "--out", "x"], "positive integer"),
        (["make", "avazu-like:10", "--rows", "10", "--out", "x"], "Leave one out"),
        (["make", "avazu-like:10", "--days", "31", "--out", "x"], "30 rows cannot span 31 days; take 1 to 30"),
        (["make", "avazu-like:10", "--days", "0", "--out", "x"], "cannot span 0 days"),
        (["make", "criteo-1tb-bags-like:10", "--text", "x", "--out", "y"], "no text format"),
        (["make", "criteo-like:99999999999999999999", "--out", "x"], "it holds 2,147,483,647 at most"),
        (["make", "criteo-1tb-bags-like:100000000", "--out", "x"], "it holds 21,474,836 at most"),
        (["make", "avazu-like:99999999999999", "--text", "x"], "GB free; the text of"),
    ],
)
def test_mistakes(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code in (2, 3)
    assert message in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []
