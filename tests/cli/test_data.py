"""`hotbed data` from the outside."""

import json
import re

import pytest

from hotbed.cli import main
from hotbed.data import catalog
from hotbed.data.catalog import PublicSet, RemoteFile
from hotbed.data.dataset import Dataset
from tests.data.small import make_dataset
from tests.data.test_download import CONTENT, server  # noqa: F401 a fixture


def run(capsys, *arguments):
    """(exit code, stdout, stderr) of one command line."""
    with pytest.raises(SystemExit) as stopped:
        main(["data", *map(str, arguments)])
    captured = capsys.readouterr()
    return stopped.value.code or 0, captured.out, captured.err


def test_describe(tmp_path, capsys):
    make_dataset(tmp_path / "d", {"train": [30], "test": [10]}, bags=True)
    code, out, _ = run(capsys, "describe", tmp_path / "d")
    assert code == 0
    assert re.search(r"train\W+30\W+33.3 %", out)
    assert re.search(r"tags\W+1,000\W+999\W", out)
    assert "all together" in out
    code, out, _ = run(capsys, "describe", tmp_path / "d", "--json")
    assert code == 0
    assert json.loads(out)["splits"]["test"]["rows"] == 10
    code, _, err = run(capsys, "describe", tmp_path / "nowhere")
    assert code == 1
    assert err.startswith("error:")
    assert "neither an embedded dataset" in err


def test_a_path_is_shown_as_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_dataset(tmp_path / "d[" / "bold]:100:", {"train": [30]})
    code, out, err = run(capsys, "describe", "d[/bold]:100:")
    assert code == 0, err
    assert "d[/bold]:100:" in out


def test_list_names_every_set_and_licence(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    for entry in catalog.CATALOG:
        assert entry.name in out
    assert "criteo-like" in out
    assert "CC BY 4.0" in out


def test_make(tmp_path, capsys):
    code, out, _ = run(
        capsys, "make", "criteo-like", "--rows", 200, "--out", tmp_path / "d", "--tsv", tmp_path / "raw.tsv"
    )
    assert code == 0
    assert "best possible AUC" in out
    assert Dataset.open(tmp_path / "d").schema.splits["train"].rows == 200
    lines = (tmp_path / "raw.tsv").read_text().splitlines()
    assert len(lines) == 600
    assert all(line.count("\t") == 39 for line in lines)
    code, _, err = run(capsys, "make", "criteo-like", "--rows", 200, "--out", tmp_path / "d")
    assert code == 2
    assert "--overwrite" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "criteo"], "cannot be generated"),
        (["make", "criteo-like"], "--out DIR"),
        (["make", "criteo-like", "--rows", "0", "--out", "x"], "--rows is 0"),
        (["get", "criteo"], "not in the catalog"),
        (["get", "avazu", "--accept-licence"], "account at its publisher"),
        (["get", "frappe", "--day", "1"], "is not"),
        (["get", "movielens-1m"], "must be accepted"),
    ],
)
def test_mistakes(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code in (1, 2)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_get(server, tmp_path, capsys, monkeypatch):  # noqa: F811 the fixture
    entry = PublicSet("toy", "a toy", "https://example.org", "free", (server.file(),), then=("unzip it",))
    plain = RemoteFile("plain.bin", f"{server.root}/file")
    monkeypatch.setattr(catalog, "CATALOG", (entry, PublicSet("plain", "", "", "", (plain,))))
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "get", "toy", "--accept-licence")
    assert code == 0
    assert (tmp_path / "toy" / "file.bin").read_bytes() == CONTENT
    assert "licence: free" in err
    assert "md5 checked" in err
    assert "unzip it" in err
    code, _, err = run(capsys, "get", "plain", "--accept-licence", "--out", tmp_path / "elsewhere")
    assert code == 0
    assert "no checksum is published" in err
    assert (tmp_path / "elsewhere" / "plain.bin").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--splits", "train=0.8,test=oops"), "cannot be read at 'test=oops'"),
        (("--splits", "days:test=1"), "--splits days:... needs a time column"),
        (("--ids-mode", "hash"), "--ids-mode hash needs --hash-rows N"),
        (("--hash-rows", 9), "--hash-rows 9 belongs to --ids-mode hash"),
        (("--ids-mode", "raw", "--min-count", 3), "--min-count 3 belongs to a vocabulary"),
        (("--keep-negatives", 0.5, "--splits", "train=10,test=5"), "--keep-negatives needs to know the split"),
        (("--memory", "1KiB"), "--memory 1.0 KiB is too little"),
        (("--workers", 0), "--workers 0 is below 1"),
        (("--workers", 2, "--ray"), "--workers 2 is for threads of one machine"),
        (("--out", "there"), "there exists already"),
        (("--delimiter", ";", "--format", "libsvm"), "--delimiter ';' is for csv files"),
    ],
)
def test_a_dry_run_refuses_what_prepare_refuses(hotbed, tmp_path, options, said):
    (tmp_path / "raw.csv").write_text("label,user\n" + "1,a\n0,b\n" * 20)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    found = [hotbed("prepare", "raw.csv", "--out", "made", *options, *dry) for dry in (("--dry-run",), ())]
    assert [one.code for one in found] == [2, 2]
    assert all(said in " ".join(one.err.split()) for one in found)
