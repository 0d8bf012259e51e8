"""The output of a fresh model starts at the share of positives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotbed.models import MODELS, build_model, vector_width
from hotbed.models.base_rate import mean_shift, output_bias, set_base_rate


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_dense", [0, 3])
def test_every_model_starts_at_the_share(name, num_dense):
    torch.manual_seed(0)
    model = build_model(name, num_features=4, dim=8, num_dense=num_dense, options={})
    vectors, dense = torch.zeros(5, 4, vector_width(name, 8)), torch.zeros(5, num_dense)
    before = model.eval()(vectors, dense)
    model.train()
    assert set_base_rate(model, vectors[:2], dense[:2], 0.002)
    assert model.training
    shift = torch.logit(torch.tensor(0.002))
    torch.testing.assert_close(model.eval()(vectors, dense), before + shift)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_shift_makes_the_mean_probability_the_share():
    logits = np.random.default_rng(0).normal(-3, 2, 10_000).astype(np.float32)
    for share in (0.002, 0.3):
        assert np.mean(1 / (1 + np.exp(-(logits + mean_shift(logits, share))))) == pytest.approx(share, rel=1e-6)
    assert mean_shift(logits, 0.0) == mean_shift(logits[:0], 0.5) == 0


def test_the_output_bias_is_the_weight_that_every_logit_gets():
    model = build_model("lr", num_features=3, dim=4, num_dense=0, options={})
    assert output_bias(model) is model.linear.bias


def test_without_a_bias_or_with_one_class_nothing_changes():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, vectors, dense):
            return self.scale * vectors.sum(dim=(1, 2))

    model = Bare()
    assert not set_base_rate(model, torch.zeros(2, 3, 4), torch.zeros(2, 0), 0.1)
    assert model.scale.item() == 1
    fm = build_model("fm", num_features=3, dim=4, num_dense=0, options={})
    for share in (0.0, 1.0):
        assert not set_base_rate(fm, torch.zeros(2, 3, 5), torch.zeros(2, 0), share)
    assert fm.linear.bias.item() == 0
