"""Benchmarks: each checks its results before it measures, compares side by side in one run, and writes CSV rows."""
