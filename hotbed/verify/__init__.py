"""Law 1 on a user's own tables and data: trains two twins, one plain, one with a cache, and compares every bit.

A function makes the twins; the result is a verdict with step, table, id and values of the first difference. After every step it
compares the loss, the looked-up vectors, their gradients and the records of all rows of the batch, before and after; at the end
every row that was used, read from its tier. The price is a copy of the batch's records on each side: a step takes two to four
times as long.
"""

from hotbed.verify.twins import Difference, Make, Step, TwinStorage, Verdict, verify
from hotbed.verify.watch import PLACES, inject

__all__ = ["PLACES", "Difference", "Make", "Step", "TwinStorage", "Verdict", "inject", "verify"]
