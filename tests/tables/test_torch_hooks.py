"""What a user's own training code does to a whole model: the rows follow, or say why they cannot."""

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hotbed
from hotbed.errors import ConfigError, HotbedError
from hotbed.tables.torch_hooks import backward_in_caller

ROWS, DIM, SIZE, STEPS = 60, 4, 16, 12
WAYS = {"plain": {}, "cached": {"cache": 0.6}, "dynamic": {"cache": 0.6}}


def tables_of(way="plain", optimizer=None):
    rows = None if way == "dynamic" else ROWS
    where = {"hbm": "64KiB"} if way == "dynamic" else WAYS[way]
    tables = {name: hotbed.Table(rows, DIM) for name in ("a", "b")}
    return hotbed.EmbeddingTables(tables, optimizer or hotbed.optim.Adagrad(lr=0.1), **where)


class Model(nn.Module):
    def __init__(self, way="plain", optimizer=None):
        super().__init__()
        self.tables = tables_of(way, optimizer)
        torch.manual_seed(1)
        self.dense = nn.Linear(2 * DIM, 1)

    def forward(self, ids):
        return self.dense(self.tables(ids).flatten(1))


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(ROWS, (SIZE, 2), generator=generator) for _ in range(STEPS)]


def rows_of(tables):
    return {name: tables.rows(name)[1]["weight"].clone() for name in tables.tables}


def assert_same_rows(ours, theirs):
    for name, rows in rows_of(theirs).items():
        assert torch.equal(rows_of(ours)[name], rows), name


def train(model, ahead=False, skip=()):
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    given = [batch for n, batch in enumerate(batches()) if n not in skip]
    for ids in hotbed.prefetch(given, model.tables) if ahead else given:
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    return model


