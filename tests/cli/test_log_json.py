"""`--log-json`: every line of stderr is a JSON object, and stdout is as without it."""

import json
import logging
import warnings
from datetime import datetime

import pytest

from hotbed.cli.console import err, is_log_json, is_quiet, progress_bar, speak

TINY = ("--data", "criteo-like:2000", "--batch-size", "64", "--epochs", "1", "--seed", "1")
RAW = "click,user,price\n" + "".join(f"{n % 2},u{n % 5},{n}\n" for n in range(200))


def lines_of(text):
    """The objects, which all have the fields that a collector needs."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert datetime.fromisoformat(one["time"]).tzinfo is not None
        assert one["level"] in ("info", "warning", "error")
        assert one["event"]
    return found


@pytest.fixture(autouse=True)
def plain_again():
    yield
    speak()


def test_training(hotbed):
    result = hotbed("train", *TINY, "--out", "b", "--json", "--log-json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["finished"] is True
    lines = lines_of(result.err)
    records = [one for one in lines if one["event"] in ("train", "eval")]
    with open("b/metrics.jsonl") as file:
        logged = [json.loads(line) for line in file]
    assert [one["step"] for one in records] == [one["step"] for one in logged]
    assert [one.get("loss") for one in records] == [one.get("loss") for one in logged]
    assert next(one for one in lines if one["event"] == "begin")["steps_planned"] == logged[-1]["step"]


def test_the_result_is_as_without_it(hotbed, tmp_path):
    (tmp_path / "raw.csv").write_text(RAW)
    hotbed("prepare", "raw.csv", "--label", "click", "--out", "first")  # the first one may say that it compiled kernels
    plain = hotbed("prepare", "raw.csv", "--label", "click", "--out", "a")
    result = hotbed("prepare", "raw.csv", "--label", "click", "--out", "b", "--log-json")
    assert (plain.code, result.code) == (0, 0)
    assert len(result.out.splitlines()) == len(plain.out.splitlines())
    assert result.out.splitlines()[0].replace("b", "a") == plain.out.splitlines()[0].replace("b", "a")
    stages = [one["stage"] for one in lines_of(result.err) if one["event"] == "progress"]
    assert stages[0] == "reading"
    assert "writing" in stages


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("evaluate runs/missing", 1, "runs/missing"), ("train --epoch 3", 2, "--epoch"), ("trian", 2, "trian"),
        ("train --set model.dmi=3 --set model.mid=4", 2, "2 settings are wrong:\n"),
        ("train --batch-size x", 2, "--batch-size"),
        ("plan criteo-like:2000 --cache 0.00001 --calibrate no --no-curve", 3, None),
    ],
)  # fmt: skip
def test_errors_are_one_object(hotbed, line, code, said):
    result = hotbed(*line.split(), "--log-json")
    assert result.code == code
    lines = lines_of(result.err)
    if said is not None:
        assert [(one["event"], one["level"], one["exit_code"]) for one in lines] == [("error", "error", code)]
        assert said in lines[0]["message"]
        assert "traceback" not in lines[0]


def test_a_bug_has_its_traceback(hotbed, monkeypatch):
    def bug(*_, **__):
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("hotbed.cli.train.read_config", bug)
    result = hotbed("train", "--log-json")
    (line,) = lines_of(result.err)
    assert (result.code, line["message"]) == (1, "ZeroDivisionError: by hand")
    assert "read_config" in line["traceback"]


def test_levels_logging_and_warnings(capsys):
    speak(log_json=True)
    err().print("warning: a [b] of", "two\nlines")
    err().print("note: little")
    logging.getLogger("hotbed.serve").error("what %s", "now")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("from Python", stacklevel=1)
    with progress_bar("copy", "bytes") as report:
        for done in range(1, 4):
            report("", done, 3)
    speak(quiet=True, log_json=True)
    err().print("unseen")
    err(always=True).print("seen")
    speak()
    err().print("plain")
    logging.getLogger("hotbed.serve").debug("unseen")
    *lines, last = capsys.readouterr().err.splitlines()
    found = lines_of("\n".join(lines))
    assert [(one["level"], one.get("message")) for one in found[:3]] == [
        ("warning", "a [b] of two\nlines"), ("info", "little"), ("error", "what now"),
    ]  # fmt: skip
    assert (found[3]["level"], "from Python" in found[3]["message"]) == ("warning", True)
    assert [(one["stage"], one["done"], one["total"], one["unit"]) for one in found[4:6]] == [
        ("copy", 1, 3, "bytes"), ("copy", 3, 3, "bytes"),
    ]  # fmt: skip
    assert [one["message"] for one in found[6:]] == ["seen"]
    assert last == "plain"
    assert not is_log_json()


def test_quiet_ends_with_its_command(hotbed):
    assert hotbed("models", "--quiet").code == 0
    assert not is_quiet()
    assert hotbed("models", "--log-json", "--no-such-option").code == 2
    assert not is_log_json()
