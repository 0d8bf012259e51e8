"""What stands in for TorchRec where it is not installed."""

import torch


class Keyed:
    """The part of TorchRec's KeyedJaggedTensor that is used: key-major bags."""

    def __init__(self, keys, values, lengths, weights=None):
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights
        self._offsets = None

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        if self._offsets is None:
            self._offsets = torch.nn.functional.pad(self._lengths.cumsum(0), (1, 0))
        return self._offsets

    def weights_or_none(self):
        return self._weights

    def variable_stride_per_key(self):
        return False

    def to(self, device, non_blocking=False):
        parts = (self._values, self._lengths, self._weights)
        return Keyed(self._keys, *(None if one is None else one.to(device, non_blocking=non_blocking) for one in parts))


def keyed_tensor(keys, values, lengths, weights=None):
    """TorchRec's own where it is installed."""
    try:
        from torchrec import KeyedJaggedTensor
    except ImportError:
        return Keyed(keys, values, lengths, weights)
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights)
