"""Porters without a device: which rows they take from the store, whatever windows overtake each other."""

import numpy as np
import pytest
import torch

from hotbed.errors import HotbedError
from hotbed.ops.move import compiled_transfer as transfer_module
from hotbed.ops.move import transfer_loop as loop
from hotbed.ops.move.compiled_transfer import SLOTS, CompiledTransfer
from hotbed.ops.move.mapped import MappedRows

ROWS, WIDTH, WINDOWS, ROOM = 16, 3, 32, 8
MISSES, VICTIMS, TAG = 3, 4, 8


class Windows:
    """A compiled transfer, and what a recorded planner would pass to it."""

    def __init__(self, rows=ROWS, room=ROOM, mapped=()):
        """`mapped`: chunks of rows that the GPU would reach."""
        device = torch.device("cpu")
        self.records, self.state = torch.zeros(rows, WIDTH), np.zeros(rows, dtype=np.uint8)
        self.lists = torch.zeros(WINDOWS, 16, dtype=torch.int64), *torch.zeros(2, WINDOWS, room, dtype=torch.int64)
        self.mapped = MappedRows(self.records, self.state, device) if mapped else None
        if self.mapped is not None:
            self.mapped.shift = 8
            self.mapped.is_mapped = np.zeros(-(-rows // 256), dtype=np.uint8)
            self.mapped.is_mapped[list(mapped)] = 1
        self.transfer = CompiledTransfer(self.records, self.state, self.lists, device, self.mapped)
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
    windows.plan(3, misses=[1], victims=[0])
    windows.plan(4, misses=[0], victims=[1])
    windows.plan(5, misses=[1], victims=[0])
    while not all(windows.has_read(number) for number in (3, 4, 5)):
        pass
    assert windows.exchange(3, leaving=[10.0]) == [None]
    assert windows.exchange(4, leaving=[20.0]) == [10.0]
    windows.plan(6, misses=[0])
    while windows.transfer._words[loop.NUM_WRITTEN] < 5:
        pass
    assert windows.exchange(5, leaving=[30.0]) == [20.0]
    assert windows.exchange(6) == [30.0]
    windows.transfer.drain()
    assert windows.records[:2, 0].tolist() == [30.0, 20.0]


@pytest.mark.parametrize("mapped", [(), range(16), range(0, 16, 2), (3,)], ids=["none", "all", "half", "one"])
def test_rows_come_and_go_whoever_moves_them(mapped, monkeypatch):
    """Windows of many rows: the GPU, of which the host plays the part, moves a share of those that it reaches."""
    monkeypatch.setattr(transfer_module, "TRIES", False)
    rows, room, generator = 4096, 2048, torch.Generator().manual_seed(0)
    windows = Windows(rows, room, mapped)
    expected, cached = [None] * rows, []
    shares = [loop.SHARE_IN, loop.SHARE_OUT]
    for number in range(WINDOWS - 1):
        victims = [cached.pop(0) for _ in range(len(cached) - 1500)] if number else []
        there = set(cached) | set(victims)
        misses = [key for key in torch.randperm(rows, generator=generator).tolist() if key not in there][:1500]
        windows.plan(number, misses=misses, victims=victims)
        leaving = [float(1 + key + rows * number) for key in victims]
        assert windows.exchange(number, leaving) == [expected[key] for key in misses]
        for key, value in zip(victims, leaving):
            expected[key] = value
        cached += misses
    windows.transfer.drain()
    moved = windows.transfer._words[shares] != loop.FIRST_SHARE  # they follow what was measured
    assert moved.tolist() == [bool(mapped), len(mapped) == 16] if mapped else not windows.transfer._words[shares].any()
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
    windows.plan(3, misses=[1])
    windows.exchange(3)
    windows.transfer.stop()
    windows.plan(4, misses=[1])
    with pytest.raises(HotbedError, match="the thread that moves them has ended"):
        windows.transfer.staged(4)


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


def test_chunks_are_reached_once_they_are_filled(monkeypatch):
    """Some at every call, until all have been looked at."""
    state = np.zeros(10 * 256 + 100, dtype=np.uint8)
    mapped = MappedRows(torch.zeros(len(state), 4), state, torch.device("cpu"))
    mapped.shift, mapped.is_mapped, mapped._refused = 8, np.zeros(11, dtype=np.uint8), False
    asked = []

    def register(chunk):
        asked.append(chunk)
        mapped.is_mapped[chunk] = 1
        return chunk != 9

    monkeypatch.setattr(mapped, "_register", register)
    mapped.extend()
    assert asked == []
    state[:256] = 1
    state[512 : 512 + 224] = 3  # seven eighths
    state[768 : 768 + 223] = 3
    state[2560:] = 1  # the last, of 100 rows
    for expected in ([0, 2], [], [10], [], []):
        mapped.extend(most=4)
        assert asked == expected
        asked.clear()
    state[:] = 1
    mapped.extend()
    assert asked == [1, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(("alone", "helped", "helps"), [(100, 90, 1), (100, 98, 0), (90, 100, 0)])
def test_help_is_asked_for_where_windows_take_less_time_with_it(alone, helped, helps, monkeypatch):
    """Trials of eight windows, without and with it, twice; the quicker of each counts."""
    words = np.zeros(loop.SLOT0, dtype=np.int64)
    words[loop.TRYING], now, asked = 1, 0, []

    def clock(kind, address):
        words[[loop.SECONDS, loop.NANOSECONDS]] = 0, now

    monkeypatch.setattr(loop, "clock_gettime", clock)
    for number in range(1, 60):
        helping = words[loop.HELPS]
        asked.append(int(helping))
        now += helped if helping else alone
        now += 500 if number in (20, 29) else 0  # something else came in between, once each
        loop._try_help.py_func(words, number)
    assert asked[16:48] == [0] * 8 + [1] * 8 + [0] * 8 + [1] * 8
    assert set(asked[48:]) == {helps}
    assert (words[loop.ALONE], words[loop.HELPED]) == (8 * alone, 8 * helped)
