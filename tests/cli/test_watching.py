"""`hotbed train --metrics-port --trace`: mistakes are told before anything is built, in one line."""

import socket

import pytest

from hotbed.cli import main
from hotbed.cli.progress import WatchOptions, open_watchers


def failed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["train", *map(str, arguments)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_steps_without_a_file(capsys, tmp_path):
    assert "--trace FILE" in failed(capsys, "--trace-steps", "5:9", "--out", tmp_path / "run")
    assert "FIRST:STOP" in failed(
        capsys, "--trace", tmp_path / "t.json", "--trace-steps", "9", "--out", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()


def test_a_port_that_cannot_be(capsys):
    assert "65535" in failed(capsys, "--metrics-port", "70000")


def test_the_port_is_freed_when_nothing_comes_of_the_run():
    said = []
    with pytest.raises(ZeroDivisionError), open_watchers(WatchOptions(metrics_port=0), said.append) as watchers:
        raise ZeroDivisionError
    assert said == [f"metrics: {watchers.server.url}"]
    port = int(watchers.server.url.rpartition(":")[2].partition("/")[0])
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_nothing_asked_nothing_opened():
    with open_watchers(WatchOptions(), print) as watchers:
        assert watchers.observers == []
