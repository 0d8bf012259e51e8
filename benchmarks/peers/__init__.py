"""Whole training runs of hotbed compared with those of FuxiCTR and DeepCTR-Torch, on real data: seconds to a given AUC.

    python -m benchmarks.peers --help

Each system trains in a process of its own, by its own loop and its own loader. Of this package a peer's process imports
`job` and its own `run_*`, which need numpy and the peer alone.
"""
