"""Click logs made up on the spot, shaped like Criteo's, with a known best AUC."""

from hotbed.data.synthetic.generate import GENERATION, MISSING_ID, MISSING_INTEGER, ClickRows, CriteoLike
from hotbed.data.synthetic.text import write_tsv
from hotbed.data.synthetic.write import TEST_ROWS, TRAIN_ROWS, VALID_ROWS, other_rows, write_dataset

__all__ = [
    "GENERATION",
    "MISSING_ID",
    "MISSING_INTEGER",
    "TEST_ROWS",
    "TRAIN_ROWS",
    "VALID_ROWS",
    "ClickRows",
    "CriteoLike",
    "other_rows",
    "write_dataset",
    "write_tsv",
]
