"""The numbers of the log over HTTP: the text format, the same numbers as TensorBoard's, and a server that is no trouble."""

import socket
import urllib.error
import urllib.request

import pytest

from hotbed.errors import RunError
from hotbed.telemetry.observer import Progress
from hotbed.telemetry.prometheus import CONTENT, MetricsServer, Sample, exposition, histogram, sample_of
from hotbed.telemetry.scalars import Number, numbers_of
from tests.exposition import samples_of

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


def test_a_histogram_counts_up_to_each_bound():
    found = samples_of(exposition(histogram("hotbed_seconds", "of an answer", (0.5, 2.0), (3, 0, 1), 9.5)))
    assert found == {
        'hotbed_seconds_bucket{le="0.5"}': 3, 'hotbed_seconds_bucket{le="2.0"}': 3, 'hotbed_seconds_bucket{le="+Inf"}': 4,
        "hotbed_seconds_sum": 9.5, "hotbed_seconds_count": 4,
    }  # fmt: skip


def test_names_are_those_of_tensorboard():
    numbers = [*numbers_of(TRAIN), *numbers_of(EVAL)]
    paths = {one.path for one in numbers}
    assert paths == {
        "train/loss", "train/lr", "times/steps", "times/model", "times/ready", "device_times/model",
        "memory/resident_bytes", "cache/hit_rate", "tiers/wear", 'ids/us"er\n\\/seen', "valid/auc",
    }  # fmt: skip
    for one in numbers:
        if not one.of:
            assert sample_of(one).name == "hotbed_" + one.path.replace("/", "_")
    assert sample_of(Number("cache", "odd name-1", 1.0)).name == "hotbed_cache_odd_name_1"


def test_help_is_one_line():
    text = exposition([Sample("a", "gauge", "two\nlines \\ of", 1.0)])
    assert text == "# HELP a two\\nlines \\\\ of\n# TYPE a gauge\na 1.0\n"


def test_other_paths_and_methods(server):
    with pytest.raises(urllib.error.HTTPError, match="404") as told:
        answer(server.url.replace("metrics", "secrets"))
    told.value.close()
    assert answer(server.url, method="HEAD")[1] == ""
    with pytest.raises(urllib.error.HTTPError, match="501") as told:
        answer(server.url, method="DELETE")
    told.value.close()


def test_garbage_and_silent_clients_do_not_stop_it(server):
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    for said in (b"\x00\xff\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b""):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(said)
    silent = socket.create_connection(("127.0.0.1", port), timeout=10)
    assert answer(server.url)[1] == "\n"
    silent.close()


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


def test_the_parser_of_prometheus_reads_it(server):
    parser = pytest.importorskip("prometheus_client.parser")
    server.begin(Progress(), 100)
    server.record(TRAIN)
    server.record(EVAL)
    ours = samples_of(server.text())
    theirs = [one for family in parser.text_string_to_metric_families(server.text()) for one in family.samples]
    assert len(theirs) == len(ours)
    found = {(one.name, *one.labels.values()): one.value for one in theirs}
    assert found["hotbed_eval_auc", "valid"] == 0.75
    assert found["hotbed_ids_seen", 'us"er\n\\'] == 9
