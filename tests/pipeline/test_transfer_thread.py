"""What the transfer thread does while it waits for the device."""

import torch

from hotbed.pipeline.transfer_thread import KeysAhead, TransferThread


class Store:
    """Memory over an ssd with `pieces` of rows to be brought ahead."""

    def __init__(self, pieces):
        self.pieces, self.done = pieces, []

    def work_ahead(self):
        if len(self.done) == self.pieces:
            return False
        self.done.append("piece")
        return True

    def foresee(self, keys, distance):
        self.done.append((keys, distance))


class Windows:
    """Lists that the device has written once so many pieces are there."""

    def __init__(self, store, after):
        self._store, self._after = store, after

    def is_listed(self, number):
        return len(self._store.done) >= self._after

    def prepare(self, number, num_batches, wait):
        self._store.done.append(f"window {number}")


def run(store, *, ask):
    thread = TransferThread(torch.device("cpu"), [store])
    thread.start()
    ask(thread)
    thread.drain()
    thread.close()


def test_rows_are_brought_ahead_until_the_window_is_listed():
    store = Store(pieces=9)
    run(store, ask=lambda thread: thread.find_slots([(Windows(store, after=4), 7)], 1))
    assert store.done[:5] == ["piece"] * 4 + ["window 7"]


def test_a_window_that_is_listed_does_not_wait_for_rows_ahead():
    store = Store(pieces=9)
    run(store, ask=lambda thread: thread.find_slots([(Windows(store, after=0), 7)], 1))
    assert store.done[0] == "window 7"


def test_a_window_is_waited_for_when_nothing_is_left_to_bring():
    store = Store(pieces=2)
    run(store, ask=lambda thread: thread.find_slots([(Windows(store, after=99), 7)], 1))
    assert store.done == ["piece", "piece", "window 7"]  # whose own wait is `prepare`'s


def test_keys_ahead_that_are_not_known_yet_are_waited_for_at_work():
    store = Store(pieces=9)
    ahead = KeysAhead(store, lambda wait: "keys", 3, lambda: len(store.done) >= 2)
    run(store, ask=lambda thread: thread.foresee([ahead]))
    assert store.done[:3] == ["piece", "piece", ("keys", 3)]
