"""Any 64-bit id of any table in, a dense row number out; who gets a row of its own, and for how long."""

from hotbed.ids.index import MAX_ROWS, Entries, IdIndex

__all__ = ["MAX_ROWS", "Entries", "IdIndex"]
