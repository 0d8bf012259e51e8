"""Weights from and to torch's nn.EmbeddingBag, TorchRec and FBGEMM, by the names of their `state_dict` (docs/interop.md).

    state = hotbed.interop.state_dict(tables, style="torchrec")
    embedding_bag_collection.load_state_dict(state)
    hotbed.interop.load_state_dict(tables, embedding_bag_collection.state_dict(), style="torchrec")

A TorchRec KeyedJaggedTensor needs nothing of this: tables take one as it is (hotbed/tables/keyed.py).
"""

from __future__ import annotations

from hotbed.interop.state import STYLES, Style, load_state_dict, state_dict

__all__ = ["STYLES", "Style", "load_state_dict", "state_dict"]
