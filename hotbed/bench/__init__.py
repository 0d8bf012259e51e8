"""The embedding step and the whole training step, ours beside FBGEMM's and torch's, on the same ids in one process.

workload    ids with Criteo-Kaggle's cardinalities, made once on the device
setting     what one measurement varies
systems     the systems by name; hotbed_systems, fbgemm and torch_bags hold them
check       the gate: a system whose results differ from a float64 reference is not timed
timing      wall clock over groups of steps
limits      the fewest bytes of a step, and how fast this device copies
environment hardware, versions and commit
results     one CSV row per measurement
run         all settings, all systems, one after the other
"""
