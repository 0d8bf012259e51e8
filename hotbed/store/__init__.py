"""Keys -> records below the device."""

from hotbed.store.memory import MemoryStore

__all__ = ["MemoryStore"]
