"""Nodes made of network namespaces on one machine: wall time per step over links of a given rate."""
