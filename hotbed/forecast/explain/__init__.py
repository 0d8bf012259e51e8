"""A run and one of its rows -> the place, history and next use of the row.

run.py          a run folder -> its settings, its data, its newest checkpoint; a table and an id or a raw value -> the row
history.py      replays the batches through the run's cache -> when rows came in and left; when one is used next
place.py        the checkpoint -> the place of a row, its norms, its score among all rows in the cache
explain.py      all of this for one row; the rows of a table that were used or evicted most
"""

from hotbed.forecast.explain.explain import Explanation, explain, top_rows

__all__ = ["Explanation", "explain", "top_rows"]
