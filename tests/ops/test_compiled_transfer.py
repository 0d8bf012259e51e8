"""Compiled transfers without a device: which rows they take from the store, whatever windows overtake each other."""

import numpy as np
import pytest
import torch

from hotbed.errors import HotbedError
from hotbed.host.devices import with_spare
from hotbed.ops.move import compiled_transfer as transfer_module
from hotbed.ops.move import transfer_loop as loop
from hotbed.ops.move.compiled_transfer import SLOTS, CompiledTransfer
from hotbed.ops.move.states import SAVED
from hotbed.tables.group.staging import Staging
from hotbed.tables.sizing.budget import staged_row_bytes

ROWS, WIDTH, WINDOWS, ROOM = 16, 3, 32, 8
MISSES, VICTIMS, TAG = 3, 4, 8


class Windows:
    """A compiled transfer, and what a recorded planner would pass to it."""

    def __init__(self, rows=ROWS, room=ROOM, **options):
        device = torch.device("cpu")
        self.records, self.state = torch.zeros(rows, WIDTH), np.zeros(rows, dtype=np.uint8)
        self.lists = torch.zeros(WINDOWS, 16, dtype=torch.int64), *torch.zeros(2, WINDOWS, room, dtype=torch.int64)
        self.transfer = CompiledTransfer(self.records, self.state, self.lists, device, **options)
        self.transfer.start(0)

    def plan(self, number, misses=(), victims=()):
        counts, miss_keys, victim_keys = self.lists
        miss_keys[number, : len(misses)] = torch.tensor(misses)
        victim_keys[number, : len(victims)] = torch.tensor(victims)
        counts[number, MISSES], counts[number, VICTIMS] = len(misses), len(victims)
        counts[number, TAG] = number + 1

    def exchange(self, number, leaving=()):
        """(the rows that come, None for those to be created); those that leave have these values."""
        slot, _ = self.transfer.staged(number)
        source = slot.device_source[: int(self.lists[0][number, MISSES])].tolist()
        came = [None if place < 0 else slot.device_rows[place, 0].item() for place in source]
        for place, value in enumerate(leaving):
            slot.packed[place] = value
        self.transfer.exchanged(number, None)
        return came

    def has_read(self, number):
        place = loop.SLOT0 + (number % SLOTS) * loop.SLOT_WORDS
        words = self.transfer._words
        return words[place + loop.LATE] > 0 or words[place + loop.STAGED] == number + 1


@pytest.fixture
def windows():
    windows = Windows()
    for number in range(SLOTS):  # buffers are large enough from here on
        windows.plan(number, misses=[8, 9, 10, 11])
        assert windows.exchange(number) == [None] * 4
    windows.transfer.drain()
    yield windows
    windows.transfer.stop()


def test_a_row_that_leaves_twice_is_read_after_it_was_written_twice(windows):
    """The second leaving is known before the first is written."""
    first, second, third, fourth = range(SLOTS, SLOTS + 4)
    windows.plan(first, misses=[1], victims=[0])
    windows.plan(second, misses=[0], victims=[1])
    windows.plan(third, misses=[1], victims=[0])
    while not all(windows.has_read(number) for number in (first, second, third)):
        pass
    assert windows.exchange(first, leaving=[10.0]) == [None]
    assert windows.exchange(second, leaving=[20.0]) == [10.0]
    windows.plan(fourth, misses=[0])
    while windows.transfer._words[loop.NUM_WRITTEN] < third:
        pass
    assert windows.exchange(third, leaving=[30.0]) == [20.0]
    assert windows.exchange(fourth) == [30.0]
    windows.transfer.drain()
    assert windows.records[:2, 0].tolist() == [30.0, 20.0]


