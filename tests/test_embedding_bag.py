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
    draws = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    weights_ours = weights_theirs = None
    if mode == "sum" and data.draw(st.booleans()):
        weights_ours = torch.rand(values.shape, generator=draws).requires_grad_()
        weights_theirs = weights_ours.detach().clone().requires_grad_()
    out_ours = ours(*inputs, per_sample_weights=weights_ours)
    out_theirs = theirs(*inputs, per_sample_weights=weights_theirs)
    torch.testing.assert_close(out_ours, out_theirs, rtol=1e-5, atol=1e-6)
    # Of one sign in a column: sums of a row that are nearly 0 would be what rounding makes of them, and Adam divides by them.
    grad = (0.1 + torch.rand(out_theirs.shape, generator=draws)) * torch.randn(dim, generator=draws).sign()
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


@pytest.mark.parametrize("storage", [{}, {"cache": 0.6}, {"hbm": "2KiB"}])
def test_the_state_of_torchs_bag_is_taken_and_given_back(storage):
    theirs, ids = torch.nn.EmbeddingBag(20, 3, mode="sum"), torch.tensor([[1, 2], [7, 7]])
    ours = hotbed.EmbeddingBag(20, 3, mode="sum", optimizer=optim.Adagrad(lr=0.1), **storage)
    ours(ids).sum().backward()
    before = ours.tables.states("table")["sum_of_squares"].clone()
    assert before.any()
    both = torch.nn.ModuleDict({"user": ours})
    assert both.load_state_dict({f"user.{name}": one for name, one in theirs.state_dict().items()}).missing_keys == []
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.tables.states("table")["sum_of_squares"], before)
    torch.testing.assert_close(ours(ids), theirs(ids))
    other = torch.nn.EmbeddingBag(20, 3)
    other.load_state_dict(hotbed.interop.state_dict(ours))
    assert torch.equal(other.weight, theirs.weight)
    again = hotbed.EmbeddingBag(20, 3)
    hotbed.interop.load_state_dict(again, other.state_dict())
    assert torch.equal(again.weight, theirs.weight)
    again.load_state_dict(hotbed.EmbeddingBag(20, 3, _weight=torch.ones(20, 3)).state_dict())
    assert torch.equal(again.weight, torch.ones(20, 3))
    with pytest.raises(RuntimeError, match=r"is \[9, 3\], but the table has \[20, 3\]"):
        ours.load_state_dict(torch.nn.EmbeddingBag(9, 3).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({})


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_a_bag_behind_a_cache_learns_as_one_without(mode, tmp_path):
    weight, bags = torch.randn(50, 3), [torch.randint(50, (4, 2)) for _ in range(12)]
    storages = ({}, {"cache": 0.3}, {"cache": 0.3, "memory": "1MiB", "ssd": f"{tmp_path}:8MiB"})
    found = []
    for storage in storages:
        bag = hotbed.EmbeddingBag(50, 3, mode=mode, _weight=weight, optimizer=optim.Adagrad(lr=0.1), **storage)
        for ids in bags:
            bag(ids).square().sum().backward()
        assert not storage or bag.tables.counters().misses > 15  # slots
        found.append(bag.weight.clone())
    assert not torch.equal(found[0], weight)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


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
    with pytest.raises(ConfigError, match="leave out max_norm, or cache="):
        hotbed.EmbeddingBag(5, 3, max_norm=1.0, cache=0.5)
    with pytest.raises(ConfigError, match=r"2 % is 0\.02"):
        hotbed.EmbeddingBag(5, 3, cache=2)
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


@pytest.mark.parametrize(
    "given", [[1, 2], torch.eye(3, dtype=torch.int64).numpy(), torch.eye(3, dtype=torch.int64).to_sparse()]
)
def test_ids_that_are_not_a_plain_tensor_are_refused(given):
    with pytest.raises(ShapeError, match="'input'"):
        hotbed.EmbeddingBag(5, 2)(given)


def test_rows_that_max_norm_shortens_are_in_the_next_checkpoint(tmp_path):
    """They change as they are read, in evaluation too."""
    bag = hotbed.EmbeddingBag(100, 4, max_norm=0.5)
    bag(torch.arange(90).reshape(-1, 1)).sum().backward()
    hotbed.checkpoint.save(tmp_path, bag.tables, step=1)
    bag.eval()(torch.tensor([[95], [96]]))
    with bag.tables.snapshot(touched=True) as snapshot:
        assert [part.ids.tolist() for part in snapshot.parts()] == [[95, 96]]
    hotbed.checkpoint.save(tmp_path, bag.tables, step=2)
    again = hotbed.EmbeddingBag(100, 4, max_norm=0.5)
    hotbed.checkpoint.load(tmp_path, again.tables)
    assert torch.equal(bag.weight, again.weight)


@pytest.mark.parametrize("bad", [-3, 7, 10**9])
def test_max_norm_leaves_the_rows_of_a_refused_batch_as_they_are(bad):
    bag = hotbed.EmbeddingBag(7, 4, max_norm=0.1)
    before = bag.weight.clone()
    with pytest.raises(IdError, match=f"id {bad} "):
        bag(torch.tensor([[1, bad]]))
    assert torch.equal(bag.weight, before)
