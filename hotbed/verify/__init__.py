"""Law 1 on a user's own tables and data: two twins train side by side, one plain, one with a cache, and every bit is compared.

In: a function that makes a twin, and batches. Out: a verdict, and at the first difference its step, table, id and values.
After every step the loss, the vectors that were looked up, their gradients and the records of all rows of the batch, before
and after, are compared; at the end every row that was used, read from where it lies. The price is a copy of the batch's
records on each side: a step takes two to four times as long.
"""

from hotbed.verify.compare import Difference
from hotbed.verify.inject import PLACES, inject
from hotbed.verify.twins import Make, Step, TwinStorage, Verdict, verify

__all__ = ["PLACES", "Difference", "Make", "Step", "TwinStorage", "Verdict", "inject", "verify"]
