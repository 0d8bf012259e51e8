"""Streams of our own: nobody launches on the one that is recorded, and a recording that fails leaves nothing behind."""

import pytest
import torch

from hotbed.host.devices import mapped_empty
from hotbed.ops.recording import Recordings, recording
from hotbed.ops.streams import give_stream, recording_stream, take_stream

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_nobody_else_has_them():
    of_torch = {torch.cuda.Stream(DEVICE).cuda_stream for _ in range(100)}
    assert len(of_torch) < 100, "torch gives its streams out again"
    taken = [take_stream(DEVICE) for _ in range(5)]
    ours = {stream.cuda_stream for stream in (recording_stream(DEVICE), *taken)}
    assert len(ours) == 6
    assert not ours & of_torch
    for stream in taken:
        give_stream(DEVICE, stream)
    assert take_stream(DEVICE) is taken[-1]
    give_stream(DEVICE, taken[-1])


def test_after_a_recording_that_failed():
    numbers, before = torch.arange(8.0, device=DEVICE), torch.cuda.current_stream(DEVICE)

    def read_back():
        torch.nn.functional.dropout(numbers, 0.5)
        numbers.sum().item()

    for _ in range(2):
        with pytest.raises(RuntimeError), recording():
            read_back()
        assert torch.cuda.current_stream(DEVICE) == before
        torch.nn.functional.dropout(numbers, 0.5)
    recordings, out = Recordings(DEVICE), torch.zeros(8, device=DEVICE)
    for _ in range(4):
        recordings.run("add", lambda: out.add_(numbers))
    assert torch.equal(out, 4 * numbers)


def test_random_numbers_of_replays_that_the_device_has_not_reached():
    """A recording begins while the device is behind: replays before and after it draw what they draw alone."""
    ones, out, others = torch.ones(4096, device=DEVICE), torch.zeros(4096, device=DEVICE), torch.zeros(8, device=DEVICE)

    def drop():
        out.copy_(torch.nn.functional.dropout(ones, 0.5))

    with recording() as graph:
        drop()
    found = []
    for lag in (0, 20_000_000):  # clock cycles
        torch.manual_seed(5)
        results = []
        for _ in range(6):
            torch.cuda._sleep(lag)
            graph.replay()
            results.append(out.clone())
            if lag:
                with recording():
                    others.add_(1)
        torch.cuda.synchronize()
        found.append(torch.stack(results))
    assert torch.equal(*found)
    assert len({row.cpu().numpy().tobytes() for row in found[0]}) == 6


def test_memory_that_kernels_use_is_not_given_out_while_they_may():
    lengths = (4096,)
    memory = mapped_empty(lengths, DEVICE)
    address = memory.data_ptr()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # kernels that were launched and have not run
    del memory
    others = [torch.empty(lengths, dtype=torch.int64, pin_memory=True) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    torch.cuda.synchronize()
    del others
    again = [torch.empty(lengths, dtype=torch.int64, pin_memory=True) for _ in range(16)]
    assert address in [other.data_ptr() for other in again], "it is given out after that"
