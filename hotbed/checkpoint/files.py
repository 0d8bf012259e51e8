"""Small tensors and files on disk: safetensors (no pickle) and checksums; dense weights and optimizer state as named tensors.

Tensors are written in pieces: a table of many gigabytes, strided inside its records, needs extra memory for one piece only.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotbed.errors import RunError
from hotbed.host.atomic import writing
from hotbed.host.background import pause

_PIECE = 32 << 20  # bytes
_READ_AT_ONCE = 1 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DENSE, OPTIMIZER = "dense", "dense_optimizer"


class PiecewiseTensor(NamedTuple):
    """A tensor that is never whole in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterator[Tensor]]  # rows, in order


def in_file_order(tensors: Mapping[str, Tensor | PiecewiseTensor]) -> list[str]:
    """Wide types come first, so that every tensor is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def write_tensors(path: Path, tensors: Mapping[str, Tensor | PiecewiseTensor]) -> None:
    """A safetensors file."""
    names = in_file_order(tensors)
    header: dict[str, object] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            tensor = tensors[name]
            for part in tensor.pieces() if isinstance(tensor, PiecewiseTensor) else [tensor]:
                for piece in _pieces(part.detach()):
                    # a clone: one element of a strided row counts as contiguous, yet cannot be viewed as bytes
                    whole = piece.cpu().clone(memory_format=torch.contiguous_format)
                    file.write(whole.view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}). It is damaged or not a safetensors file.") from error


def checksum(path: Path) -> int:
    value, piece = 0, memoryview(bytearray(_READ_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            value = zlib.crc32(piece[:count], value)
            pause()
    return value


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in row order, flat, in pieces of at most _PIECE bytes (or one row)."""
    if not tensor.numel():
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, _PIECE // (rows[0].numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step].reshape(-1)


def dense_tensors(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Tensor]]:
    """Copies: weights and buffers, and `<parameter number>.<name>` of the optimizer."""
    files: dict[str, dict[str, Tensor]] = {}
    if model is not None:
        files[DENSE] = _copied(model.state_dict())
    if optimizer is not None:
        states = optimizer.state_dict()["state"]
        files[OPTIMIZER] = _copied({f"{n}.{name}": one for n, state in states.items() for name, one in state.items()})
    return files


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Load its state; learning rates and other settings stay as they are."""
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        states.setdefault(int(number), {})[name] = value.clone()  # the file is mapped into memory and may be removed
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(one, device="cpu").detach().to("cpu", copy=True) for name, one in tensors.items()}


def mean_of(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the dense tensors of several ranks, where they differ; integers are those of the first."""
    found = {}
    for name, first in parts[0].items():
        if not first.is_floating_point() or all(torch.equal(first, part[name]) for part in parts[1:]):
            found[name] = first
        else:
            found[name] = torch.stack([part[name].double() for part in parts]).mean(0).to(first.dtype)
    return found
