"""Rows that collect the gradients of several batches move as those of one larger batch, to the bit."""

import copy

import pytest
import torch

import hotbed
from hotbed import Jagged, Table
from hotbed.errors import BudgetError, ConfigError, HotbedError
from tests.laws.test_cache_invisible import OPTIMIZERS, random_batches

ROWS = {"a": 60, "b": 45}
WAYS = {
    "plain": {},
    "cached": {"cache": 0.6},
    "bf16": {"cache": 0.6, "precision": "bf16"},
    "tiered": {"memory": "24KiB"},
    "dynamic": {"cache": 0.6},
    "concat": {"output": "concat"},
    "dict": {"output": "dict"},
}


def tables_of(way, optimizer, folder):
    options = dict(WAYS[way])
    if way == "tiered":
        options["ssd"] = f"{folder}:8MiB"
    rows = {name: None if way == "dynamic" else count for name, count in ROWS.items()}
    if way == "dynamic":
        options = {"hbm": "64KiB", "memory": "1MiB"}
    return hotbed.EmbeddingTables(
        {"a": Table(rows["a"], 5), "b": Table(rows["b"], 5, features=("b", "c"))}, optimizer, **options
    )


def inputs_of(samples):
    values = [value for bag in samples["a"] for value in bag]
    ends = torch.tensor([0, *(len(bag) for bag in samples["a"])]).cumsum(0)
    ids = {name: torch.tensor(samples[name], dtype=torch.int64) for name in ("b", "c")}
    return {"a": Jagged(torch.tensor(values, dtype=torch.int64), ends), **ids}


def loss_of(out):
    vectors = torch.stack(list(out.values()), dim=1) if isinstance(out, dict) else out.view(len(out), 3, 5)
    return (vectors.prod(dim=1).tanh() + vectors.sum(dim=1)).pow(2).sum()


def cut(samples, size):
    return [{name: one[at : at + size] for name, one in samples.items()} for at in range(0, len(samples["b"]), size)]


def state_of(tables):
    found = {}
    for name in tables.tables:
        ids, columns = tables.rows(name)
        found |= {f"{name}.ids": ids, **{f"{name}.{column}": values for column, values in columns.items()}}
    return found


def train(way, optimizer, folder, micro):
    tables = tables_of(way, optimizer, folder)
    if micro:
        tables.accumulate()
    for samples in random_batches(6, 12):
        for part in cut(samples, micro or 12):
            loss_of(tables(inputs_of(part))).backward()
        if micro:
            assert tables.step()
    return state_of(tables), tables.num_updates


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_four_batches_are_one(name, way, tmp_path):
    if way == "dynamic" and name == "adam" and OPTIMIZERS[name].decay_scope == "table":
        pytest.skip("not for dynamic ids")
    whole, updates = train(way, OPTIMIZERS[name], tmp_path / "whole", 0)
    parts, again = train(way, OPTIMIZERS[name], tmp_path / "parts", 3)
    assert updates == again == 6
    assert whole.keys() == parts.keys()
    for column, values in whole.items():
        assert torch.equal(values, parts[column]), column


