"""Synthetic click logs, shaped like Criteo's and Avazu's, with a known best AUC."""

from hotbed.data.synthetic.generate import MISSING_ID, MISSING_INTEGER, ClickLog, ClickRows
from hotbed.data.synthetic.shapes import SHAPES, Shape, find_shape
from hotbed.data.synthetic.text_files import write_days, write_text, write_tsv
from hotbed.data.synthetic.write import (
    TEST_ROWS,
    TRAIN_ROWS,
    VALID_ROWS,
    check_train_rows,
    make_log,
    other_rows,
    write_dataset,
)

__all__ = [
    "MISSING_ID",
    "MISSING_INTEGER",
    "SHAPES",
    "TEST_ROWS",
    "TRAIN_ROWS",
    "VALID_ROWS",
    "ClickLog",
    "ClickRows",
    "Shape",
    "check_train_rows",
    "find_shape",
    "make_log",
    "other_rows",
    "write_dataset",
    "write_days",
    "write_text",
    "write_tsv",
]
