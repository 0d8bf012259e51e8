"""Tensors and folders on disk, whole or not at all.

A folder is filled beside its final place, gets a manifest with the size and checksum of every file, is flushed to the disk
and then renamed; the old one stays until the new one is whole. Tensors are safetensors files (no pickle), written in
pieces: a table of many gigabytes, strided inside its records, needs one piece of extra memory and no second copy.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hotbed.errors import RunError

MANIFEST = "manifest.json"
_PIECE = 32 << 20  # bytes
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}. Free some space or choose another folder with --out."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file in one step: a reader sees the old text or the new."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file; wide types come first, so that every tensor is aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            for piece in _pieces(tensors[name].detach()):
                # a clone, because one element of a strided row counts as contiguous and yet cannot be viewed as bytes
                whole = piece.cpu().clone(memory_format=torch.contiguous_format)
                file.write(whole.view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}). It is damaged or no safetensors file.") from error


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder, then put it in the place of the old one."""
    new, old = (folder.with_name(folder.name + suffix) for suffix in (".new", ".old"))
    with writing(folder):
        recover_folder(folder)
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir(parents=True)
            fill(new)
            files = sorted(path for path in new.rglob("*") if path.is_file())
            marks = {str(path.relative_to(new)): [path.stat().st_size, _checksum(path)] for path in files}
            (new / MANIFEST).write_text(json.dumps(marks, indent=1) + "\n")
            for path in [*files, new / MANIFEST, new]:
                _flush(path)
        except (OSError, RunError):
            shutil.rmtree(new, ignore_errors=True)  # a full disk needs the space
            raise
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
        _flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """After a crash between the two renames of write_folder, the old folder takes its place again."""
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        os.replace(old, folder)


def check_folder(folder: Path) -> None:
    """A RunError unless every file is there as the manifest says."""
    try:
        marks = json.loads((folder / MANIFEST).read_text())
        for name, (size, checksum) in marks.items():
            found = (folder / name).stat().st_size
            if found != size:
                raise RunError(f"{folder} is damaged: {name} has {found} bytes, its manifest says {size}.")
            if _checksum(folder / name) != checksum:
                raise RunError(f"{folder} is damaged: the content of {name} does not fit its checksum.")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{folder} is damaged ({type(error).__name__}: {error}).") from error


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in row order, flat, in pieces of at most _PIECE bytes (or one row)."""
    if not tensor.numel():
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    step = max(1, _PIECE // (rows[0].numel() * rows.element_size()))
    for start in range(0, rows.shape[0], step):
        yield rows[start : start + step].reshape(-1)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            value = zlib.crc32(piece, value)
    return value


def _flush(path: Path) -> None:
    """Bring a file or a folder to the disk; some file systems have no folders to flush."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
