"""Reading ahead is not noticed: draws, errors, iterators that are left, interrupts."""

import dis
import gc
import itertools
import logging
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hotbed
from hotbed import Table, optim
from hotbed.errors import HotbedError
from hotbed.pipeline import leftovers, reader
from hotbed.pipeline.leftovers import is_stream
from hotbed.pipeline.random_draws import RANDOM_OPERATORS
from hotbed.pipeline.reader import Reader
from hotbed.pipeline.written import ReadContents

CACHES = [{}, {"cache": 0.6}]
CPU = torch.device("cpu")


def matrices(count=24, size=8):
    generator = torch.Generator().manual_seed(3)
    return [(torch.rand(size, 2, generator=generator) ** 3 * 100).long() for _ in range(count)]


def make(**cache):
    return hotbed.EmbeddingTables({"a": Table(100, 4), "b": Table(100, 4)}, optim.Adagrad(lr=0.1), **cache)


def rows(tables):
    return torch.cat([tables.weight(name) for name in tables.tables])


def train(tables, loader, losses, **ahead):
    """`losses` has those of the batches that were trained, whatever happens."""
    for ids in hotbed.prefetch(loader, tables, **ahead):
        loss = tables(ids).square().sum()
        loss.backward()
        losses.append(loss.item())


def trained(loaders, ahead, **cache):
    """Rows and the state of the generator after passes with dropout; `loaders` is called anew."""
    torch.manual_seed(5)
    tables = make(**cache)
    for loader in loaders():
        for ids in hotbed.prefetch(loader, tables) if ahead else loader:
            F.dropout(tables(ids[0] if isinstance(ids, list) else ids), 0.5).square().sum().backward()
    return rows(tables), torch.get_rng_state()


def assert_as_plain(loaders, **cache):
    for found, expected in zip(trained(loaders, True, **cache), trained(loaders, False, **cache)):
        assert torch.equal(found, expected)


def shuffled(ids):
    return ids[torch.randperm(len(ids))]


def every_batch():
    return (shuffled(ids) for ids in matrices())


def from_the_eighth():
    return (ids if number < 7 else shuffled(ids) for number, ids in enumerate(matrices()))


def every_fifth():
    return (ids if number % 5 else shuffled(ids) for number, ids in enumerate(matrices()))


def at_the_end():
    yield from matrices()
    torch.rand(1)


def in_python():
    """Functions of torch that are Python themselves."""
    for number, ids in enumerate(matrices()):
        if number % 3 == 1:
            yield (F.gumbel_softmax(torch.zeros(8, 2)) * 100).long()
        elif number % 3 == 2:
            yield ids[torch.nn.init.uniform_(torch.empty(8)).argsort()]
        else:
            yield ids


class Seeding(Dataset):
    """Draws for every item from a seed of its own."""

    def __len__(self):
        return 100

    def __getitem__(self, item):
        with torch.random.fork_rng():
            torch.manual_seed(item)
            return torch.randint(100, (2,))


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize(
    "loader", [every_batch, from_the_eighth, every_fifth, at_the_end, in_python, lambda: DataLoader(Seeding(), 8)]
)
def test_a_loader_that_draws(loader, cache):
    with pytest.warns(UserWarning, match=r"generator of its own") as told:
        assert_as_plain(lambda: [loader()], **cache)
    assert len(told) == 1


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_loader_that_draws_its_order_once(cache):
    loader = DataLoader(TensorDataset(torch.cat(matrices())), 8, shuffle=True)
    assert_as_plain(lambda: [loader, loader], **cache)


@pytest.mark.parametrize("generator", [None, torch.default_generator])
def test_draws_wait_until_the_batches_before_are_trained(generator):
    drawn = []

    def loader():
        for number in range(6):
            torch.rand(1, generator=generator)
            drawn.append(number)
            yield matrices(1)[0]

    batches = enumerate(hotbed.prefetch(loader(), make(cache=0.6)))
    with pytest.warns(UserWarning, match="generator of its own"):
        assert all(drawn == [*range(number + 1)] for number, _ in batches)
    assert len(drawn) == 6


def test_draws_of_a_generator_of_its_own_do_not_wait():
    own, ahead = torch.Generator(), threading.Event()

    def loader():
        for number in range(6):
            torch.rand(1, generator=own)
            if number == 5:
                ahead.set()
            yield matrices(1)[0]

    for _ in hotbed.prefetch(loader(), make()):
        assert ahead.wait(60)


