"""A run and one of its rows in; where the row is, what became of it, and what will out.

run.py          a run folder -> its settings, its data, its newest checkpoint; a table and an id or a raw value -> the row
history.py      the batches through the run's cache again -> when rows came in and left, to the row; when one is used next
place.py        the checkpoint -> where a row is, its norms, its score among all rows in the cache
explain.py      all of it, for one row; the rows of a table that were used or evicted most
"""

from hotbed.forecast.explain.explain import Explanation, explain, top_rows

__all__ = ["Explanation", "explain", "top_rows"]
