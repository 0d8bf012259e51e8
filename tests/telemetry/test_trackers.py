"""W&B, MLflow and OpenTelemetry as observers: the numbers of the log, the same run after a resume, and no trouble.

OpenTelemetry runs as it is, with its in-memory reader. W&B and MLflow are stand-ins that record the calls that are made: the
packages are large, and what is used of them is small.
"""

import sys
from types import SimpleNamespace

import pytest

from hotbed.errors import ConfigError
from hotbed.telemetry.observer import Progress
from hotbed.telemetry.trackers import Tracker, check_trackers, numbers_of, open_trackers
from tests.telemetry.test_prometheus import EVAL, TRAIN

SETTINGS = {"train": {"epochs": 2}, "model": {"name": "deepfm"}}


def observed(names, run, said):
    trackers = open_trackers(names, run, SETTINGS, said.append)
    for tracker in trackers:
        tracker.begin(Progress(), 100)
        tracker.record(TRAIN)
        tracker.record(EVAL)
        tracker.end()
    return trackers


@pytest.fixture
def wandb(monkeypatch):
    calls = []

    def init(**given):
        calls.append(("init", given))
        return SimpleNamespace(
            log=lambda values, step: calls.append(("log", values, step)), finish=lambda: calls.append(("finish",))
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, __spec__=SimpleNamespace()))
    return calls


def test_wandb_gets_every_number_at_its_step_and_a_resumed_run_is_the_same(wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "clicks")
    said = []
    observed(["wandb"], tmp_path, said)
    observed(["wandb"], tmp_path, said)
    (kind, given), first, second, (end,) = wandb[:4]
    assert (kind, end, said) == ("init", "finish", [])
    assert given["project"] == "clicks"
    assert given["config"] == SETTINGS
    assert first == ("log", {one.path: one.value for one in numbers_of(TRAIN)}, 50)
    assert second == ("log", {"valid/auc": 0.75}, 50)
    assert wandb[4][1]["id"] == given["id"]
    assert given["resume"] == "allow"


class FakeClient:
    calls: list = []  # noqa: RUF012

    def get_experiment_by_name(self, name):
        return None if name == "hotbed" else SimpleNamespace(experiment_id=7)

    def create_experiment(self, name):
        return 3

    def create_run(self, experiment, run_name):
        self.calls.append(("run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_param(self, run, name, value):
        self.calls.append(("param", run, name, value))

    def log_metric(self, run, name, value, step):
        self.calls.append(("metric", run, name, value, step))

    def set_terminated(self, run):
        self.calls.append(("end", run))


def test_mlflow_gets_settings_once_and_every_number(tmp_path, monkeypatch):
    FakeClient.calls = []
    tracking = SimpleNamespace(MlflowClient=FakeClient)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(tracking=tracking, __spec__=SimpleNamespace()))
    said = []
    observed(["mlflow"], tmp_path, said)
    observed(["mlflow"], tmp_path, said)
    kinds = [call[0] for call in FakeClient.calls]
    numbers = len(numbers_of(TRAIN)) + len(numbers_of(EVAL))
    assert said == []
    assert kinds.count("run") == 1
    assert kinds.count("end") == 2
    assert kinds.count("metric") == 2 * numbers
    assert ("run", 3, tmp_path.name) in FakeClient.calls
    assert [call[2:] for call in FakeClient.calls if call[0] == "param"] == [
        ("train.epochs", 2),
        ("model.name", "deepfm"),
    ]
    assert ("metric", "r1", "train/loss", 0.5, 50) in FakeClient.calls


def test_opentelemetry_gets_gauges_with_the_split_as_an_attribute(tmp_path, monkeypatch):
    metrics = pytest.importorskip("opentelemetry.metrics")
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    said = []
    observed(["otel"], tmp_path, said)
    found = {
        one.name: {dict(point.attributes).get("of", ""): point.value for point in one.data.data_points}
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for one in scope.metrics
    }
    assert said == []
    assert found["hotbed.train.loss"] == {"": 0.5}
    assert found["hotbed.eval.auc"] == {"valid": 0.75}
    assert found["hotbed.train.step"] == {"": 50}
    assert len(found["hotbed.ids.seen"]) == 1
    provider.shutdown()


@pytest.mark.parametrize("at", ["open", "log", "end"])
def test_a_tracker_that_fails_is_reported_once_and_the_run_goes_on(at):
    class Failing:
        def log(self, numbers, step):
            if at == "log":
                raise OSError("away")

        def end(self):
            if at == "end":
                raise OSError("away")

    def opens():
        if at == "open":
            raise OSError("away")
        return Failing()

    said = []
    tracker = Tracker("wandb", opens, said.append)
    tracker.begin(Progress(), 10)
    tracker.record(TRAIN)
    tracker.record(TRAIN)
    tracker.end()
    assert len(said) == 1
    assert "wandb cannot be" in said[0]
    assert "OSError: away" in said[0]


def test_unknown_and_missing_packages_are_said_before_anything_starts(monkeypatch):
    with pytest.raises(ConfigError, match="there are wandb, mlflow, otel"):
        check_trackers(["neptune"])
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--track mlflow needs mlflow, which is not installed: .*pip install"):
        check_trackers(["mlflow"])
