"""What every rank imports, loaded once and then forked: importing torch takes seconds. It trains nothing."""

import torch.distributed  # noqa: F401
from numba.core.registry import cpu_target

import hotbed.tables  # noqa: F401

cpu_target.typing_context.refresh()  # what Numba knows of Python and NumPy, else loaded at the first call of a kernel
cpu_target.target_context.refresh()