def test_draws_after_a_seed_that_training_may_have_used():
    def loader():
        yield from matrices(3)
        with torch.random.fork_rng():
            torch.manual_seed(8)
            began.set()
            yield torch.randint(100, (8, 2))

    began, batches = threading.Event(), hotbed.prefetch(loader(), make())
    next(batches)
    assert began.wait(60)
    assert len([*itertools.islice(batches, 2)]) == 2
    with pytest.raises(HotbedError, match="seeded meanwhile"):
        next(batches)


def test_all_operators_that_draw_are_known():
    """Those that a user calls; what begins with an underscore is called by them."""
    marked = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        operator = (
            getattr(getattr(torch.ops.aten, name), schema.overload_name or "default") if space == "aten" else None
        )
        if operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
            marked.add(name)
    assert {name for name in marked if not name.startswith(("_", "miopen"))} - RANDOM_OPERATORS == set()


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("ahead", [{}, {"window": 2, "look_ahead": 5}], ids=str)
def test_batches_before_an_error_are_trained(cache, ahead):
    def loader():
        yield from matrices()
        raise OSError("the disk is gone")

    tables, plain, losses, expected = make(**cache), make(), [], []
    with pytest.raises(OSError, match="the disk is gone"):
        train(tables, loader(), losses, **ahead)
    train(plain, matrices(), expected)
    assert losses == expected
    assert torch.equal(rows(tables), rows(plain))


class Stream:
    """An iterator of somebody's own."""

    def __init__(self, values):
        self.values = iter(values)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.values)


class Anew(Stream):
    """A loader that is its own iterator, and begins anew."""

    def __init__(self, values):
        super().__init__(values)
        self.all = list(values)

    def __iter__(self):
        self.values = iter(self.all)
        return self


def generated(values):
    yield from values


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("kind", [iter, generated, Stream, lambda values: map(torch.clone, values)])
def test_a_stream_that_is_left_keeps_its_batches(kind, cache):
    tables, stream, found = make(**cache), kind(matrices(60)), []
    assert is_stream(stream)
    for count in (0, 1, 7, 20, 60):
        for ids in itertools.islice(hotbed.prefetch(stream, tables), count):
            tables(ids).sum().backward()
            found.append(ids)
    assert len(found) == 60
    assert all(torch.equal(one, other) for one, other in zip(found, matrices(60)))
    assert not leftovers._leftovers


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_a_stream_goes_to_the_later_of_two_loops_over_it(cache):
    """A loop that an error has left open, because somebody holds it; then another over the same iterator."""
    tables, stream = make(**cache), generated(matrices(60))
    first, others = hotbed.prefetch(stream, tables), hotbed.prefetch(generated(matrices(9)), tables)
    found = [*itertools.islice(first, 7)]
    next(others)
    found += hotbed.prefetch(stream, tables)
    assert len(found) == 60
    assert all(torch.equal(one, other) for one, other in zip(found, matrices(60)))
    with pytest.raises(HotbedError, match="a later prefetch over the same iterator has ended this one"):
        next(first)
    assert len([*others]) == 8


def test_batches_made_in_inference_mode():
    with torch.inference_mode():
        batches = [ids.clone() for ids in matrices(4)]
    found = list(hotbed.prefetch(batches, make()))
    assert all(torch.equal(one, other) for one, other in zip(found, matrices(4), strict=True))


def test_a_stream_whose_reads_draw_keeps_its_batches():
    def twice(ahead):
        torch.manual_seed(7)
        tables, stream = make(cache=0.6), (shuffled(ids) for ids in matrices())
        for _ in range(2):
            for ids in itertools.islice(hotbed.prefetch(stream, tables) if ahead else stream, 12):
                F.dropout(tables(ids), 0.5).sum().backward()
        return rows(tables)

    with pytest.warns(UserWarning, match="generator of its own"):
        found = twice(True)
    assert torch.equal(found, twice(False))


def test_an_error_that_was_not_reached_comes_in_the_next_loop():
    def loader():
        yield from matrices(5)
        raise OSError("the disk is gone")

    tables, stream = make(cache=0.6), loader()
    assert len(list(itertools.islice(hotbed.prefetch(loader(), tables), 2))) == 2
    gc.collect()
    assert not leftovers._leftovers  # nobody knows it
    assert len(list(itertools.islice(hotbed.prefetch(stream, tables), 2))) == 2
    rest = hotbed.prefetch(stream, tables)
    assert len(list(itertools.islice(rest, 3))) == 3
    with pytest.raises(OSError, match="the disk is gone"):
        next(rest)


