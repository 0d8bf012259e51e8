"""Dataset directories -> batches, decoded ahead of time."""

from hotbed.data.loader.loader import Loader

__all__ = ["Loader"]
