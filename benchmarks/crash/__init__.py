"""Runs that are killed again and again, and must end as the one that was left alone.

ahead.py       what all processes have in common, loaded once
processes.py   hotbed in a process of its own, killed at a moment or at a change on the disk
stages.py      what a process was doing when it was killed
runs.py        the settings, one life of a run, what must be the same at its end
__main__.py    `python -m benchmarks.crash`
"""
