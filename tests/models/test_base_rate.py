"""The output of a fresh model starts at the share of positives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotbed.models import MODELS, build_model, vector_width
from hotbed.models.base_rate import Positives, held_out_shift, mean_shift, output_bias, set_base_rate


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


def means(logits: np.ndarray) -> float:
    return float((1 / (1 + np.exp(-logits))).mean())


def test_rows_that_were_not_learned_by_heart_get_the_share():
    """Logits of new rows are too far apart, so their mean is too high; few positives would be a poor guide."""
    draw = np.random.default_rng(0)
    true = draw.normal(-7.5, 1.5, 400_000)
    logits = (true + draw.normal(0, 1.0, len(true)))[:40_000]
    share = means(true)
    train = Positives(round(share * 320_000), 320_000)
    few = Positives(round(share * 40_000 * 0.8), 40_000)
    assert means(logits) > 1.3 * share
    shifted = logits + held_out_shift(logits, few, train)
    assert means(shifted) == pytest.approx(share, rel=0.05)


def test_another_share_of_the_held_out_rows_is_theirs():
    logits = np.random.default_rng(0).normal(-2, 1, 10_000)
    shift = held_out_shift(logits, Positives(3000, 10_000), Positives(10_000, 100_000))
    assert means(logits + shift) == pytest.approx(0.3, rel=0.01)
    shift = held_out_shift(logits, Positives(3000, 10_000), Positives(10_000, 100_000), at_random=True)
    assert means(logits + shift) == pytest.approx(13 / 110, rel=0.01)


def test_what_chance_explains_is_left():
    logits = np.random.default_rng(0).normal(-6, 2, 100)
    share = means(logits) * 1.05
    assert abs(held_out_shift(logits, Positives(1, 100), Positives(share * 10_000, 10_000))) < 0.01
    assert held_out_shift(logits, Positives(0, 100), Positives(0, 1000)) == 0
    assert held_out_shift(logits, Positives(100, 100), Positives(1000, 1000)) == 0
    assert held_out_shift(logits[:0], Positives(0, 0), Positives(10, 1000)) == 0
