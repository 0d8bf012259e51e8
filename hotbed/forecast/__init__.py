"""What a run will take and how fast it will be, before it starts; and what a cache did with a row.

trace.py        batches -> the distinct keys of each; id_file.py reads those that another system logged
replay.py       a trace -> what a cache does with it, window by window; optimum.py, curves.py use it
request.py      the run in question: its batches, tables and course, each found once
sampled.py      counts of all ids -> a small epoch that stands for the whole
traffic.py      the run's own batches -> hits and rows moved of a step
memory.py       settings -> bytes of every tier and of the workspace
calibrate.py    a few seconds of this machine -> seconds of the parts of a step
measure.py      a cache and an ssd of this machine -> seconds to plan a batch, bytes/s of random reads
speed.py        both -> the stages of a step, the slowest of them, samples/s
network.py      id frequencies -> bytes that ranks send; step_time.py turns them into seconds
forecast.py     all of it for one setting, and what does not fit, with the way out
what_if.py      the same with other budgets, batch sizes, dims, optimizers, ranks; a recommendation
comparison.py   the forecast compared with what happened
explain/        one row of a run: where it is, its history, its next use
"""
