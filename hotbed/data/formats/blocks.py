"""A path in, blocks of whole lines out; .gz, .bz2, .xz, .zst and a .zip of one file are recognised by their first bytes.

A block is a writable byte array that ends with a complete line (the last one perhaps without its line break), so parsers never
see half a row. Only one block is in memory at a time; a line must fit into one. Plain text can be read from any line on, so a
large file is divided into several reels; line numbers are found by counting line breaks (about 4 GB/s per core).
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import pyarrow as pa

from hotbed.data.formats.chunk import REEL_BYTES, WHOLE, Reel
from hotbed.errors import FormatError, RemoteError
from hotbed.files.path import size_of
from hotbed.host.jit import njit

BLOCK_BYTES = 8 << 20
_NEWLINE = 10
_SHOWN_FILES = 5
_TAR = slice(257, 262)  # where a tar archive says what it is
_UNPACK_ERRORS = (EOFError, OSError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, pa.ArrowException)


class TextBlock(NamedTuple):
    """Whole lines of a file."""

    data: np.ndarray  # uint8, writable
    first_line: int  # from 1
    bytes_read: int  # on disk, from the start of the reel


def read_blocks(path: Path, block_bytes: int = BLOCK_BYTES, reel: Reel = WHOLE) -> Iterator[TextBlock]:
    """Blocks of a reel of `path` in order. A byte order mark at the start of the file is dropped."""
    with open_raw(path) as raw:
        stream = unpacked(raw, path)
        if reel.begin:
            raw.seek(reel.begin)
        left = reel.end - reel.begin if reel.end is not None else 1 << 62
        line = reel.first_line
        rest = np.empty(0, dtype=np.uint8)  # an unfinished line
        at_start = reel.begin == 0
        while True:
            buffer = np.empty(block_bytes, dtype=np.uint8)
            kept = len(rest)
            buffer[:kept] = rest
            fresh = _fill(stream, buffer[kept : kept + min(left, block_bytes - kept)], path)
            left -= fresh
            filled = kept + fresh
            ended = filled < block_bytes
            if at_start:
                filled = _drop_mark(buffer, filled, path)
                at_start = False
            cut = filled if ended else _after_last_newline(buffer, filled)
            if cut == 0:
                if ended:
                    return
                raise FormatError(
                    f"{path}: line {line} is longer than {block_bytes:,} bytes, the limit. Is this a text file? "
                    "Give its format with --format (criteo, csv, parquet, libsvm, lists)."
                )
            rest = buffer[cut:filled].copy()
            yield TextBlock(buffer[:cut], line, raw.tell() - reel.begin)
            if ended:
                return
            line += int(count_newlines(buffer[:cut]))


def text_reels(path: Path) -> Iterator[Reel]:
    """Reels of about REEL_BYTES; a compressed file is one reel, because it can only be read from its start."""
    with open_raw(path) as raw:
        size = size_of(raw)
        if size <= REEL_BYTES or unpacked(raw, path) is not raw:
            yield Reel(num_bytes=size)
            return
        begin, line = 0, 1
        while begin < size:
            end = min(begin + REEL_BYTES, size)
            if end < size:
                end = _next_line(raw, end)
            yield Reel(begin, end, line, end - begin)
            if end < size:
                line += _count_lines(raw, begin, end, path)
            begin = end


def _next_line(raw: BinaryIO, place: int) -> int:
    """The start of the first line at or after `place`."""
    raw.seek(place - 1)
    while piece := raw.read(1 << 16):
        found = piece.find(b"\n")
        if found >= 0:
            return place + found
        place += len(piece)
    return place


def _count_lines(raw: BinaryIO, begin: int, end: int, path: Path) -> int:
    buffer = np.empty(min(BLOCK_BYTES, end - begin), dtype=np.uint8)
    lines = 0
    raw.seek(begin)
    while begin < end:
        filled = _fill(raw, buffer[: end - begin], path)
        if filled == 0:
            break
        lines += int(count_newlines(buffer[:filled]))
        begin += filled
    return lines


@njit(nogil=True, cache=True)
def count_newlines(data: np.ndarray) -> int:
    count = 0
    for i in range(len(data)):
        count += data[i] == _NEWLINE
    return count


def first_line(path: Path, limit: int = 1 << 16) -> bytes:
    """The first line that is not blank, without its line break; at most `limit` bytes."""
    with open_raw(path) as raw:
        stream = unpacked(raw, path)
        buffer = np.empty(limit, dtype=np.uint8)
        filled = _fill(stream, buffer, path)
        filled = _drop_mark(buffer, filled, path)
        return buffer[:filled].tobytes().lstrip(b"\r\n").split(b"\n", 1)[0].rstrip(b"\r")


def open_raw(path: Path) -> BinaryIO:
    """Open the bytes on disk; a FormatError if the path cannot be read."""
    try:
        if path.is_dir():
            raise FormatError(
                f"{path} is a directory where a file is needed. Name the files in it, or the directory alone."
            )
        return path.open("rb")
    except RemoteError:
        raise
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error


def unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    """The decompressed stream; the stream itself if it is not compressed."""
    try:
        magic = raw.read(6)
        raw.seek(0)
    except RemoteError:
        raise
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}.") from error
    if magic.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if magic.startswith(b"BZh"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return cast(BinaryIO, pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd"))
    return _only_file(raw, path) if magic.startswith(b"PK\x03\x04") else raw


def _only_file(raw: BinaryIO, path: Path) -> BinaryIO:
    """The file in a zip archive; a FormatError if there are several, as in an archive of tables or a workbook."""
    try:
        archive = zipfile.ZipFile(raw)
        names = [one.filename for one in archive.infolist() if not one.is_dir()]
        if len(names) == 1:
            return cast(BinaryIO, archive.open(names[0]))
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or packed in another way
        raise FormatError(
            f"{path} is a zip archive that cannot be read: {error}. Unpack it, and give its files."
        ) from error
    except _UNPACK_ERRORS as error:
        raise _damaged(path, error) from error
    shown = ", ".join(names[:_SHOWN_FILES]) + (", ..." if len(names) > _SHOWN_FILES else "")
    raise FormatError(
        f"{path} is a zip archive of {len(names)} files ({shown}), where one is needed. Unpack it with `unzip "
        f"{shlex.quote(str(path))}`, and give the file with the log; a workbook has to be saved as CSV."
    )


def _fill(stream: BinaryIO, into: np.ndarray, path: Path) -> int:
    """Read until `into` is full or the stream ends; returns the number of bytes read."""
    filled = 0
    view = into.data
    try:
        while filled < len(into):
            read = cast(io.BufferedIOBase, stream).readinto(view[filled:])
            if not read:
                break
            filled += read
    except RemoteError:
        raise
    except _UNPACK_ERRORS as error:
        raise _damaged(path, error) from error
    return filled


def _damaged(path: Path, error: Exception) -> FormatError:
    return FormatError(
        f"{path} is damaged or truncated: {error}. Nothing of it was used; copy or download the file again."
    )


def _drop_mark(buffer: np.ndarray, filled: int, path: Path) -> int:
    start = buffer[: min(filled, 4)].tobytes()
    if buffer[:filled][_TAR].tobytes() == b"ustar":
        raise FormatError(
            f"{path} is a tar archive. Unpack it with `tar -xf {shlex.quote(str(path))}`, and give its files."
        )
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise FormatError(f"{path} is UTF-16 text; hotbed reads UTF-8. Convert it: iconv -f utf-16 -t utf-8.")
    if start.startswith(b"\xef\xbb\xbf"):
        buffer[: filled - 3] = buffer[3:filled].copy()
        return filled - 3
    return filled


def _after_last_newline(buffer: np.ndarray, filled: int) -> int:
    window = 1 << 16
    end = filled
    while end > 0:
        begin = max(0, end - window)
        found = np.flatnonzero(buffer[begin:end] == _NEWLINE)
        if len(found):
            return begin + int(found[-1]) + 1
        end = begin
    return 0