@pytest.mark.parametrize(
    ("seed", "rows", "room"), [(0, 12, 8), (1, 12, 8), (2, 12, 8), (3, 4000, 3000), (4, 4000, 3000)]
)
def test_random_windows_give_the_rows_of_a_dict(seed, rows, room):
    """Windows are planned ahead of their exchange; rows leave, come back late, are created, and leave again meanwhile."""
    generator = np.random.default_rng(seed)
    windows = Windows(rows, room, piece_bytes=1)  # of 256 rows: rings of 1,024 are used several times in a window
    stored, cached, planned = {}, {}, []  # values by key: below, in the cache as planned
    number = 0
    while number < WINDOWS - 1 or planned:
        if number < WINDOWS - 1 and len(planned) < 1 + generator.integers(3):
            victims = [key for key in cached if generator.random() < 0.5]
            misses = [key for key in range(rows) if key not in cached and generator.random() < 0.6][:room]
            leaving = [float(rows * number + key + 1) for key in victims]
            expected = [stored.get(key) for key in misses]
            stored |= dict(zip(victims, leaving))
            cached = {key: None for key in cached if key not in victims} | dict.fromkeys(misses)
            windows.plan(number, misses=misses, victims=victims)
            planned.append((number, leaving, expected))
            number += 1
        else:
            first, leaving, expected = planned.pop(0)
            assert windows.exchange(first, leaving) == expected, first
    windows.transfer.drain()
    for key in range(rows):
        assert windows.records[key].tolist() == [stored.get(key, 0.0)] * WIDTH
    windows.transfer.stop()


@pytest.mark.parametrize("piece_bytes", [1, 2 * 4 * WIDTH * loop.KEYS_OF_CHUNK, 1 << 20])
def test_rows_of_several_chunks_come_and_go(piece_bytes):
    """Some of every chunk were never written; they travel in more pieces than a ring has, or in one."""
    rows, room, generator = 8192, 4096, torch.Generator().manual_seed(0)
    windows = Windows(rows, room, piece_bytes=piece_bytes)
    expected, cached = [None] * rows, []
    for number in range(WINDOWS - 1):
        victims = [cached.pop(0) for _ in range(len(cached) - 3000)] if number else []
        there = set(cached) | set(victims)
        misses = [key for key in torch.randperm(rows, generator=generator).tolist() if key not in there][:3000]
        windows.plan(number, misses=misses, victims=victims)
        leaving = [float(1 + key + rows * number) for key in victims]
        assert windows.exchange(number, leaving) == [expected[key] for key in misses]
        for key, value in zip(victims, leaving):
            expected[key] = value
        cached += misses
    windows.transfer.drain()
    for key, value in enumerate(expected):
        assert windows.records[key].tolist() == [value or 0.0] * WIDTH
    windows.transfer.stop()


def test_room_is_asked_for_once():
    words = np.zeros(loop.SLOT0 + SLOTS * loop.SLOT_WORDS, dtype=np.int64)
    cap = loop.SLOT0 + 2 * loop.SLOT_WORDS + loop.CAP
    assert not loop._has_room(words, 2, 5)
    assert (words[loop.NEED], words[loop.NEED_SLOT]) == (5, 2)
    words[loop.NEED] = 3  # asked and not answered: the question stays as it is
    assert not loop._has_room(words, 2, 5)
    assert words[loop.NEED] == 3
    words[cap], words[loop.NEED] = 6, 0
    assert loop._has_room(words, 2, 5)
    assert words[loop.NEED] == 0


def test_an_exception_in_the_transfer_thread_is_raised_by_every_wait(monkeypatch):
    def serve(*arguments):
        raise MemoryError("no room for the rows of a window")

    monkeypatch.setattr(transfer_module, "serve", serve)
    windows = Windows()
    windows.plan(0, misses=[1])
    with pytest.raises(HotbedError, match=r"the thread that moves them has ended\. Rows may be lost") as caught:
        windows.exchange(0)
    assert isinstance(caught.value.__cause__, MemoryError)
    windows.transfer.stop()


def test_waiting_for_a_transfer_thread_that_has_ended_fails(windows):
    windows.plan(SLOTS, misses=[1])
    windows.exchange(SLOTS)
    windows.transfer.stop()
    windows.plan(SLOTS + 1, misses=[1])
    with pytest.raises(HotbedError, match="the thread that moves them has ended"):
        windows.transfer.staged(SLOTS + 1)


