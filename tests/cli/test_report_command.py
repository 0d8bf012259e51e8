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
    assert run_command(tmp_path) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert "config.json is missing" in printed.err
    assert "Traceback" not in printed.err
