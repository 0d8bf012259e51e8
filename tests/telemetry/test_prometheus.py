"""The numbers of the log over HTTP: the text format, the same numbers as TensorBoard's, and a server that is no trouble."""

import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from hotbed.cli.progress import WatchOptions
from hotbed.errors import ConfigError, RunError
from hotbed.telemetry.observer import Progress
from hotbed.telemetry.trackers import Number, numbers_of
from tests.exposition import samples_of

pytest.importorskip("prometheus_client")

from hotbed.telemetry.prometheus import MetricsServer, name_of

CONTENT = "text/plain; version=0.0.4; charset=utf-8"

TRAIN = {
    "kind": "train", "epoch": 1, "step": 50, "samples": 400, "seconds": 1.0, "loss": 0.5, "auc": None, "lr": 0.01,
    "times": {"steps": 4, "model": 0.01, "ready": 3.5, "device": {"model": 0.002}},
    "memory": {"resident_bytes": 1000}, "cache": {"hit_rate": 0.9, "stall_share": None},
    "tiers": {"wear": 5}, "ids": {'us"er\n\\': {"seen": 9}},
}  # fmt: skip
EVAL = {"kind": "eval", "epoch": 1, "step": 50, "samples": 400, "split": "valid", "auc": 0.75, "seconds": 1.0}


@pytest.fixture
def server():
    made = MetricsServer("127.0.0.1", 0)
    yield made
    made.end()


def answer(url, **options):
    request = urllib.request.Request(url, **options)
    with urllib.request.urlopen(request, timeout=10) as reply:
        return reply.headers["Content-Type"], reply.read().decode()


def test_every_number_of_a_line_is_there(server):
    server.begin(Progress(), 100)
    server.record(TRAIN)
    server.record(EVAL)
    server.record({**EVAL, "split": "test", "auc": 0.7})
    server.step(Progress(step=51, samples=408))
    kind, text = answer(server.url)
    assert kind == CONTENT
    assert samples_of(text) == {
        "hotbed_steps_planned": 100, "hotbed_steps_total": 51, "hotbed_samples_total": 408, "hotbed_epoch": 0,
        "hotbed_train_loss": 0.5, "hotbed_train_lr": 0.01, "hotbed_times_steps": 4, "hotbed_times_model": 0.01,
        "hotbed_times_ready": 3.5, "hotbed_device_times_model": 0.002, "hotbed_memory_resident_bytes": 1000,
        "hotbed_cache_hit_rate": 0.9, "hotbed_tiers_wear": 5, 'hotbed_ids_seen{table="us\\"er\\n\\\\"}': 9,
        'hotbed_eval_auc{split="valid"}': 0.75, 'hotbed_eval_auc{split="test"}': 0.7,
    }  # fmt: skip
    server.record({**TRAIN, "loss": 0.25})
    assert samples_of(answer(server.url)[1])["hotbed_train_loss"] == 0.25


def test_names_are_those_of_tensorboard():
    numbers = [*numbers_of(TRAIN), *numbers_of(EVAL)]
    paths = {one.path for one in numbers}
    assert paths == {
        "train/loss", "train/lr", "times/steps", "times/model", "times/ready", "device_times/model",
        "memory/resident_bytes", "cache/hit_rate", "tiers/wear", 'ids/us"er\n\\/seen', "valid/auc",
    }  # fmt: skip
    for one in numbers:
        if not one.of:
            assert name_of(one) == "hotbed_" + one.path.replace("/", "_")
    assert name_of(Number("cache", "odd name-1", 1.0)) == "hotbed_cache_odd_name_1"


def test_help_and_types(server):
    server.begin(Progress(), 100)
    server.record(EVAL)
    text = answer(server.url)[1]
    assert (
        "# HELP hotbed_steps_total steps trained\n# TYPE hotbed_steps_total counter\nhotbed_steps_total 0.0\n" in text
    )
    assert "# HELP hotbed_eval_auc auc of the last evaluation of the split\n# TYPE hotbed_eval_auc gauge\n" in text


def test_other_paths_and_methods(server):
    assert answer(server.url.replace("metrics", "other")) == answer(server.url)
    for method in ("HEAD", "DELETE"):
        with pytest.raises(urllib.error.HTTPError, match="405") as told:
            answer(server.url, method=method)
        told.value.close()


def test_garbage_and_silent_clients_do_not_stop_it(server, capsys):
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    for said in (b"\x00\xff\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(said)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
        assert answer(server.url)[1] == ""
        assert silent.recv(100) == b"", "it is left after five seconds"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as gone:
            gone.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert answer(server.url)[1] == ""
    assert capsys.readouterr().err == ""


def test_a_port_that_is_taken(server):
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(RunError, match=f"port {port}.*--metrics-port"):
        MetricsServer("127.0.0.1", port)
    with pytest.raises(RunError, match="--metrics-host"):
        MetricsServer("203.0.113.7", 0)
    with pytest.raises(RunError, match="--metrics-host"):
        MetricsServer("no such host", 0)


def test_the_port_is_free_again_after_the_end():
    first = MetricsServer("127.0.0.1", 0)
    port = int(first.url.rpartition(":")[2].partition("/")[0])
    first.end()
    first.end()
    second = MetricsServer("127.0.0.1", port)
    assert second.url == first.url
    second.end()


def test_it_listens_on_ipv6():
    if not socket.has_ipv6:
        pytest.skip("there is no IPv6")
    others = set(threading.enumerate())  # of servers that other tests have left
    try:
        server = MetricsServer("::1", 0)
    except RunError as error:
        pytest.skip(str(error))
    assert server.url.startswith("http://[::1]:")
    assert answer(server.url)[1] == ""
    server.end()
    assert not [one for one in set(threading.enumerate()) - others if "serve_forever" in one.name]


def test_without_the_package_the_option_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--metrics-port needs prometheus_client, .* install"):
        WatchOptions(metrics_port=0).check()
    WatchOptions().check()


def test_it_is_imported_for_the_option_only():
    code = "import sys, hotbed.cli.train, hotbed.cli.train_run, hotbed.train.run; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
