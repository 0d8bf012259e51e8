"""Ops: ids -> keys -> vectors -> gradients -> updated rows.

One folder per op: reference.py is plain torch and obviously right, numba.py is compiled for the CPU, triton.py for CUDA,
__init__.py chooses.
"""
