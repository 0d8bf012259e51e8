"""A stand-in for CUDA graphs on the CPU: operators are noted with their memory while they are recorded, and run again on it.

Unlike CUDA it must run them to record them; so all tensors that were there before are put back afterwards.
"""

from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_in(value):
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


class Graph(TorchDispatchMode):
    """What was called, and the memory of the results."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.made = set()  # storages that the recording made
        self.before = {}  # those of others, as they were

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tensors_in((args, kwargs))
        for one in given:
            storage = one.untyped_storage()
            if storage.data_ptr() not in self.made:
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        out = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in given}
        new = [one for one in tensors_in(out) if one.untyped_storage().data_ptr() not in known]
        self.made |= {one.untyped_storage().data_ptr() for one in new}
        self.calls.append(
            (func, args, kwargs or {}, out, [one.untyped_storage().data_ptr() in known for one in tensors_in(out)])
        )
        return out

    def put_back(self):
        for storage, copy in self.before.values():
            storage.copy_(copy)

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, out, is_view in self.calls:
                again = func(*args, **kwargs)
                for to, of, skip in zip(tensors_in(out), tensors_in(again), is_view):
                    if not skip:
                        to.copy_(of)

    def pool(self):
        return None


@contextmanager
def recording(pool=None):
    graph = Graph()
    try:
        with graph:
            yield graph
    finally:
        graph.put_back()
