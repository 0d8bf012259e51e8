"""Described inputs under Triton's interpreter (or on the device) against plain tensors, for batches below their capacity."""

import numpy as np
import pytest
import torch

from hotbed.ops.inputs import BATCHES, MAP, InputLayout, bucket, describe
from hotbed.ops.inputs.reference import SpanInputs, lay_out
from hotbed.ops.keys import Addresses

triton = pytest.importorskip("hotbed.ops.inputs.triton", reason="Triton is not installed")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, HASHING, PADDING = (10, 7, 2000, 5), (False, True, False, False), (None, 100, 3, 0)
KEPT = 3  # batches whose bags are kept


def addresses(base=0):
    return Addresses(
        np.cumsum([base, *ROWS[:-1]]).astype(np.int64),
        np.array(ROWS, dtype=np.int64),
        np.array(HASHING),
        np.array([padding is not None for padding in PADDING]),
        np.array([padding or 0 for padding in PADDING], dtype=np.int64),
    )


def ids_of(p, count, draw):
    if HASHING[p]:
        ids = torch.randint(-(2**62), 2**62, (count,), generator=draw)
        return torch.where(torch.rand(count, generator=draw) < 0.3, PADDING[p], ids)
    return torch.randint(0, ROWS[p], (count,), generator=draw)


def bag_inputs(size, draw, weighted=()):
    """Features of bags of 0 to 40 values, of one, of three and of none."""
    found = []
    for p in range(4):
        lengths = torch.randint(0, 41, (size,), generator=draw) * (torch.rand(size, generator=draw) < 0.5)
        if p:
            lengths = torch.full((size,), (0, 1, 3, 0)[p])
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        count = int(offsets[-1])
        weights = torch.rand(count, generator=draw).to(DEVICE) if p in weighted else None
        found.append(SpanInputs(ids_of(p, count, draw).to(DEVICE), offsets.to(DEVICE), weights))
    return found


def described(spans, size, *, fixed=(None, 1, 3, None)):
    words, position = [], 0
    for span, bag in zip(spans, fixed):
        count = int(span.values.shape[0])
        offsets, weights = (
            (0 if bag else span.offsets.data_ptr()),
            (0 if span.weights is None else span.weights.data_ptr()),
        )
        words.append([span.values.data_ptr(), 1, position, count, offsets, bag or 0, weights, 0])
        position += count
    return describe(words, position, size, True, kept=spans)


def on_device(inputs, batches):
    """A state that has counted up to just before a ring is full, so that numbers wrap around."""
    state = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    state[1] = BATCHES - 1
    for k, batch in enumerate(batches):
        inputs.note(BATCHES - 1 + k, batch)
    inputs.bring(state, 1, len(batches))
    return state


@pytest.mark.parametrize("base", [0, 2**40])
@pytest.mark.parametrize("size", [0, 1, 63, 300])
def test_keys_of_single_ids(size, base):
    draw = torch.Generator().manual_seed(size)
    layout = InputLayout(addresses(base), is_bags=False)
    inputs = triton.Descriptions(layout, DEVICE)
    matrix = torch.stack([ids_of(p, size, draw) for p in range(4)], dim=1).to(DEVICE)
    wide = torch.cat([matrix, matrix], dim=1)[:, 2:]  # columns of a larger matrix, two places on
    words = [
        [wide[:1].data_ptr() + 8 * column, wide.stride(0), 0, size, 0, 1, 0, 0] if size else [0] * 8
        for column in (2, 3, 0, 1)
    ]
    state = on_device(inputs, [describe(words, 4 * size, size, True, kept=wide)])
    capacity = 4 * size + 100
    keys = inputs.make_keys(state, 1, 0, capacity)
    each = torch.arange(size + 1)
    expected = lay_out(layout, [SpanInputs(matrix[:, p].cpu(), each) for p in range(4)]).keys
    assert torch.equal(keys[: 4 * size].cpu().to(torch.int64), expected)
    assert bool((keys[4 * size :] == torch.iinfo(keys.dtype).max).all())
    assert not inputs.found_bad


