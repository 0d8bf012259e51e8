"""Row optimizers against torch.optim and against their formulas, through the public tables."""

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import ConfigError

IDS = torch.tensor([[0], [1], [0], [3]])


def run(optimizer, steps=4, ids=IDS):
    tables = hotbed.EmbeddingTables({"a": Table(5, 3, init=hotbed.Normal(0.5))}, optimizer)
    first = tables.weight("a").clone()
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(len(ids), 1, 3, generator=generator) for _ in range(steps)]
    for grad in grads:
        tables(ids).backward(grad)
    dense = [torch.zeros(5, 3).index_add(0, ids[:, 0], grad[:, 0]) for grad in grads]
    return first, tables, dense


def torch_run(first, dense, make):
    weight = first.clone().requires_grad_()
    optimizer = make([weight])
    for grad in dense:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optim.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (optim.SGD(lr=0.1, l2=0.3, decay_scope="table"), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
        (
            optim.Adagrad(lr=0.1, eps=1e-10, initial_sum=0.1),
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
        ),
        (optim.Adam(lr=0.1, decay_scope="table"), lambda p: torch.optim.Adam(p, lr=0.1)),
        (
            optim.Adam(lr=0.1, l2=0.2, decay_scope="table"),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
        ),
        (
            optim.Adam(lr=0.1, weight_decay=0.2, decay_scope="table"),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
        ),
    ],
    ids=["sgd", "sgd l2", "adagrad", "adam", "adam l2", "adamw"],
)
def test_equals_torch(ours, theirs):
    """Whole-table scope is the dense optimizer of torch, row for row; so is touched scope for touched rows."""
    first, tables, dense = run(ours)
    torch.testing.assert_close(tables.weight("a"), torch_run(first, dense, theirs), rtol=1e-5, atol=1e-6)


def test_lazy_adam_steps_per_row():
    _, tables, _ = run(optim.Adam(lr=0.1))
    tables(torch.tensor([[4]])).sum().backward()
    assert tables.states("a")["step"][:, 0].tolist() == [4, 4, 0, 4, 1]
    first = hotbed.EmbeddingTables({"a": Table(5, 3, init=hotbed.Normal(0.5))}).weight("a")[4]
    torch.testing.assert_close(
        tables.weight("a")[4], first - 0.1, rtol=1e-5, atol=1e-6
    )  # first step of Adam: lr * sign


def test_rowwise_adagrad_by_formula():
    first, tables, dense = run(optim.RowwiseAdagrad(lr=0.1, eps=1e-8))
    weight, total = first.clone(), torch.zeros(5, 1)
    for grad in dense:
        total += grad.pow(2).mean(1, keepdim=True)
        weight -= 0.1 * grad / (total.sqrt() + 1e-8)
    torch.testing.assert_close(tables.weight("a"), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tables.states("a")["sum_of_mean_squares"], total)


def test_ftrl_by_formula():
    alpha, beta, l1, l2 = 0.2, 1.0, 0.3, 0.1
    first, tables, dense = run(optim.FTRL(lr=alpha, beta=beta, l1=l1, ridge=l2))
    w, n = first.double(), torch.zeros(5, 3, dtype=torch.float64)
    z = -w * (beta / alpha + l2) - w.sign() * l1
    for grad in dense:
        g = grad.double()
        touched = (g != 0).any(1, keepdim=True)
        sigma = ((n + g**2).sqrt() - n.sqrt()) / alpha
        z, n = z + g - sigma * w, n + g**2
        solved = torch.where(z.abs() <= l1, 0.0, -(z - z.sign() * l1) / ((beta + n.sqrt()) / alpha + l2))
        w = torch.where(touched, solved, w)
    torch.testing.assert_close(tables.weight("a").double(), w, rtol=1e-4, atol=1e-5)
    strong = run(optim.FTRL(lr=alpha, l1=100.0), steps=30)[1]
    z = strong.states("a")["z"]
    assert torch.equal(strong.weight("a")[[0, 1, 3]] == 0, z[[0, 1, 3]].abs() <= 100.0)  # l1 makes exact zeros


def test_ftrl_starts_where_the_row_is():
    tables = hotbed.EmbeddingTables({"a": Table(5, 3, init=hotbed.Normal(0.5))}, optim.FTRL(lr=0.1, l1=0.2))
    first = tables.weight("a").clone()
    tables(IDS).backward(torch.zeros(4, 1, 3))
    torch.testing.assert_close(tables.weight("a"), first, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [optim.FTRL(lr=optim.Cosine(0.1, steps=2), l1=0.01), optim.SGD(lr=0.1)])
def test_rows_stay_as_they_are_while_the_rate_is_zero(optimizer):
    """FTRL divides by its rate: at the end of a schedule, and where `lr_factor` is 0, rows became NaN."""
    tables = hotbed.EmbeddingTables({"a": Table(5, 3)}, optimizer)
    tables(IDS).pow(2).sum().backward()
    for _ in range(3):
        before, states = tables.weight("a").clone(), {name: s.clone() for name, s in tables.states("a").items()}
        tables.lr_factor = 0.0
        tables(IDS).pow(2).sum().backward()
        assert torch.equal(tables.weight("a"), before)
        assert all(torch.equal(state, states[name]) for name, state in tables.states("a").items())
        tables.lr_factor = 1.0
        tables(IDS).pow(2).sum().backward()  # from the second step on the schedule is at 0 itself
    assert tables.weight("a").isfinite().all()


def test_ftrl_needs_a_rate_to_start_from():
    with pytest.raises(ConfigError, match=r"FTRL: lr must be above 0 at the first step, not 0\.0"):
        optim.FTRL(lr=optim.Cosine(0.0, steps=2)).first_constants()


def test_clip_norm():
    first, tables, dense = run(optim.SGD(lr=1.0, clip_norm=0.1), steps=1)
    moved = first - tables.weight("a")
    norms = dense[0].norm(dim=1)
    torch.testing.assert_close(moved.norm(dim=1), norms.clamp(max=0.1), rtol=1e-4, atol=1e-6)


def test_schedules():
    cosine = optim.Cosine(lr=1.0, steps=110, warmup=10, final=0.1)
    assert [cosine.at(0), cosine.at(9), cosine.at(60), cosine.at(110), cosine.at(500)] == pytest.approx(
        [0.1, 1.0, 0.55, 0.1, 0.1]
    )
    assert optim.Warmup(lr=2.0, warmup=4).at(1) == 1.0
    assert optim.Decay(lr=1.0, every=10).at(25) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.SGD(lr=-1), "lr must be"),
        (lambda: optim.SGD(lr=float("nan")), "lr must be"),
        (lambda: optim.SGD(lr="fast"), "lr must be"),
        (lambda: optim.Adam(l2=-1, clip_norm=-2), "l2 must be.*clip_norm must be"),
        (lambda: optim.Adam(beta1=1.0), "below 1"),
        (lambda: optim.Adagrad(decay_scope="all"), "decay_scope"),
        (lambda: optim.row_optimizer("lion"), "there are adagrad"),
        (lambda: optim.row_optimizer("sgd", momentum=0.9), "has no setting momentum"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
