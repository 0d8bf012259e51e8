"""The embedding step and the whole training step, ours compared with FBGEMM's and torch's, on the same ids in one process.

setting     what one measurement varies; the same work in several processes
workload    ids with Criteo-Kaggle's cardinalities, made once on the device
systems     the systems by name: hotbed's and torch's; fbgemm holds the others
check       the gate: a system whose results differ from a float64 reference is not timed
timing      wall clock over groups of steps, and the time in which the GPU works
run         all settings, all systems, one after the other
results     one CSV row per measurement, with hardware, versions and commit
"""