def train_scaled(model, ahead=False, overflows=(), scaler=None):
    """As `train`, with a scaled loss; where it overflows torch skips the step."""
    scaler = scaler or torch.amp.GradScaler("cpu", growth_interval=5)
    optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    scales = []
    for n, ids in enumerate(hotbed.prefetch(batches(), model.tables) if ahead else batches()):
        optimizer.zero_grad()
        loss = model(ids).square().mean()
        scaler.scale(loss * torch.inf if n in overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_scaled_loss_trains_rows_as_the_loss_itself_and_an_overflow_skips_them(way, ahead):
    plain, scaled = train(Model(way), ahead=ahead and way != "dynamic", skip=(4, 7)), Model(way)
    scales = train_scaled(scaled, ahead, overflows=(4, 7))
    assert scaled.tables.num_updates == STEPS - 2
    assert scales[4] < scales[3]
    for name, rows in rows_of(plain.tables).items():
        ours = rows_of(scaled.tables)[name]
        if way == "dynamic":  # an id of a skipped batch has a row, too
            ids, found = plain.tables.ids(name), scaled.tables.ids(name)
            ours = ours[torch.isin(found, ids)]
        torch.testing.assert_close(ours, rows, rtol=1e-5, atol=1e-7)


def test_an_overflow_in_one_group_keeps_all_groups_where_they_are():
    tables = hotbed.EmbeddingTables(
        {"a": hotbed.Table(9, 2), "b": hotbed.Table(9, 3)}, hotbed.optim.SGD(lr=0.1), output="dict", cache=0.9
    )
    before = {name: tables.weight(name).clone() for name in "ab"}
    scaler = torch.amp.GradScaler("cpu")
    for spoiled in ("a", "b", ""):
        vectors = tables({name: torch.arange(5) for name in "ab"})
        loss = sum(vector.sum() * (torch.inf if name == spoiled else 1.0) for name, vector in vectors.items())
        scaler.scale(loss).backward()
        moved = [not torch.equal(tables.weight(name), before[name]) for name in "ab"]
        assert moved == [not spoiled] * 2
        assert tables.num_updates == (not spoiled)


def test_rows_that_overflow_alone_make_the_scaler_go_back():
    """Otherwise their step would be skipped for ever, and nobody would know."""
    tables, head = tables_of(), nn.Linear(1, 1)
    before = rows_of(tables)
    optimizer, scaler = torch.optim.SGD(head.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    for step in range(2):  # two lookups each, which overflow in the same pass
        sums = tables(batches()[0]).sum() + tables(batches()[1]).sum()
        scaler.scale(head(torch.ones(1)).sum() + 1e20 * sums).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0 ** (99 - step)
    assert tables.num_updates == 0
    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(tables).items())


class Twice(torch.amp.GradScaler):
    def scale(self, outputs):
        return 2.0 * super().scale(outputs)


class Own(torch.amp.GradScaler):
    def scale(self, outputs):
        return outputs * 8.0


@pytest.mark.parametrize("scaler", [Twice, Own])
def test_a_scaler_of_a_users_own_kind(scaler):
    plain, scaled = tables_of(), tables_of()
    for ids in batches():
        plain(ids).square().sum().backward()
        scaler("cpu").scale(scaled(ids).square().sum()).backward()
    for name, rows in rows_of(plain).items():
        torch.testing.assert_close(rows_of(scaled)[name], rows)


def test_a_scaler_that_is_off_and_a_backward_without_it_change_nothing():
    plain, off = train(Model()), Model()
    train_scaled(off, scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert_same_rows(off.tables, plain.tables)
    scaler, tables, other = torch.amp.GradScaler("cpu"), tables_of(), tables_of()
    scaler.scale(torch.ones((), requires_grad=True) * 2).backward()  # another model's
    for each in (tables, other):
        each(batches()[0]).sum().backward()
    assert_same_rows(tables, other)


def test_scaled_lists_of_losses_and_checkpointed_models():
    plain, scaled = tables_of(), tables_of()
    scaler = torch.amp.GradScaler("cpu")
    for ids in batches()[:3]:
        torch.autograd.backward([plain(ids).sum(), plain(ids).square().sum()])
        torch.autograd.backward(scaler.scale([scaled(ids).sum(), scaled(ids).square().sum()]))
    for ids in batches()[3:6]:  # the tables are called again inside the backward pass
        weight = torch.ones((), requires_grad=True)
        plain(ids).square().sum().backward()
        again = torch.utils.checkpoint.checkpoint(
            lambda weight, ids=ids: weight * scaled(ids).square().sum(), weight, use_reentrant=True
        )
        scaler.scale(again).backward()
    for name, rows in rows_of(plain).items():
        torch.testing.assert_close(rows_of(scaled)[name], rows)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_dynamic_ids_of_a_checkpointed_model_count_once(reentrant, ahead):
    """It calls the tables twice for a batch: in forward, and in backward for what it did not keep."""

    def make():
        table = hotbed.Table(None, DIM, admit=hotbed.Admit(after=3), expire=hotbed.Expire(unused_steps=4))
        return hotbed.EmbeddingTables({"a": table, "b": table}, hotbed.optim.Adagrad(lr=0.1), hbm="64KiB")

    plain, again = make(), make()
    linear, scale = nn.Linear(DIM, DIM), torch.ones((), requires_grad=True)

    def loss_of(scale, tables, ids):
        return (linear(tables(ids)).tanh() * scale).sum()

    for ids in batches():
        loss_of(scale, plain, ids).backward()
    for ids in hotbed.prefetch(batches(), again) if ahead else batches():
        torch.utils.checkpoint.checkpoint(loss_of, scale, again, ids, use_reentrant=reentrant).backward()
    assert again.id_counts() == plain.id_counts()
    assert plain.id_counts()["a"].rejected > 0
    assert_same_rows(plain, again)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("freeze", [lambda m: m.requires_grad_(False), lambda m: m.tables.requires_grad_(False)])
def test_frozen_rows_stay(way, freeze):
    model = train(Model(way))
    before = rows_of(model.tables)
    freeze(model)
    for ids in hotbed.prefetch(batches(), model.tables):
        assert not model.tables(ids).requires_grad
        (model(ids).sum() * torch.ones((), requires_grad=True)).backward()
    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(model.tables).items())
    assert model.tables.num_updates == STEPS
    model.requires_grad_(True)
    train(model)
    assert model.tables.num_updates == 2 * STEPS


def test_a_frozen_bag_can_be_thawed():
    bag = hotbed.EmbeddingBag.from_pretrained(torch.ones(5, 2), optimizer=hotbed.optim.SGD(lr=1.0))
    assert bag.frozen
    nn.Sequential(bag).train()
    assert not bag(torch.tensor([[1]])).requires_grad
    nn.Sequential(bag).requires_grad_(True)
    assert not bag.frozen
    bag(torch.tensor([[1]])).sum().backward()
    assert torch.equal(bag.weight[1], torch.zeros(2))


def test_train_of_a_model_does_not_undo_eval_of_its_tables():
    model = Model()
    model.tables.eval()
    with pytest.raises(HotbedError, match=r"requires_grad_\(False\)"):
        model.train()
    model.tables.train()
    model.eval()
    model.train()
    assert train(model).tables.num_updates == STEPS


def test_another_optimizer_is_refused():
    tables = tables_of()
    with pytest.raises(ConfigError, match=r"Adagrad.*SGD\(lr=0.5.*lr_factor"):
        tables.optimizer = hotbed.optim.SGD(lr=0.5)
    assert tables.optimizer == hotbed.optim.Adagrad(lr=0.1)


def test_an_averaged_model_is_refused():
    with pytest.raises(HotbedError, match="Average the dense model alone"):
        AveragedModel(Model())
    assert AveragedModel(Model().dense).n_averaged == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_without_a_cache_trains_on_alone(copied):
    model = train(Model())
    other = copied(model)
    before = rows_of(model.tables)
    train(other)
    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(model.tables).items())
    assert_same_rows(train(model).tables, other.tables)


