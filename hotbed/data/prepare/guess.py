"""Integer columns of unknown meaning in, those that are ids and not quantities out, with the reason.

Read as a quantity, the id of a user or an item is a number whose size means nothing, and a model learns next to nothing from
it. Three signs are used. The name: `user_id`, `movieId`, `ip`, `zip`; such a column becomes an id feature. Leading zeros, as in
`00123`: likewise. The values: a
quantity has smooth counts (about as many rows with 17 as with 18), the counts of ids jump from one id to the next; since
prices do the same, such a column remains a number and is only reported. A column in which nearly every row has a different
value is a row number, whatever its name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROW_NUMBER = 0.9  # distinct values per row, at least
_MANY_ROWS = 1000  # to recognise a row number
_ROWS = 200_000  # that are inspected
_FEWEST, _REPEATED = 50, 3  # distinct values, and rows per value, to judge the counts
_ROUGH, _UNEVEN = 0.25, 3.0  # correlation of the counts of neighbours, at most; variance over mean, at least
_KEYS = frozenset(
    (
        "id",
        "ids",
        "uid",
        "uuid",
        "guid",
        "key",
        "code",
        "hash",
        "ip",
        "zip",
        "zipcode",
        "postcode",
        "sku",
        "asin",
        "isbn",
        "cookie",
    )
)
_ENTITIES = frozenset(
    (
        "user",
        "item",
        "movie",
        "film",
        "ad",
        "app",
        "device",
        "os",
        "channel",
        "product",
        "customer",
        "client",
        "site",
        "campaign",
        "advertiser",
        "publisher",
        "creative",
        "query",
        "keyword",
        "category",
        "subcategory",
        "brand",
        "merchant",
        "store",
        "shop",
        "city",
        "country",
        "state",
        "region",
        "session",
        "artist",
        "song",
        "track",
        "album",
        "book",
        "video",
        "article",
        "author",
        "page",
        "url",
        "domain",
        "browser",
        "model",
        "genre",
        "department",
        "member",
        "account",
        "seller",
        "buyer",
        "station",
        "gender",
        "occupation",
        "agent",
        "agency",
        "company",
        "vendor",
        "supplier",
        "carrier",
        "airline",
        "airport",
        "driver",
        "segment",
        "placement",
    )
)
_MEASURES = frozenset(
    (
        "num",
        "number",
        "count",
        "counts",
        "cnt",
        "n",
        "days",
        "hours",
        "minutes",
        "seconds",
        "price",
        "amount",
        "size",
        "age",
        "time",
        "sum",
        "avg",
        "mean",
        "total",
        "rank",
        "score",
        "len",
        "length",
        "duration",
        "since",
        "rate",
        "ratio",
        "share",
        "year",
        "years",
        "value",
        "distance",
        "width",
        "height",
        "weight",
        "balance",
    )
)
_JOINED = re.compile(r"[a-z]+(id|ids|code)")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class IdGuess(NamedTuple):
    """Why an integer column looks like ids."""

    is_certain: bool  # it is read as ids; otherwise it is only reported
    why: str


def guess_id(name: str, values: NDArray[np.int64], *, padded: bool = False) -> IdGuess | None:
    """The guess for a column, given its values without the missing ones; None if it looks like a quantity.

    `padded`: as text, values have leading zeros, which no quantity has.
    """
    values = values[:_ROWS]
    if not len(values):
        return None
    distinct, counts = np.unique(values, return_counts=True)
    is_row_number = len(values) >= _MANY_ROWS and len(distinct) >= ROW_NUMBER * len(values)
    if padded and not is_row_number:
        return IdGuess(True, f"some have leading zeros; {len(distinct):,} values in {len(values):,} rows")
    if is_named_id(name):
        if is_row_number:
            return IdGuess(False, "its name is that of an id, but nearly every row has a different value")
        return IdGuess(True, f"by its name; {len(distinct):,} values in {len(values):,} rows")
    if is_row_number or not _has_rough_counts(counts, len(values)):
        return None
    return IdGuess(False, f"its {len(distinct):,} values repeat like ids: some are frequent, their neighbours are not")


def is_named_id(name: str) -> bool:
    """Whether a column is called like an id."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or _MEASURES & set(words):
        return False
    return words[-1] in _KEYS or words[-1] in _ENTITIES or bool(_JOINED.fullmatch(words[-1]) and _is_entity(words[-1]))


def _is_entity(word: str) -> bool:
    """`userid`, `itemids`, `zipcode`."""
    return any(word.removesuffix(key) in _ENTITIES | _KEYS for key in ("id", "ids", "code") if word.endswith(key))


def _has_rough_counts(counts: NDArray[np.int64], rows: int) -> bool:
    """Whether the counts of values, in the order of the values, differ much and not smoothly."""
    if len(counts) < _FEWEST or rows < _REPEATED * len(counts):
        return False
    if counts.var() < _UNEVEN * counts.mean():
        return False
    logs = np.log(counts)
    if logs.std() == 0:
        return False
    return float(np.corrcoef(logs[:-1], logs[1:])[0, 1]) < _ROUGH
