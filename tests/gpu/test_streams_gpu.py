"""Streams of our own: nobody launches on the one that is recorded, and a recording that fails leaves nothing behind."""

import pytest
import torch

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
