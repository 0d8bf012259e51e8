"""hotbed.EmbeddingBag beside torch.nn.EmbeddingBag: same inputs, same vectors, same rows after a step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hotbed
from hotbed import optim
from hotbed.errors import ConfigError, IdError, ShapeError

PAIRS = {
    "sgd": (lambda: optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "adagrad": (lambda: optim.Adagrad(lr=0.1, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-10)),
    "adam": (lambda: optim.Adam(lr=0.1, eps=1e-8), lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-8)),
}


@settings(max_examples=150)
@given(data=st.data())
def test_forward_and_one_step_equal_torch(data):
    rows, dim = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 9))
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    padding = data.draw(st.none() | st.integers(-rows, rows - 1))
    last = data.draw(st.booleans())
    max_norm = data.draw(st.none() | st.sampled_from([0.5, 2.0]))
    options = {
        "mode": mode,
        "padding_idx": padding,
        "include_last_offset": last,
        "max_norm": max_norm,
    }
    weight = torch.randn(rows, dim, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    name = data.draw(st.sampled_from(sorted(PAIRS)))
    ours = hotbed.EmbeddingBag(rows, dim, **options, _weight=weight, optimizer=PAIRS[name][0]())
    theirs = torch.nn.EmbeddingBag(rows, dim, **options, _weight=weight.clone())
    optimizer = PAIRS[name][1](theirs.parameters())
    ids = st.integers(0, rows - 1)
    if data.draw(st.booleans()):
        width, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
        values = torch.tensor(data.draw(st.lists(ids, min_size=size * width, max_size=size * width))).view(size, width)
        inputs = (values,)
    else:
        bags = data.draw(st.lists(st.lists(ids, max_size=4), min_size=1, max_size=5))
        values = torch.tensor([value for bag in bags for value in bag], dtype=torch.int64)
        ends = torch.tensor([0, *(len(bag) for bag in bags)]).cumsum(0)
        inputs = (values, ends if last else ends[:-1])
    weights_ours = weights_theirs = None
    if mode == "sum" and data.draw(st.booleans()):
        weights_ours = torch.rand(values.shape).requires_grad_()
        weights_theirs = weights_ours.detach().clone().requires_grad_()
    out_ours = ours(*inputs, per_sample_weights=weights_ours)
    out_theirs = theirs(*inputs, per_sample_weights=weights_theirs)
    torch.testing.assert_close(out_ours, out_theirs, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(out_theirs)
    out_ours.backward(grad)
    out_theirs.backward(grad)
    optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight.detach(), rtol=1e-4, atol=1e-5)
    if weights_ours is not None and values.numel():
        torch.testing.assert_close(weights_ours.grad, weights_theirs.grad, rtol=1e-4, atol=1e-5)


@settings(max_examples=30)
@given(values=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=6))
def test_scale_grad_by_freq(values):
    """Against nn.Embedding: nn.EmbeddingBag divides by the count of another row when ids repeat (torch 2.13)."""
    values, weight = torch.tensor(values), torch.randn(6, 2)
    ours = hotbed.EmbeddingBag(6, 2, mode="sum", scale_grad_by_freq=True, _weight=weight, optimizer=optim.SGD(lr=1.0))
    theirs = torch.nn.Embedding(6, 2, scale_grad_by_freq=True, _weight=weight.clone())
    grad = torch.randn(values.shape[0], 2)
    ours(values).backward(grad)
    theirs(values).sum(1).backward(grad)
    torch.testing.assert_close(ours.weight, weight - theirs.weight.grad, rtol=1e-5, atol=1e-5)


def test_frozen_rows_stay():
    bag = hotbed.EmbeddingBag.from_pretrained(torch.randn(5, 3), mode="sum")
    before = bag.weight.clone()
    assert not bag(torch.tensor([[1, 2]])).requires_grad
    assert torch.equal(bag.weight, before)
    thawed = hotbed.EmbeddingBag.from_pretrained(torch.randn(5, 3), freeze=False, mode="sum")
    before = thawed.weight.clone()
    thawed(torch.tensor([[1, 2]])).sum().backward()
    assert not torch.equal(thawed.weight, before)


def test_frozen_rows_and_eval_mode_still_give_the_weights_a_gradient():
    rows, ids = torch.randn(5, 3), torch.tensor([[1, 2]])
    for bag in (
        hotbed.EmbeddingBag.from_pretrained(rows, mode="sum").train(),
        hotbed.EmbeddingBag(5, 3, mode="sum", _weight=rows).eval(),
    ):
        weights = torch.ones(1, 2, requires_grad=True)
        bag(ids, per_sample_weights=weights).sum().backward()
        torch.testing.assert_close(weights.grad, rows[ids].sum(2))
        assert torch.equal(bag.weight, rows)


def test_first_values_look_like_torchs():
    weight = hotbed.EmbeddingBag(20_000, 8).weight
    assert abs(float(weight.mean())) < 0.01
    assert abs(float(weight.std()) - 1) < 0.01


def test_mistakes():
    bag = hotbed.EmbeddingBag(5, 3, mode="mean")
    with pytest.raises(ConfigError, match="mode"):
        hotbed.EmbeddingBag(5, 3, mode="median")
    with pytest.raises(ConfigError, match="padding_idx"):
        hotbed.EmbeddingBag(5, 3, padding_idx=5)
    with pytest.raises(ConfigError, match="float32"):
        hotbed.EmbeddingBag(5, 3, dtype=torch.float16)
    with pytest.raises(ShapeError, match="_weight"):
        hotbed.EmbeddingBag(5, 3, _weight=torch.zeros(5, 4))
    with pytest.raises(ShapeError, match="offsets"):
        bag(torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match="no offsets"):
        bag(torch.tensor([[1, 2]]), torch.tensor([0]))
    with pytest.raises(ShapeError, match="mode 'sum'"):
        bag(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2))
    with pytest.raises(IdError, match="id 9"):
        bag(torch.tensor([[1, 9]]))
