"""Runs that are killed repeatedly, and must end like an undisturbed one.

ahead.py       what all processes have in common, loaded once
processes.py   hotbed in a process of its own, killed at a moment or at a change on the disk
stages.py      what a process was doing when it was killed
runs.py        the settings, one life of a run, what must be the same at its end
__main__.py    `python -m benchmarks.crash`
"""
