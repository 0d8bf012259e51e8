"""Ops: ids -> keys -> vectors -> gradients -> updated rows.

One folder per op: reference.py is plain torch and obviously right, numba.py is the compiled CPU version, __init__.py
chooses. On a CUDA device the reference runs, on the device.
"""
