"""Any 64-bit id of any table -> a dense row number; which ids get a row of their own, and for how long."""

from hotbed.ids.index import MAX_ROWS, Entries, IdIndex
from hotbed.ids.rules import Admit, Expire, TableRules
from hotbed.ids.translator import PADDING, UNKNOWN, IdCounts, TranslatedBatch, Translator

__all__ = [
    "MAX_ROWS",
    "PADDING",
    "UNKNOWN",
    "Admit",
    "Entries",
    "Expire",
    "IdCounts",
    "IdIndex",
    "TableRules",
    "TranslatedBatch",
    "Translator",
]
