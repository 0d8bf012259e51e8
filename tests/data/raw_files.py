"""Small raw files for the tests of raw data: rows of every format, plain and packed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa

from hotbed.data.formats import Text


def text_of(values: list[str | bytes]) -> Text:
    """Values as spans of one buffer, with a byte of noise between them."""
    pieces = [value.encode() if isinstance(value, str) else value for value in values]
    data = np.frombuffer(b"#".join([*pieces, b""]) or b"#", dtype=np.uint8).copy()
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths + 1)[:-1]]).astype(np.int64) if pieces else lengths
    return Text(data, starts, starts + lengths)


def criteo_line(
    label: object = 1, integers: dict[int, object] | None = None, hexes: dict[int, object] | None = None
) -> str:
    """One Criteo row with some values replaced (keys from 1)."""
    first = [str((integers or {}).get(i, i * 3)) for i in range(1, 14)]
    second = [str((hexes or {}).get(i, f"{i * 2654435761 % 2**32:08x}")) for i in range(1, 27)]
    return "\t".join([str(label), *first, *second])


def write(path: Path, *lines: str | bytes, end: str = "\n") -> Path:
    """Lines, each with its line break."""
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + end.encode() for line in lines))
    return path


def unpack_lines(path: Path) -> list[str]:
    """The lines of an .xz file."""
    return lzma.decompress(path.read_bytes()).decode().splitlines()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def zipped(data: bytes, *names: str) -> bytes:
    """An archive of files with the same content."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names or ("log.csv",):
            archive.writestr(name, data)
    return sink.getvalue()


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd, "zip": zipped}
