"""Dataset directories -> batches, decoded ahead of need."""

from hotbed.data.loader.loader import Loader

__all__ = ["Loader"]