@pytest.mark.parametrize("way", ["cached", "dynamic"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_behind_a_cache_is_refused(way, copied):
    with pytest.raises(HotbedError, match=r"behind a cache.*checkpoint"):
        copied(Model(way))


def test_a_spawned_process_is_told_the_way():
    with pytest.raises(HotbedError, match="in a spawned process: inside it"):
        multiprocessing.get_context("spawn").Process(target=print, args=(tables_of("cached"),)).start()


TRACES = {
    "jit": torch.jit.trace,
    "onnx": lambda model, ids: torch.onnx.export(model, (ids,), io.BytesIO(), dynamo=False),
    "export": lambda model, ids: torch.export.export(model, (ids,), strict=False),
    "strict export": lambda model, ids: torch.export.export(model, (ids,), strict=True),
}


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.filterwarnings("ignore")  # torch's own, of what is deprecated
def test_a_trace_is_refused(trace):
    with pytest.raises(Exception, match="export the dense model alone"):
        TRACES[trace](Model().eval(), batches()[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_lookup_inside_a_transformed_function_is_refused(way):
    tables, ids = tables_of(way), batches()[0]
    for transform in (
        lambda: torch.func.grad(lambda weight: (tables(ids) * weight).sum())(torch.ones(DIM)),
        lambda: torch.vmap(lambda row: tables(row[None])[0])(ids),
    ):
        with pytest.raises(HotbedError, match="give the vectors to the function"):
            transform()
    vectors = tables(ids)
    per_sample = torch.vmap(torch.func.grad(lambda weight, row: (row * weight).sum()), (None, 0))
    assert torch.equal(per_sample(torch.ones(DIM), vectors.detach()), vectors.detach().sum(1))


@pytest.mark.parametrize("way", WAYS)
def test_to_empty_leaves_rows_as_they_are(way):
    """Parameters of a model that is made on torch's meta device have no values yet; rows have theirs."""
    with torch.device("meta"):
        model = Model(way)
    assert model.dense.weight.is_meta
    model.tables(batches()[0]).sum().backward()
    before = rows_of(model.tables)
    model.to_empty(device="cpu")
    assert not model.dense.weight.is_meta
    assert all(torch.equal(rows, before[name]) for name, rows in rows_of(model.tables).items())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_a_model_and_a_step_compiled_whole_train_as_plain_ones(way):
    torch._dynamo.reset()
    plain, model, stepped = train(Model(way)), Model(way), Model(way)
    optimizer = torch.optim.SGD(stepped.dense.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    model_optimizer = torch.optim.SGD(model.dense.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager")
    def step(ids):
        optimizer.zero_grad()
        loss = stepped(ids).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for ids in batches():
        step(ids)
        model_optimizer.zero_grad()
        compiled(ids).square().mean().backward()
        model_optimizer.step()
    for each in (model, stepped):
        assert each.tables.num_updates == STEPS
        for name, rows in rows_of(plain.tables).items():
            torch.testing.assert_close(rows_of(each.tables)[name], rows)
    torch._dynamo.reset()


def test_the_compiler_is_not_loaded_for_those_who_do_not_compile():
    code = (
        "import sys, torch, hotbed; tables = hotbed.EmbeddingTables({'a': hotbed.Table(9, 2)}); "
        "tables(torch.zeros(3, 1, dtype=torch.int64)).sum().backward(); print('torch._dynamo' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
    assert out.strip() == "False"


def test_backward_stays_in_one_thread_alone():
    """Of the thread that looked up on CUDA, not of others."""
    found = []

    def look_up():
        backward_in_caller()
        found.append(torch._C._is_multithreading_enabled())

    thread = threading.Thread(target=look_up)
    thread.start()
    thread.join()
    assert (found, torch._C._is_multithreading_enabled()) == ([False], True)