@pytest.mark.parametrize("rows", [2**31 - 2, 2**62])
@pytest.mark.parametrize("is_bags", [False, True])
@pytest.mark.parametrize("size", [0, 1, 63, 300])
def test_keys_of_a_map(size, is_bags, rows):
    """Values are numbers of ids, feature after feature; -1 in the map is padding."""
    draw = torch.Generator().manual_seed(size)
    none = np.zeros(3, dtype=np.int64)
    no = np.zeros(3, dtype=np.bool_)
    table = Addresses(none, np.full(3, rows), no, no, none)
    layout = InputLayout(table, is_bags, (0, 1, 2) if is_bags else (), (False,) * 3 if is_bags else (), is_mapped=True)
    inputs = triton.Descriptions(layout, DEVICE)
    assert inputs.key_type == (torch.int32 if rows < 2**31 else torch.int64)
    numbers = torch.randint(0, 50, (3, size), generator=draw).to(torch.int32).to(DEVICE)
    keys_of_numbers = (torch.randint(0, rows, (50,), generator=draw) - 1).to(DEVICE)
    keys_of_numbers[7] = -1
    words = [[numbers.data_ptr() + 4 * size * p, 1, size * p, size, 0, 1, 0, 0] for p in range(3)]
    batch = describe(words, 3 * size, size, True, kept=numbers)
    batch.words[MAP] = keys_of_numbers.data_ptr()
    keys = inputs.make_keys(on_device(inputs, [batch]), 1, 0, 3 * size + 100)
    expected = keys_of_numbers[numbers.long()]
    expected = (expected if is_bags else expected.t()).reshape(-1)
    assert torch.equal(keys[: 3 * size].to(torch.int64), expected)
    assert bool((keys[3 * size :] == torch.iinfo(keys.dtype).max).all())
    assert not inputs.found_bad


@pytest.mark.parametrize("mean", [(), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("sizes", [(5, 63), (0, 1), (130, 0)])
def test_bags_are_laid_out(sizes, mean):
    """Two batches of a window, below the capacity; the second starts a ring anew."""
    draw = torch.Generator().manual_seed(sum(sizes))
    weighted = () if mean == (0, 1, 2, 3) else (2,)
    layout = InputLayout(
        addresses(),
        True,
        columns=(2, 0, 3, 1),
        is_mean=tuple(p in mean for p in range(4)),
        is_scaled=bool(mean or weighted),
    )
    inputs = triton.Descriptions(layout, DEVICE)
    batches = [bag_inputs(size, draw, weighted) for size in sizes]
    state = on_device(inputs, [described(spans, size) for spans, size in zip(batches, sizes)])
    capacity, most = 130 * 45, max(sizes) + 3
    starts = torch.full((KEPT, 4 * most + 1), -7, dtype=torch.int64, device=DEVICE)
    out_row = torch.full((KEPT, capacity), -7, dtype=torch.int32, device=DEVICE)
    scale = torch.full((KEPT, capacity), torch.nan, device=DEVICE)
    for k, (spans, size) in enumerate(zip(batches, sizes)):
        keys = inputs.make_keys(state, 1, k, capacity)
        inputs.lay_bags(keys, state, 1, k, most, starts, out_row, scale if layout.is_scaled else None)
        on_host = [SpanInputs(*(None if part is None else part.cpu() for part in span)) for span in spans]
        expected = lay_out(layout, on_host)
        num, row = expected.keys.shape[0], (BATCHES - 1 + k) % KEPT
        assert torch.equal(keys[:num].cpu().to(torch.int64), expected.keys)
        assert bool((keys[num:] == torch.iinfo(keys.dtype).max).all())
        assert torch.equal(starts[row, : 4 * size + 1].cpu(), expected.starts)
        assert torch.equal(out_row[row, :num].cpu().to(torch.int64), expected.out_row)
        assert bool((out_row[row, num:] == -7).all())
        if layout.is_scaled:
            assert torch.equal(scale[row, :num].cpu(), expected.scale)
    assert not inputs.found_bad


@pytest.mark.parametrize("wrong", ["id", "falls", "begins", "ends", "nowhere"])
def test_what_is_wrong_sets_the_flag(wrong):
    draw = torch.Generator().manual_seed(1)
    inputs = triton.Descriptions(InputLayout(addresses(), True, (0, 1, 2, 3), (False,) * 4), DEVICE)
    spans = bag_inputs(70, draw)
    offsets = spans[0].offsets
    if wrong == "id":
        spans[2].values[5] = 2000
    elif wrong == "falls":
        offsets[33] = offsets[-1] + 100
    elif wrong == "begins":
        offsets[0] = 1
        offsets[1] = max(1, int(offsets[1]))
    elif wrong == "ends":
        offsets[-1] -= 1
        offsets.clamp_(max=int(offsets[-1]))
    state = on_device(inputs, [described(spans, 70)])
    keys = inputs.make_keys(state, 1, 0, 3000)
    assert inputs.found_bad is (wrong != "nowhere")
    starts = torch.zeros(KEPT, 300, dtype=torch.int64, device=DEVICE)
    inputs.lay_bags(keys, state, 1, 0, 70, starts, torch.zeros(KEPT, 3000, dtype=torch.int32, device=DEVICE), None)
    assert 0 <= int(starts.min()) <= int(starts.max()) <= sum(int(span.values.shape[0]) for span in spans)
    inputs.clear()
    assert not inputs.found_bad


def test_buckets():
    assert [bucket(n) for n in (0, 1, 4, 5, 8, 9, 11, 13, 16, 17, 21, 1000, 1025)] == [
        0, 1, 4, 5, 8, 10, 12, 14, 16, 20, 24, 1024, 1280,
    ]  # fmt: skip
