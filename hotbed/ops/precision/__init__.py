"""Weights of 16 bits: arithmetic runs in float32, and what is written back is rounded at random, without bias.

A weight of 1 in bfloat16 has neighbours 0.4 to 0.8 % away: rounding to the nearest would swallow every smaller step, and
training would stand still. Rounded up with the probability of the part that is cut off, a step of any size counts on
average. The random bits are a hash of (seed, group, update number, key, element), never of a slot, a thread or a device:

    salt = salt_of(stream, update number)        one number per update, on the host
    bits of an element = hash of (salt, key) by splitmix64, then of the element's place by a 32-bit mix

so the cache stays invisible and a resumed run continues with the same bits. A finite number never becomes infinite: it stops
at the largest number of its type. First values are rounded to the nearest.
"""

from __future__ import annotations

FP32, FP16, BF16 = 0, 1, 2  # inside kernels
KINDS = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
_MASK = (1 << 64) - 1


def salt_of(stream: int, number: int) -> int:
    """The 64-bit number that stands for update `number` of the group that `stream` names."""
    x = (stream + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