def test_a_stream_that_is_left_in_the_middle_of_a_draw():
    def loader():
        yield from matrices(3)
        began.set()
        yield shuffled(matrices(1)[0])

    tables, stream, began = make(), loader(), threading.Event()
    batches = hotbed.prefetch(stream, tables)
    next(batches)
    assert began.wait(60)
    batches.close()
    rest = hotbed.prefetch(stream, tables)
    assert len(list(itertools.islice(rest, 2))) == 2
    with pytest.raises(HotbedError, match="left in the middle"):
        next(rest)
    assert not leftovers._leftovers


def test_a_stream_that_nobody_knows_any_more_is_not_kept():
    tables = make()
    for kind in (iter, generated):
        batches = hotbed.prefetch(kind(matrices()), tables)
        next(batches)
        batches.close()
        del batches
        gc.collect()
        list(hotbed.prefetch([], tables))
        list(hotbed.prefetch(iter([]), tables))
        assert not leftovers._leftovers


def test_nothing_is_kept_of_a_loader_that_can_be_read_again(caplog):
    tables, loader = make(), matrices(24)
    batches = hotbed.prefetch(loader, tables)
    assert torch.equal(next(batches), loader[0])
    batches.close()
    assert not leftovers._leftovers
    assert not caplog.records
    assert len(list(hotbed.prefetch(loader, tables))) == 24


def test_a_loader_that_begins_anew_does():
    tables, loader = make(), Anew(matrices())
    assert not is_stream(loader)
    for _ in range(2):
        found = list(itertools.islice(hotbed.prefetch(loader, tables), 3))
        assert all(torch.equal(one, other) for one, other in zip(found, matrices(3)))


@pytest.mark.parametrize("kind", [iter, generated])
def test_who_may_ask_a_stream_itself_is_warned(kind, caplog, monkeypatch):
    monkeypatch.setattr(leftovers, "_said", [])

    def leave(stream):
        batches = hotbed.prefetch(stream, make())
        del stream
        next(batches)
        batches.close()

    with caplog.at_level(logging.WARNING, "hotbed.pipeline"):
        leave(kind(matrices()))
        assert not leftovers._leftovers
        assert not caplog.text
        stream = kind(matrices())
        leave(stream)
    assert "next prefetch over the same iterator" in caplog.text
    assert len([*hotbed.prefetch(stream, make())]) == 23


class CtrlC(BaseException):
    """What a signal handler raises."""


def interrupted_at(number, call):
    """Run `call` with an interrupt at one of the places of reader.py where Python runs signal handlers; False past them."""
    count = itertools.count()
    before: dict[object, bool] = {}

    def trace(frame, event, arg):
        if frame.f_code.co_filename != reader.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if before.get(frame) and next(count) == number:
                sys.settrace(None)
                raise CtrlC
            name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            before[frame] = name.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "PRECALL"))
        return trace

    sys.settrace(trace)
    try:
        call()
    except CtrlC:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_anywhere_loses_no_batch():
    """In start, get or close, wherever it comes: every batch comes once, and nothing waits for ever."""
    number, interrupted = 0, True
    while interrupted:
        stream, found = iter(range(20)), []
        interrupted = False
        one = Reader(stream, CPU)

        def ask(one=one, found=found):
            while (batch := one.get(wait=True, wanted=True)) is not None:
                found.append(batch[0])

        def some(one=one, found=found):
            one.start()
            for _ in range(12):
                found.append(one.get(wait=True, wanted=True)[0])
            one.close()

        interrupted = interrupted_at(number, some)
        if one._launched and not one._stopped:
            ask()
        one.close()
        if one._launched:
            rest = Reader(stream, CPU)
            rest.start()
            while (batch := rest.get(wait=True, wanted=True)) is not None:
                found.append(batch[0])
            rest.close()
            assert found == [*range(20)], number
        number += 1
    assert number > 40


def test_no_warning_where_nothing_is_drawn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(hotbed.prefetch(matrices(), make()))) == 24


def test_who_waits_for_draws_is_warned_while_training_continues():
    """Not at the end, which a stream may not have."""

    def endless():
        while True:
            yield torch.randint(0, 100, (4, 2))

    tables = make()
    feed = hotbed.prefetch(endless(), tables)

    def train_some():
        for _ in range(3):
            tables(next(feed)).sum().backward()

    with pytest.warns(UserWarning, match="generator of its own"):
        train_some()
    feed.close()


def test_the_second_draw_waits_also_where_nobody_has_asked_for_the_first_batch():
    reader = Reader((torch.randperm(4) for _ in range(3)), CPU)
    reader.start()
    while reader._held < 0:
        reader._arrived.acquire(timeout=0.01)
    assert (reader.num_ready, reader._held) == (1, 1)
    reader.close()


