"""Memory of batches: used again when nobody can see it, and never before."""

import gc
import threading

import numpy as np
import pytest
import torch

from hotbed.data.dataset import Dataset
from hotbed.data.loader.decode import Buffers
from hotbed.data.loader.loader import Loader
from tests.data.small import ROWS, make_dataset

LARGE = (1 << 18,)
HOLDS = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[5:9],
    "another shape": lambda tensor: tensor.view(-1, 2).t(),
    "numpy": lambda tensor: tensor.numpy()[3:],
    "detached": lambda tensor: tensor.detach(),
    "another type": lambda tensor: tensor.view(torch.int64),
}


def address(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("hold", HOLDS)
def test_memory_that_is_seen_is_not_used_again(hold):
    buffers = Buffers()
    first = buffers.empty(LARGE, torch.float32)
    first.fill_(7)
    where = address(first)
    held = HOLDS[hold](first)
    seen = np.array(np.asarray(held))
    del first
    gc.collect()
    assert buffers.free_bytes == 0
    others = [buffers.empty(LARGE, torch.float32).fill_(9) for _ in range(4)]
    assert where not in {address(other) for other in others}
    np.testing.assert_array_equal(np.asarray(held), seen)
    del held
    assert buffers.free_bytes == LARGE[0] * 4
    assert address(buffers.empty(LARGE, torch.float32)) == where


def test_a_graph_of_autograd_keeps_its_inputs():
    buffers = Buffers()
    weight = torch.ones(LARGE, requires_grad=True)
    batch = buffers.empty(LARGE, torch.float32).fill_(3)
    loss = (weight * batch).sum()
    del batch
    buffers.empty(LARGE, torch.float32).fill_(100)
    loss.backward()
    assert weight.grad.unique().tolist() == [3.0]
    del loss
    assert buffers.free_bytes == 2 * 4 * LARGE[0]


def test_sizes_that_are_nearly_alike_share_memory_and_others_do_not():
    buffers = Buffers()
    where = address(buffers.empty((200_000,), torch.int64))
    assert address(buffers.empty((199_990, 1), torch.int64)) == where
    assert address(buffers.empty((400_000,), torch.int64)) != where
    assert buffers.empty((0, 13), torch.float32).shape == (0, 13)


def test_the_shelf_is_bounded():
    size = 4 * LARGE[0]
    buffers = Buffers(most_bytes=2 * size)
    held = [buffers.empty(LARGE, torch.float32) for _ in range(5)]
    del held
    assert buffers.free_bytes == 2 * size


def test_threads_never_share_memory():
    """Each fills what it takes with its own number, and finds nothing else in it."""
    buffers = Buffers()
    wrong = []

    def use(number):
        for _ in range(100):
            mine = buffers.empty(LARGE, torch.int64).fill_(number)
            wrong.extend(mine[mine != number].tolist())

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    assert 1 <= buffers.free_bytes // (8 * LARGE[0]) <= 8  # a thread takes the next before it drops the last


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("set") / "d"
    make_dataset(directory, {"train": [100_000, 137]}, row_group=8192, bags=True)
    return Dataset.open(directory)


def is_intact(batch):
    """Every column of a row says the same row."""
    number = batch.ids[:, 1] - (1 << 40)
    tags = batch.bags["tags"]
    return (
        torch.equal(batch.ids[:, 0], number * 7 % ROWS)
        and torch.equal(batch.dense[:, 1], -number.float())
        and torch.equal(batch.labels, (number % 3 == 0).float())
        and torch.equal(torch.diff(tags.offsets), number % 4)
        and torch.equal(tags.values, torch.repeat_interleave(number % ROWS, number % 4))
    )


@pytest.mark.parametrize("batch_size", [3000, 20_000])
def test_batches_that_are_held_are_never_overwritten(dataset, batch_size):
    """All, some, and views of others are held while the rest of three epochs is read through the same memory."""
    loader = Loader(dataset, "train", batch_size=batch_size, shuffle=True, shuffle_rows=30_000, threads=3)
    held, views = [], []
    for epoch in range(3):
        for number, batch in enumerate(loader.epoch(epoch)):
            assert is_intact(batch)
            if number % 3 == 0:
                held.append((batch, batch.ids.clone()))
            elif number % 3 == 1:
                views.append((batch.ids[-1], batch.ids[-1].clone(), batch.dense.numpy()[:2], batch.dense[:2].clone()))
    assert all(is_intact(batch) and torch.equal(batch.ids, ids) for batch, ids in held)
    assert all(torch.equal(ids, same) and np.array_equal(dense, numbers) for ids, same, dense, numbers in views)


def test_dropped_batches_give_their_memory_to_later_ones(dataset):
    seen, addresses = 0, set()
    for batch in Loader(dataset, "train", batch_size=16_384, threads=1).epoch(0):
        addresses.add(address(batch.ids))
        seen += 1
        del batch
    assert seen == 7
    assert len(addresses) < seen
