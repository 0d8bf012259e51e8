import json

import pytest

from hotbed.cli import main


def run_command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return ended.value.code


def test_writes_the_page_again(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model": {"name": "lr"}}))
    assert run_command(tmp_path) in (0, None)
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    assert "<h1>lr on data</h1>" in (tmp_path / "report.html").read_text()


def test_a_wrong_folder_is_one_line_of_error(tmp_path, capsys):
    assert run_command(tmp_path) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "config.json is missing" in printed.err
    assert "Traceback" not in printed.err


def test_several_runs_on_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model": {"name": name}}))
    assert run_command("a", "b") in (0, None)
    assert capsys.readouterr().out == "report: compare.html\n"
    assert "2 runs compared" in (tmp_path / "compare.html").read_text()
    assert run_command("a", "b", "--out", "both.html") in (0, None)
    assert (tmp_path / "both.html").read_text() == (tmp_path / "compare.html").read_text()
    assert run_command("a", "--out", "one.html") in (0, None)
    assert "<h1>a on data</h1>" in (tmp_path / "one.html").read_text()
    assert run_command("a", "c", "d") == 1
    assert "There is no run directory c" in (printed := capsys.readouterr().err)
    assert "There is no run directory d" in printed