WRAPPED = {
    "ids": lambda ids, labels: ids,
    "tuple": lambda ids, labels: (ids, labels),
    "labels alone": lambda ids, labels: (ids.clone(), labels),
    "features": lambda ids, labels: {"a": ids[:, 0], "b": ids[:, 1]},
}


@pytest.mark.parametrize("cache", [{}, {"cache": 0.5}])
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_loader_that_fills_one_tensor_again_is_refused(kind, cache):
    """Every batch that was read ahead would be the last one."""
    tables, all_read = make(**cache), threading.Event()

    def loader():
        ids, labels = torch.zeros(8, 2, dtype=torch.int64), torch.zeros(8)
        for n in range(6):
            ids.fill_(n)
            labels.fill_(float("nan") if n == 0 else n)
            yield WRAPPED[kind](ids, labels)
        all_read.set()

    def take_all():
        for _ in hotbed.prefetch(loader(), tables, window=1, look_ahead=6):
            assert all_read.wait(60)  # the first may be handed out before the next is read

    with pytest.raises(HotbedError, match=r"written to after the loader gave it.*batch.clone\(\)"):
        take_all()


def test_of_a_batch_of_many_tensors_the_first_four_are_watched():
    contents, batch = ReadContents(), tuple(torch.zeros(3) for _ in range(5))
    contents.note(batch)
    batch[4].fill_(1)
    contents.check(batch)
    batch[3].fill_(1)
    with pytest.raises(HotbedError, match="written to after the loader gave it"):
        contents.check(batch)


@pytest.mark.parametrize("cache", [{}, {"cache": 0.5}])
@pytest.mark.parametrize("num_buffers", [1, 2])
def test_a_loader_that_fills_arrays_of_numpy_again_is_refused(cache, num_buffers):
    """torch does not count what is written past it."""
    tables, is_ahead = make(**cache), threading.Event()

    def loader():
        arrays = [np.zeros((8, 2), dtype=np.int64) for _ in range(num_buffers)]
        for n in range(12):
            arrays[n % num_buffers][:] = n
            if n == 4:  # so arrays of batches that wait have been filled again
                is_ahead.set()
            yield torch.from_numpy(arrays[n % num_buffers])

    def take_all():
        for _ in hotbed.prefetch(loader(), tables, window=1, look_ahead=6):
            assert is_ahead.wait(60)  # training that keeps pace with the loader gets right batches

    with pytest.raises(HotbedError, match=r"written to after the loader gave it.*batch.clone\(\)"):
        take_all()


@pytest.mark.parametrize("cache", [{}, {"cache": 0.5}])
@pytest.mark.parametrize("is_numpy", [False, True])
def test_a_loader_that_fills_one_tensor_again_is_refused_where_training_is_faster(cache, is_numpy):
    """No batch waits when the next one is read: the one that is being trained is overwritten."""
    tables, taken = make(**cache), threading.Semaphore(1)

    def loader():
        array = np.zeros((8, 2), dtype=np.int64)
        ids = torch.from_numpy(array)
        for n in range(6):
            taken.acquire(timeout=0.5)  # all that were read are handed out, or the loop has ended
            (array if is_numpy else ids)[:] = n
            yield ids

    def take_all():
        for _ in hotbed.prefetch(loader(), tables, window=1, look_ahead=1):
            taken.release()

    with pytest.raises(HotbedError, match="written to after the loader gave it"):
        take_all()


def test_memory_that_is_given_out_again_is_no_mistake():
    """A batch that is trained and dropped makes room for the next one, at the same address."""
    tables = make(cache=0.5)
    for n, ids in enumerate(hotbed.prefetch((torch.full((4096, 2), n % 50) for n in range(60)), tables)):
        assert int(ids[0, 0]) == n % 50
        del ids


@pytest.mark.parametrize("cache", [{}, {"cache": 0.5}])
def test_batches_that_share_memory_and_are_changed_once_they_are_handed_out(cache):
    """Slices of one tensor: torch counts a write to one as a write to all."""
    plain, ahead = make(), make(**cache)
    for tables in (plain, ahead):
        data = torch.cat(matrices())
        slices = (data[start : start + 8] for start in range(0, len(data), 8))
        for ids in slices if tables is plain else hotbed.prefetch(slices, ahead):
            ids[::2] = 0
            tables(ids).sum().backward()
    for name in plain.tables:
        assert torch.equal(plain.weight(name), ahead.weight(name))


def test_one_tensor_that_comes_again_and_again():
    tables, ids = make(cache=0.5), matrices()[0]
    assert sum(1 for _ in hotbed.prefetch([ids] * 20, tables)) == 20
