"""Slots for the windows of a compiled transfer, beside a dict: windows overlap, memory is small, rows come and go."""

from collections import deque

import numpy as np
import pytest
import torch

from hotbed.ops.index import MISSES, VICTIMS
from hotbed.ops.move.states import EXPECTED, WRITTEN
from hotbed.store.tier_windows import TAG, StoppedError, TierWindows, wait_for
from tests.store.test_tiered import NUM_ROWS, WIDTH, open_store

WINDOWS, ROOM, CACHED = 8, 6, 20


class Device:
    """Rows that a cache of CACHED slots has, windows of it, and who moves their rows as a compiled transfer does."""

    def __init__(self, store):
        self.store, self.values, self.model = store, {}, {}  # newest values on the device, and below
        self.lists = torch.zeros(WINDOWS, 16, dtype=torch.int64), *torch.zeros(2, WINDOWS, ROOM, dtype=torch.int64)
        self.windows = TierWindows(store, self.lists)
        self.flying, self.number = deque(), 0  # windows that are prepared and not written

    def plan(self, misses, victims):
        row, counts = self.number % WINDOWS, self.lists[0]
        for which, keys in ((1, misses), (2, victims)):
            self.lists[which][row, : len(keys)] = torch.tensor(keys, dtype=torch.int64)
        counts[row, MISSES], counts[row, VICTIMS], counts[row, TAG] = len(misses), len(victims), self.number + 1
        self.windows.prepare(self.number, 1, self.wait)
        self.flying.append((self.number, misses, victims))
        self.number += 1

    def wait(self, word, value):
        """The other thread gets on."""
        while word[0] < value:
            self.move()

    def move(self):
        """The oldest window: its victims are expected, its misses read, its victims written."""
        number, misses, victims = self.flying.popleft()
        counts, miss_slots, victim_slots = (part[number % WINDOWS].numpy() for part in self.windows.lists)
        assert (counts[TAG], counts[MISSES], counts[VICTIMS]) == (number + 1, len(misses), len(victims))
        tier = self.store.tier
        tier.state[victim_slots[: len(victims)]] = EXPECTED
        for key, slot in zip(misses, miss_slots):
            if tier.state[slot] & 1:
                assert tier.records[slot].tolist() == [self.model[key]] * WIDTH, f"row {key} of window {number}"
                self.values[key] = self.model[key] + 1
            else:
                assert key not in self.model, f"row {key} of window {number} was not found"
                self.values[key] = float(key)
        for key, slot in zip(victims, victim_slots):
            self.model[key] = self.values.pop(key)
            tier.records[slot] = self.model[key]
            tier.state[slot] = WRITTEN
        self.windows.written[0] = number + 1


@pytest.mark.parametrize("num_slots", [2 * ROOM, 3 * ROOM])
@pytest.mark.parametrize("seed", range(4))
def test_overlapping_windows_against_a_dict(tmp_path, num_slots, seed):
    """Windows are prepared up to three ahead; a row that leaves is not missed by a window in flight (that is read late)."""
    draw, store = np.random.default_rng(seed), open_store(tmp_path, num_slots)
    device, cached = Device(store), []
    for _ in range(150):
        flying = {key for _, misses, victims in device.flying for key in (*misses, *victims)}
        absent = [key for key in range(NUM_ROWS) if key not in cached and key not in flying]
        settled = [key for key in cached if key not in flying]
        victims = draw.permutation(settled)[: draw.integers(ROOM // 2, ROOM + 1)].astype(int).tolist()
        room = min(ROOM, CACHED - len(cached) + len(victims))
        misses = draw.permutation(absent)[: draw.integers(room // 2, room + 1)].astype(int).tolist()
        store.foresee(draw.integers(0, NUM_ROWS, 6), int(draw.integers(0, 3)))
        for _ in range(draw.integers(0, 4)):
            store.work_ahead()
        device.plan(misses, victims)
        cached = [key for key in cached if key not in victims] + misses
        while len(device.flying) > draw.integers(1, 4):
            device.move()
        store.check_integrity()
    while device.flying:
        device.move()
    left = sorted(device.values)
    store.write(torch.tensor(left), torch.tensor([[device.values[key]] * WIDTH for key in left]))
    found = {key: row for keys, rows in store.items(7) for key, row in zip(keys.tolist(), rows.tolist())}
    assert found == {key: [value] * WIDTH for key, value in (device.model | device.values).items()}
    counts = store.counts
    assert min(counts.from_memory, counts.from_ssd, counts.to_ssd, counts.ahead, counts.waits) > 20
    store.check_integrity()
    store.close()


def test_nobody_waits_for_what_never_comes():
    word = np.zeros(1, dtype=np.int64)
    with pytest.raises(StoppedError):
        wait_for(word, 1, lambda: True)
    word[0] = 5
    wait_for(word, 5, lambda: True)
