"""A run and one of its rows in; where the row is, what became of it, and what will out.

opened.py       a run folder -> its settings, its data, its newest checkpoint
asked.py        a table and an id or a raw value -> the row that is meant
passes.py       settings and data -> the batches of the run, epoch by epoch, with the evaluations between them
history.py      the batches through the run's cache again -> when rows came in and left, to the row
saved.py        the checkpoint -> what it holds of a row
place.py        the checkpoint -> where a row is, its norms, its score among all rows in the cache
next_use.py     the reader's order -> when the row is used next
explain.py      all of it, for one row; the rows of a table that were used or evicted most
"""

from hotbed.forecast.explain.explain import Explanation, explain, top_rows

__all__ = ["Explanation", "explain", "top_rows"]
