"""The Triton kernels that create and move rows against their references: on a CUDA device, else under the interpreter."""

import warnings

import pytest
import torch

import hotbed
from hotbed.ops import move
from hotbed.ops.init_rows import init_rows, stream_of
from hotbed.ops.init_rows import reference as init_reference
from hotbed.ops.move import reference
from hotbed.ops.records import PRECISIONS
from tests.ops.test_init_rows import INITS
from tests.ops.test_move import OPTIMIZERS, assert_slices_are_columns, bits, case, describe
from tests.pairs import pairs

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("init", "shape", "stream"),
    pairs(
        INITS,
        [(0, 3), (1, 1), (63, 5), (300, 17), (3, 1000)],
        [1, 42, stream_of(3, "ad"), stream_of(3, "user")],
    ),
    ids=str,
)
def test_init_rows(init, shape, stream):
    from hotbed.ops.init_rows import triton

    ids = torch.randint(-(2**63), 2**63 - 1, (shape[0],))
    expected, actual = torch.empty(shape), torch.full(shape, float("nan"), device=DEVICE)
    init_reference.init_rows(expected, ids, stream, init)
    triton.init_rows(actual, ids.to(DEVICE), stream, init)
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize(
    ("optimizer", "precision", "size"),
    pairs(OPTIMIZERS, PRECISIONS, [(1, 1), (7, 0), (5, 200), (33, 100), (1000, 9)]),
    ids=str,
)
def test_unpack(optimizer, precision, size):
    from hotbed.ops.move import triton

    dim, num_misses = size
    first = describe(optimizer, dim, precision=precision)
    expected, *moves = case(first.layout.width, num_misses, torch.Generator().manual_seed(dim))
    actual = expected.to(DEVICE)
    reference.unpack(expected, *moves, first)
    triton.unpack(actual, *(tensor.to(DEVICE) for tensor in moves), first)
    assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize("optimizer", OPTIMIZERS[1:5:3], ids=repr)
def test_slices_of_rows_start_as_their_columns(optimizer):
    from hotbed.ops.move import triton

    def create(keys, first):
        records = torch.full([keys.shape[0], first.layout.width], float("nan"), device=DEVICE)
        source = torch.full_like(keys, -1, dtype=torch.int32).to(DEVICE)
        slots = torch.arange(keys.shape[0], device=DEVICE)
        triton.unpack(records, slots, source, records[:0], keys.to(DEVICE), first)
        return records.cpu()

    assert_slices_are_columns(optimizer, create)


@pytest.mark.parametrize("num_tables", [1, 2, 3, 64, 300])
def test_a_key_finds_its_table_among_many(num_tables):
    from hotbed.ops.move import triton

    tables = [move.InitialTable(3 * n, 0, hotbed.Constant(float(n)), None) for n in range(num_tables)]
    first = move.initial_rows(2, hotbed.optim.SGD(), tables)
    keys = torch.arange(3 * num_tables, device=DEVICE)
    records, source = torch.empty(3 * num_tables, 4, device=DEVICE), torch.full_like(keys, -1, dtype=torch.int32)
    triton.unpack(records, keys, source, records[:0], keys, first)
    assert torch.equal(records[:, 0], (keys // 3).float())


@pytest.mark.gpu
def test_the_device_runs_these_kernels():
    ids = torch.randint(0, 2**40, (1000,))
    for init in INITS:
        expected, actual = torch.empty(1000, 16), torch.empty(1000, 16, device="cuda")
        init_rows(expected, ids, 5, init)
        init_rows(actual, ids.cuda(), 5, init)
        assert torch.equal(bits(actual), bits(expected))
    for optimizer in OPTIMIZERS:
        first = describe(optimizer, 128)
        expected, *moves = case(first.layout.width, 5000, torch.Generator().manual_seed(0))
        actual, moves_there = expected.cuda(), [tensor.cuda() for tensor in moves]
        move.unpack(expected, *moves, first)
        move.unpack(actual.clone(), *moves_there, first)  # the first call compiles, and brings its constants
        with torch.cuda.stream(torch.cuda.Stream()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that this mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            move.unpack(actual, *moves_there, first)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        assert torch.equal(bits(actual), bits(expected))
        wanted = moves[0][moves[0] >= 0]
        packed = torch.empty(wanted.shape[0], first.layout.width, device="cuda")
        move.pack(actual, wanted.cuda(), packed)
        assert torch.equal(bits(packed), bits(expected[wanted]))
