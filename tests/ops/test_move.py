"""Records come and go unchanged, and a row that was never stored starts as its group says, bit for bit."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import hotbed
from hotbed.ops import move
from hotbed.ops.init_rows import stream_of
from hotbed.ops.move import reference
from hotbed.ops.move.states import WRITTEN
from hotbed.ops.records import PRECISIONS
from hotbed.ops.shard import WHOLE, Shard
from hotbed.optim import FTRL, SGD, Adagrad, Adam, RowwiseAdagrad
from hotbed.tables.group.keyspace import Member
from hotbed.tables.group.make import make_group
from tests.pairs import pairs

OPTIMIZERS = [
    SGD(),
    Adagrad(initial_sum=0.1),
    RowwiseAdagrad(initial_sum=0.3),
    Adam(),
    FTRL(l1=0.003, ridge=0.1),
    FTRL(beta=0.0),
]
MEMBERS = [
    Member("user", 500, 0, hotbed.Normal(0.01), False, None),
    Member("one", 1, 500, hotbed.Constant(-0.7), False, None),
    Member("ad", 40, 501, hotbed.Uniform(0.05), False, 3),
    Member("zero", 9, 541, hotbed.Constant(0.0), False, 0),
    Member("last", 3, 550, hotbed.Normal(2.0), False, None),
]
SEED = 11
ROWS = 553


def describe(optimizer, dim, members=MEMBERS, precision="fp32", shard=WHOLE):
    tables = [move.InitialTable(m.base, stream_of(SEED, m.name), m.init, m.padding_id) for m in members]
    return move.initial_rows(dim, optimizer, tables, precision, shard)


def bits(tensor):
    return tensor.cpu().view(torch.int32)


def case(width, num_misses, generator):
    """(records, slots, source, staging, keys): two of three rows are fetched, one slot of ten is skipped."""
    num_slots, num_staged = num_misses + 7, num_misses + 3
    records = torch.full([num_slots, width], float("nan"))
    slots = torch.randperm(num_slots, generator=generator)[:num_misses]
    slots[torch.rand(num_misses, generator=generator) < 0.1] = -1
    source = torch.randint(0, num_staged, [num_misses], generator=generator, dtype=torch.int32)
    source[torch.rand(num_misses, generator=generator) < 0.3] = -1
    staging = torch.randn(num_staged, width, generator=generator)
    keys = torch.randint(0, ROWS, [num_misses], generator=generator)
    return records, slots, source, staging, keys


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_first_records_are_those_of_the_group(optimizer, dim):
    group = make_group(MEMBERS, dim, optimizer, torch.device("cpu"))
    group.initialise(SEED)
    keys = torch.randperm(ROWS)
    first = describe(optimizer, dim)
    assert torch.equal(bits(reference.initial_records(keys, first)), bits(group.records[keys]))
    assert torch.equal(bits(move.initial_records(keys, first)), bits(group.records[keys]))


def assert_slices_are_columns(optimizer, create):
    """`create(keys, first)` gives records; a rank that has columns of every row starts with those of whole rows."""
    keys, whole = torch.randperm(ROWS), describe(optimizer, 12)
    expected = whole.layout.cut(move.initial_records(keys, whole))
    for rank in range(3):
        first = describe(optimizer, 4, shard=Shard(rank, 3, by_column=True))
        for name, column in first.layout.cut(create(keys, first)).items():
            wanted = expected[name] if name in first.layout.row_states else expected[name][:, 4 * rank : 4 * rank + 4]
            assert torch.equal(column, wanted), (name, rank)


@pytest.mark.parametrize("create", [reference.initial_records, move.initial_records], ids=["reference", "compiled"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_slices_of_rows_start_as_their_columns(optimizer, create):
    assert_slices_are_columns(optimizer, create)


@pytest.mark.parametrize(
    ("optimizer", "precision", "size"),
    pairs(OPTIMIZERS, PRECISIONS, [(1, 1), (7, 0), (5, 200), (33, 3000), (1000, 20)]),
    ids=str,
)
def test_compiled_unpack_equals_reference(optimizer, precision, size):
    dim, num_misses = size
    first = describe(optimizer, dim, precision=precision)
    expected, *moves = case(first.layout.width, num_misses, torch.Generator().manual_seed(dim))
    actual = expected.clone()
    reference.unpack(expected, *moves, first)
    move.unpack(actual, *moves, first)
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize(
    ("optimizer", "precision", "size", "threads"),
    pairs(OPTIMIZERS, PRECISIONS, [(1, 1), (5, 200), (33, 250)], [1, 2, 3]),
    ids=str,
)
def test_an_exchange_is_a_write_and_an_unpack(optimizer, precision, size, threads, monkeypatch):
    dim, num_misses = size
    monkeypatch.setattr(move, "_threads", lambda num_rows, width: threads)
    draw = torch.Generator().manual_seed(dim + threads)
    first = describe(optimizer, dim, precision=precision)
    order = torch.randperm(ROWS, generator=draw)
    keys, leaving = order[:num_misses].contiguous(), order[num_misses : 2 * num_misses]
    slots = torch.randperm(num_misses + 7, generator=draw)[:num_misses]
    changed = torch.rand(num_misses, generator=draw) < 0.7  # victims of the others are clean, or nobody was there
    records = torch.randn(num_misses + 7, first.layout.width, generator=draw)
    below = torch.randn(ROWS, first.layout.width, generator=draw)
    state = (torch.rand(ROWS, generator=draw) < 0.5).to(torch.uint8)
    rows = move.RowExchange(slots, keys, slots[changed], leaving[changed])
    expected, expected_below, expected_state = records.clone(), below.clone(), state.clone()
    expected_below[rows.victim_keys] = expected[rows.victim_slots]
    expected_state[rows.victim_keys] = WRITTEN
    source = torch.where(state[keys] == 1, keys, -1).to(torch.int32)
    reference.unpack(expected, slots, source, expected_below, keys, first)
    assert move.exchange(records, below, state.numpy(), rows, first) == int((source >= 0).sum())
    assert torch.equal(bits(records), bits(expected))
    assert torch.equal(bits(below), bits(expected_below))
    assert torch.equal(state, expected_state)


def test_a_victim_whose_slot_nobody_takes_is_an_error():
    first, one = describe(SGD(), 4), torch.tensor([1])
    rows = move.RowExchange(one, one, one + 1, one + 2)
    with pytest.raises(AssertionError, match="0 of 1 victims"):
        move.exchange(torch.zeros(4, 4), torch.zeros(9, 4), torch.zeros(9, dtype=torch.uint8).numpy(), rows, first)


@pytest.mark.parametrize("num_tables", [1, 2, 3, 64, 300])
def test_a_key_finds_its_table_among_many(num_tables):
    members, base = [], 0
    for n in range(num_tables):
        members.append(Member(str(n), 1 + n % 3, base, hotbed.Constant(float(n)), False, None))
        base += members[-1].rows
    expected = torch.repeat_interleave(torch.arange(num_tables), torch.tensor([m.rows for m in members])).float()
    records = move.initial_records(torch.arange(base), describe(SGD(), 2, members))
    assert torch.equal(records[:, 0], expected)


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (100, 17), (3000, 132), (20, 3076)])
def test_gather_scatter_and_pack(shape):
    store, keys = torch.randn(shape[0] + 50, shape[1]), torch.randperm(shape[0] + 50)[: shape[0]]
    out = torch.full(shape, float("nan"))
    move.gather_rows(store, keys, out)
    assert torch.equal(out, store[keys])
    packed = torch.full(shape, float("nan"))
    move.pack(store, keys, packed)
    assert torch.equal(packed, out)
    values, expected = torch.randn(shape), store.clone()
    expected[keys] = values
    move.scatter_rows(store, keys, values)
    assert torch.equal(store, expected)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("dim", [1, 5, 8])
def test_first_weights_of_16_bits_are_the_nearest_ones(precision, dim):
    keys, optimizer = torch.arange(ROWS), FTRL(l1=0.003)
    full, half = (describe(optimizer, dim, precision=kind) for kind in ("fp32", precision))
    records = move.initial_records(keys, half)
    weights = half.layout.weights(records)
    assert weights.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert torch.equal(weights, full.layout.weights(move.initial_records(keys, full)).to(weights.dtype))
    assert torch.equal(records[:, half.layout.columns("z")], optimizer.first_state(weights.float())["z"])


def test_callers_in_several_threads_take_turns():
    store = torch.randn(5000, 40)
    wrong = []

    def copy(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(40):
            keys = torch.randint(
                0, 5000, (int(torch.randint(0, 3000, (1,), generator=generator)),), generator=generator
            )
            out = torch.full((keys.shape[0], 40), float("nan"))
            move.gather_rows(store, keys, out)
            if not torch.equal(out, store[keys]):
                wrong.append(seed)

    threads = [threading.Thread(target=copy, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKED = """
import os, numpy as np, torch
from hotbed.ops.move import gather_rows
torch.set_num_threads(3)
store, keys = np.random.rand(20_000, 64), np.arange(0, 20_000, 2)
def check():  # in numpy: torch's own threads do not survive a fork
    out = np.full((10_000, 64), np.nan)
    gather_rows(*map(torch.from_numpy, (store, keys, out)))
    return np.array_equal(out, store[::2])
assert check()
child = os.fork()
if child == 0:
    os._exit(0 if check() else 1)
assert os.waitpid(child, 0)[1] == 0
assert check()
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_copies_and_the_process_ends():
    """Workers asleep or awake must not keep the process, nor crash it on its way out."""
    code = "import warnings; warnings.simplefilter('ignore')\n" + FORKED
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


def test_rows_that_do_not_fit_are_refused():
    store, out = torch.zeros(10, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="do not fit records"):
        move.gather_rows(store, torch.arange(4), out)
    with pytest.raises(ValueError, match="do not fit records"):
        move.scatter_rows(store, torch.arange(3, dtype=torch.int32), out)
    with pytest.raises(ValueError, match="contiguous"):
        move.gather_rows(torch.zeros(10, 8)[:, :4], torch.arange(3), out)
