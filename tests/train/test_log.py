import json

import pytest

from hotbed.errors import RunError
from hotbed.telemetry.observer import MetricsLog


def test_lines_are_there_as_soon_as_written(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write({"kind": "train", "auc": float("nan"), "loss": 0.1})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"kind": "train", "auc": None, "loss": 0.1}
    log.close()


def test_a_nan_deep_inside_is_null_too(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write({"cache": {"hit_rate": float("nan"), "keys": 3}})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"cache": {"hit_rate": None, "keys": 3}}
    log.close()


def test_a_resumed_log_forgets_what_came_after(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.write({"a": 1})
    position = log.position
    log.write({"a": 2})
    log.flush_to_disk()
    log.close()
    again = MetricsLog(tmp_path / "m.jsonl", position)
    again.write({"a": 3})
    again.close()
    assert (tmp_path / "m.jsonl").read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_log_that_lost_lines_is_reported(tmp_path):
    (tmp_path / "m.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match="has 3 bytes, but the checkpoint was taken at 100"):
        MetricsLog(tmp_path / "m.jsonl", 100)


def test_an_unwritable_log_is_reported(tmp_path):
    with pytest.raises(RunError, match="cannot write"):
        MetricsLog(tmp_path / "absent" / "m.jsonl")
