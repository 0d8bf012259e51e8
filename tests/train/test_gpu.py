"""The same runs on a CUDA device."""

import json

import numpy as np
import pytest
import torch

from hotbed.train.evaluation import evaluate
from hotbed.train.model_folder import load_learner
from hotbed.train.run import run
from tests.train.small import lines, model_bytes
from tests.train.test_resume import interrupt
from tests.train.test_run import Spy

pytestmark = pytest.mark.gpu
CUDA = ("train.device=cuda", "train.epochs=3", "model.options.batch_norm=true")


def test_equal_runs_are_equal(start, tmp_path):
    for name, threads in (("one", 1), ("two", 3)):
        built = start(tmp_path / name, *CUDA, f"data.threads={threads}")
        summary = run(built.training, built.subject).summary
        assert summary["device"].startswith("cuda:0 (")
    assert lines(tmp_path / "one") == lines(tmp_path / "two")
    assert model_bytes(tmp_path / "one") == model_bytes(tmp_path / "two")


def test_stopped_and_resumed(start, tmp_path):
    built = start(tmp_path / "whole", *CUDA)
    run(built.training, built.subject)
    built = start(tmp_path / "parts", *CUDA, observers=[Spy(at=21, act=interrupt)])
    assert run(built.training, built.subject).exit_code == 130
    torch.rand(5, device="cuda")
    built = start(tmp_path / "parts", *CUDA)
    built.training.resume()
    run(built.training, built.subject)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert model_bytes(tmp_path / "parts") == model_bytes(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("ahead", [(0, 0), (1, 1), (2, 5)], ids=["automatic", "one", "two of five"])
def test_a_cache_is_invisible(start, tmp_path, optimizer, ahead):
    """Evaluations run in the middle of an epoch, and the run is stopped once."""
    sets = (*CUDA, "data.batch_size=16", "train.eval_every=40", f"tables.optimizer={optimizer}")
    built = start(tmp_path / "whole", *sets)
    run(built.training, built.subject)
    cached = (*sets, "tables.cache=0.7", f"tables.window={ahead[0]}", f"tables.look_ahead={ahead[1]}")
    built = start(tmp_path / "cached", *cached, observers=[Spy(at=100, act=interrupt)])
    assert run(built.training, built.subject).exit_code == 130
    built = start(tmp_path / "cached", *cached)
    built.training.resume()
    run(built.training, built.subject)
    assert lines(tmp_path / "cached") == lines(tmp_path / "whole")
    assert model_bytes(tmp_path / "cached") == model_bytes(tmp_path / "whole")


@pytest.mark.parametrize("model", ["lr", "fm", "dnn", "wide_deep", "deepfm", "dlrm", "dcnv2", "autoint", "finalmlp"])
def test_every_model_trains_and_scores_on_the_cpu_too(start, tmp_path, model):
    built = start(tmp_path, "train.device=cuda", f"model.name={model}", "model.options={}")
    run(built.training, built.subject)
    loader = built.training.loaders.held_out["test"]
    there = evaluate(load_learner(tmp_path / "model", "cuda"), loader)
    here = evaluate(load_learner(tmp_path / "model", "cpu"), loader)
    assert there is not None
    assert here is not None
    np.testing.assert_allclose(there.logits, here.logits, rtol=1e-3, atol=1e-4)
    assert json.loads((tmp_path / "summary.json").read_text())["final"]["test"]["auc"] == pytest.approx(
        here.metrics.auc, abs=1e-3
    )