@pytest.mark.parametrize("window", [1, 2, 4])
def test_batches_that_were_read_ahead_count_alike(window):
    """A step looks up batches whose rows may have left the cache again."""
    ends = []
    for micro in (12, 3):
        tables = hotbed.EmbeddingTables({"b": Table(45, 5), "c": Table(45, 5)}, OPTIMIZERS["adam"], cache=0.6)
        tables.accumulate()
        parts = [part for samples in random_batches(8, 12) for part in cut(samples, micro)]
        ids = [torch.tensor([part["b"], part["c"]]).T.contiguous() for part in parts]
        for number, batch in enumerate(hotbed.prefetch(ids, tables, window=window, look_ahead=4)):
            tables(batch).pow(2).sum().backward()
            if (number + 1) % (12 // micro) == 0:
                tables.step()
        ends.append(state_of(tables))
    assert all(torch.equal(values, ends[1][name]) for name, values in ends[0].items())


def test_a_copy_has_no_gradients_of_the_original():
    tables = small().accumulate()
    tables(torch.tensor([[3]])).sum().backward()
    assert not copy.deepcopy(tables).step()
    assert tables.step()


def small(**options):
    return hotbed.EmbeddingTables({"a": Table(20, 4)}, hotbed.optim.SGD(lr=0.1), **options)


def test_rows_stay_until_the_step_and_after_zero_grad():
    tables = small().accumulate()
    before = tables.weight("a").clone()
    assert not tables.step()
    tables(torch.tensor([[3]])).sum().backward()
    assert torch.equal(tables.weight("a"), before)
    tables.zero_grad()
    assert not tables.step()
    assert torch.equal(tables.weight("a"), before)
    vectors = tables(torch.tensor([[3], [3]]))
    vectors.mul_(2)  # theirs to change
    vectors.sum().backward()
    with pytest.raises(HotbedError, match="gradients are pending"):
        tables.accumulate(False)
    assert tables.step()
    assert torch.allclose(tables.weight("a")[3], before[3] - 0.4)
    tables.accumulate(False)
    with pytest.raises(HotbedError, match=r"rows move in backward; tables.accumulate\(\)"):
        tables.step()
    tables(torch.tensor([[3]])).sum().backward()
    assert torch.allclose(tables.weight("a")[3], before[3] - 0.5)


def test_only_batches_with_a_gradient_count_and_evaluation_learns_nothing():
    tables = small().accumulate()
    before = tables.weight("a").clone()
    tables(torch.tensor([[1]]))
    with torch.no_grad():
        tables(torch.tensor([[2]]))
    tables.eval()
    assert not tables(torch.tensor([[2]])).requires_grad
    tables.train()
    tables(torch.tensor([[5]])).sum().backward()
    assert tables.step()
    assert (tables.weight("a") != before).any(dim=1).nonzero().tolist() == [[5]]


def test_gradients_of_two_passes_through_one_batch_add_up():
    tables = small().accumulate()
    before = tables.weight("a").clone()
    vectors = tables(torch.tensor([[1]]))
    vectors.sum().backward(retain_graph=True)
    vectors.sum().backward()
    tables.step()
    assert torch.allclose(tables.weight("a")[1], before[1] - 0.2)


@pytest.mark.parametrize("way", ["matrix", "bags"])
def test_a_loader_may_fill_its_tensors_again_before_the_step(way):
    """The ids of a batch are those of its call, whatever was written to the same tensors since."""
    parts, whole = small().accumulate(), small()
    ids, weights, ends = torch.empty(3, dtype=torch.int64), torch.empty(3), torch.empty(3, dtype=torch.int64)
    for start, end in ((0, 1), (3, 2)):
        ids.copy_(torch.arange(start, start + 3))
        weights.fill_(1.0 + start)
        ends.copy_(torch.tensor([0, end, 3]))
        for tables in (parts, whole):
            batch = ids.view(3, 1) if way == "matrix" else {"a": Jagged(ids, ends, weights)}
            tables(batch).pow(2).sum().backward()
    parts.step()
    assert torch.equal(parts.weight("a"), whole.weight("a"))


@pytest.mark.parametrize("between", ["step", "zero_grad"])
def test_a_gradient_counts_once_where_a_graph_is_kept(between):
    tables = small().accumulate()
    before = tables.weight("a").clone()
    vectors = tables(torch.tensor([[1]]))
    vectors.sum().backward(retain_graph=True)
    getattr(tables, between)()
    vectors.sum().backward()
    tables.step()
    assert torch.allclose(tables.weight("a")[1], before[1] - (0.2 if between == "step" else 0.1))


def test_hooks_of_a_model_see_each_batch_once():
    """One that scales vectors scales their gradient, once."""
    parts, whole, seen = small().accumulate(), small(), []
    for tables in (parts, whole):
        tables.register_forward_hook(lambda _, given, out: seen.append(len(given[0])) or out * 2)
        tables(torch.tensor([[1], [2]])).pow(2).sum().backward()
    parts.step()
    assert seen == [2, 2]
    assert torch.equal(parts.weight("a"), whole.weight("a"))


@pytest.mark.parametrize("stop", ["eval", "freeze"])
def test_a_step_of_rows_that_do_not_learn_is_refused_and_nothing_is_lost(stop):
    tables = small().accumulate()
    before = tables.weight("a").clone()
    tables(torch.tensor([[1]])).sum().backward()
    tables.eval() if stop == "eval" else tables.requires_grad_(False)
    with pytest.raises(HotbedError, match=r"keeps rows as they are: call tables.train\(\)"):
        tables.step()
    tables.train() if stop == "eval" else tables.requires_grad_(True)
    assert tables.step()
    assert torch.allclose(tables.weight("a")[1], before[1] - 0.1)


def test_a_step_whose_backward_fails_before_any_row_moves_can_be_repeated(monkeypatch):
    tables = small().accumulate()
    before = tables.weight("a").clone()
    tables(torch.tensor([[1]])).sum().backward()
    with monkeypatch.context() as patch:

        def fail(*_):
            raise RuntimeError("no memory")

        patch.setattr(type(tables), "placed", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            tables.step()
    assert torch.equal(tables.weight("a"), before)
    assert tables.step()
    assert torch.allclose(tables.weight("a")[1], before[1] - 0.1)


def test_a_gradient_that_comes_after_the_end_is_refused():
    tables = small().accumulate()
    vectors = tables(torch.tensor([[1]]))
    tables.accumulate(False)
    with pytest.raises(HotbedError, match=r"looked up before accumulate\(False\)"):
        vectors.sum().backward()


def test_a_step_that_is_too_large_for_the_cache_is_refused_and_nothing_is_lost():
    tables = small(cache=0.5).accumulate()
    before = state_of(tables)["a.weight"]
    tables(torch.arange(8).view(8, 1)).sum().backward()
    tables(torch.arange(8, 16).view(8, 1)).sum().backward()
    with pytest.raises(BudgetError):
        tables.step()
    assert torch.equal(state_of(tables)["a.weight"], before)
    assert len(tables.accumulation.parts) == 2
    tables.zero_grad()
    tables(torch.arange(8).view(8, 1)).sum().backward()
    assert tables.step()
    assert (state_of(tables)["a.weight"] != before).any(dim=1).sum() == 8


@pytest.mark.parametrize("by", ["scaler", "tables"])
def test_a_grad_scaler_steps_them_like_an_optimizer(by):
    """Powers of two change no bit; a step that overflows is left out with its gradients, and the scaler hears of it."""
    plain, scaled = small().accumulate(), small().accumulate()
    weight = torch.nn.Parameter(torch.ones(4))
    dense = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        overflows = step == 2
        for _ in range(2):
            ids = torch.tensor([[step], [5]])
            scale = float("inf") if overflows else 1.0
            scaler.scale((scaled(ids).pow(2) * weight).sum() * scale).backward()
            if not overflows:
                (plain(ids).pow(2) * weight.detach()).sum().backward()
        before = scaler.get_scale()
        if by == "scaler":
            scaler.step(scaled)
        else:
            assert scaled.step() is not overflows
        if not overflows:
            plain.step()
        scaler.step(dense)
        scaler.update()
        dense.zero_grad()
        assert scaler.get_scale() == (before / 2 if overflows else before)
        weight.data.fill_(1.0)
    assert torch.equal(plain.weight("a"), scaled.weight("a"))
    assert scaled.num_updates == 3


def test_zeroing_a_model_drops_the_gradients_of_tables_inside():
    tables = small().accumulate()
    model = torch.nn.Sequential(torch.nn.ModuleList([tables]))
    before = tables.weight("a").clone()
    (tables(torch.tensor([[3]])).sum() * float("nan")).backward()
    model.zero_grad()
    assert not tables.step()
    assert torch.equal(tables.weight("a"), before)


def test_a_step_in_inference_mode_moves_rows():
    tables = small().accumulate()
    before = tables.weight("a").clone()
    tables(torch.tensor([[3]])).sum().backward()
    with torch.inference_mode():
        assert tables.step()
    assert torch.allclose(tables.weight("a")[3], before[3] - 0.1)


def test_features_may_be_bags_in_some_batches_and_sequences_of_any_length():
    def make():
        return hotbed.EmbeddingTables(
            {"a": Table(30, 4, pooling="none"), "b": Table(30, 4)}, hotbed.optim.Adagrad(lr=0.1), output="dict"
        )

    first = {"a": torch.tensor([[1, 2], [3, 1]]), "b": torch.tensor([4, 5])}
    second = {"a": torch.tensor([[1, 2, 9]]), "b": Jagged(torch.tensor([4, 6]), torch.tensor([0, 2]))}
    parts = make().accumulate()
    for batch in (first, second):
        out = parts(batch)
        (out["a"].pow(2).sum() + out["b"].pow(2).sum()).backward()
    parts.step()
    whole = make()
    sequence = Jagged(torch.tensor([1, 2, 3, 1, 1, 2, 9]), torch.tensor([0, 2, 4, 7]))
    out = whole({"a": sequence, "b": Jagged(torch.tensor([4, 5, 4, 6]), torch.tensor([0, 1, 2, 4]))})
    (out["a"].pow(2).sum() + out["b"].pow(2).sum()).backward()
    for name in ("a", "b"):
        assert torch.equal(whole.weight(name), parts.weight(name))


def test_weights_that_learn_are_refused():
    tables = small().accumulate()
    weights = torch.ones(2, requires_grad=True)
    with pytest.raises(HotbedError, match="weights of bags that learn"):
        tables({"a": Jagged(torch.tensor([1, 2]), torch.tensor([0, 2]), weights)})


def test_ids_that_must_be_admitted_are_refused():
    declared = {"user": Table(None, 4, admit=hotbed.Admit(after=2)), "ad": Table(9, 4)}
    tables = hotbed.EmbeddingTables(declared, hbm="1MiB", memory="8MiB")
    with pytest.raises(ConfigError, match=r"must be admitted \(user\).*train larger batches"):
        tables.accumulate()
