"""What a run will take and how fast it will be, before it starts: settings and data in, an Outlook out.

asked.py        a run that is asked about: its batches, tables and course, each found once
thinned.py      counts of all ids -> a small epoch that stands for the whole
traffic.py      the run's own batches -> hits and rows moved of a step (simulated)
memory.py       settings -> bytes of every tier and of the workspace
calibrate.py    a few seconds of this machine -> seconds of the parts of a step
speed.py        both -> the stages of a step, the one that the others wait for, samples/s
outlook.py      all of it for one setting, and what does not fit, with the way out
what_if.py      the same with other budgets, batch sizes, dims, optimizers, ranks; a recommendation
beside.py       what happened, beside what was forecast
"""

from hotbed.outlook.asked import Asked
from hotbed.outlook.outlook import Outlook, look_out

__all__ = ["Asked", "Outlook", "look_out"]