def test_waiting_for_a_device_that_is_broken_fails(monkeypatch):
    """It never writes the lists that the thread waits for, and so the thread never fails."""

    def check_device(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    windows = Windows()
    monkeypatch.setattr(transfer_module, "watch", lambda *arguments: 3)  # nothing has come for a second
    monkeypatch.setattr(transfer_module, "check_device", check_device)
    with pytest.raises(RuntimeError, match="device-side assert"):
        windows.transfer.staged(0)
    windows.transfer.stop()


def test_a_transfer_whose_start_was_interrupted_stops_and_starts_again(windows, monkeypatch):
    """Nothing is lost: there is nothing to drain."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    windows.transfer.stop()
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", interrupted)
        patch.setattr("hotbed.host.handover.Runner.start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            windows.transfer.start(SLOTS)
    windows.transfer.drain()
    windows.transfer.stop()
    windows.transfer.start(SLOTS)
    windows.plan(SLOTS, misses=[8, 1], victims=[2])
    assert windows.exchange(SLOTS, leaving=[5.0]) == [None, None]
    windows.transfer.drain()
    assert windows.records[2, 0] == 5.0


def test_an_answer_that_was_interrupted_is_not_given_twice(windows):
    """The transfer thread knows of larger buffers, but its question still stands: they may hold rows by now."""
    words, s = windows.transfer._words, 1
    windows.transfer._slots[s] = windows.transfer._new_buffers(20)
    windows.transfer._publish(s)
    words[loop.NEED_SLOT], words[loop.NEED] = s, 15
    known = windows.transfer._slots[s]
    windows.transfer._make_room()
    assert windows.transfer._slots[s] is known
    assert words[loop.NEED] == 0


@pytest.fixture
def refused(monkeypatch):
    """Sizes in bytes of copies that fail, as the driver may say."""
    sizes, copy = set(), loop._copy_on_host
    monkeypatch.setattr(loop, "_copy_on_host", lambda to, source, size: 2 if size in sizes else copy(to, source, size))
    return sizes


def test_a_window_whose_rows_could_not_be_copied_is_not_handed_out(refused):
    windows = Windows()
    windows.records[:], windows.state[:] = 7.0, SAVED
    refused.add(5 * WIDTH * 4)
    windows.plan(0, misses=[1, 2, 3, 4, 5])
    with pytest.raises(HotbedError, match="error 2"):
        windows.exchange(0)
    windows.transfer.stop()


def test_late_rows_that_could_not_be_copied_are_not_handed_out(refused):
    windows = Windows()
    for number in range(SLOTS):  # buffers are large enough from here on
        windows.plan(number, misses=[8, 9, 10, 11])
        windows.exchange(number)
    windows.transfer.drain()
    first, second = SLOTS, SLOTS + 1
    windows.plan(first, misses=[4], victims=[8, 9, 10])
    windows.plan(second, misses=[8, 9, 10])
    while not windows.has_read(second):
        pass
    refused.add(3 * WIDTH * 4)
    windows.exchange(first, leaving=[1.0, 2.0, 3.0])
    with pytest.raises(HotbedError, match="error 2"):
        windows.exchange(second)
    windows.transfer.stop()


@pytest.mark.parametrize("most", [512, 1000, 4096, 60_000, 1 << 20])
@pytest.mark.parametrize("width", [4, 36, 132])
def test_page_locked_memory_stays_within_staging(most, width):
    """Of compiled transfers, and of the thread that moves the rows of plain calls in between."""
    record = 4 * width
    rings = 2 * loop.RING * transfer_module.rows_of_piece(record, 1 << 22, most) * record
    places = SLOTS * 4 * with_spare(most, most)
    staging = Staging(width, torch.device("cpu"), most)
    parts = [*staging._new(most), *staging._new(most), *staging._new(most), *staging._new(most)]  # in, out, late
    thread = sum(part.nbytes for part in parts)
    assert rings + places + thread <= most * staged_row_bytes(record, "cuda")
