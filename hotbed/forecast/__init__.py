"""What a run will need and how fast it will be, before it starts; and the history of a row in the cache.

trace.py        batches -> the distinct keys of each, of a dataset or of a file of ids
replay.py       a trace -> hits, misses and evictions of a cache, window by window; optimum.py and curves.py use it
request.py      the run in question: its batches, tables and schedule, each computed once
sampled.py      counts of all ids -> a small epoch that represents the whole
traffic.py      the run's own batches -> hits and moved rows of a step
memory.py       settings -> bytes of every tier and of the workspace
calibrate.py    a few seconds of measuring on this machine -> seconds of the parts of a step
measure.py      seconds to plan a batch on this CPU, bytes/s of random reads from its ssd
network.py      id frequencies -> bytes that ranks send
step_time.py    all of these -> the stages of a step in seconds, the slowest of them, samples/s
forecast.py     everything for one setting, and what does not fit, with a way out
what_if.py      the same with other budgets, batch sizes, dims, optimizers or ranks; a recommendation
comparison.py   the forecast compared with what happened
explain/        one row of a run: its place, history and next use
"""
