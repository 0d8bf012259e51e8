"""The files: segments of records, and the index file next to the segments of a checkpoint.

A segment, `segment-<number>-<seed>.rows`, is only ever appended to, then sealed. All numbers are little-endian.

    header, 64 bytes
        0   magic          8 bytes   b"HOTBEDSG"
        8   version        uint32    1
        12  header bytes   uint32    64
        16  width          uint32    float32 words of a record
        20  record bytes   uint32    16 + 4 * width, rounded up to a multiple of 8
        24  seed           uint64    random; part of every checksum of this segment
        32  number         uint64    counts the segments of a store
        40  store          16 bytes  uuid of the store that wrote it
        56  checksum       uint64    of the 56 bytes before
    then records, one after the other, each of `record bytes`
        0   key            int64
        8   checksum       uint64    of (seed, number of the record in its segment, key, payload)
        16  payload        width * float32, then zeros up to the record's end

Seed and number are part of a record's checksum, so that correct bytes in a wrong place (a lost or misdirected write) are
noticed like flipped bits. A segment does not say which records are live: of two records with one key only one may be.
That is in the index file, `rows.index`:

        0   magic          8 bytes   b"HOTBEDIX"
        8   version        uint32    1
        12  facts bytes    uint32
        16  facts          JSON: width, record_bytes, num_rows, segments: [{name, num_records, num_live, live_bytes}]
        ..  live bitmaps   of the segments in this order; bit r % 8 (lowest first) of byte r / 8 is record r
        end checksum       uint64    of all bytes before

Checksums of records are computed by kernels.checksum, those of headers and of the index are the first 8 bytes of BLAKE2b.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import StoreError

VERSION = 1
HEADER_BYTES = 64
RECORD_HEAD = 16  # key and checksum
INDEX_NAME = "rows.index"
MAX_RECORD_BYTES = 1 << 20
_SEGMENT_MAGIC, _INDEX_MAGIC = b"HOTBEDSG", b"HOTBEDIX"
_HEADER = struct.Struct("<8sIIIIQQ16s")
_INDEX_HEAD = struct.Struct("<8sII")

Bits = NDArray[np.uint64]  # one bit for each record of a segment


class Header(NamedTuple):
    """The first bytes of a segment."""

    width: int
    seed: int
    number: int
    store: bytes

    @property
    def name(self) -> str:
        return f"segment-{self.number:010d}-{self.seed:016x}.rows"


class IndexedSegment(NamedTuple):
    """A sealed segment, as an index file describes it."""

    name: str
    num_records: int
    live: Bits

    @property
    def num_live(self) -> int:
        return int(np.unpackbits(self.live.view(np.uint8)).sum())


class Index(NamedTuple):
    """The content of an index file."""

    width: int
    num_rows: int
    segments: list[IndexedSegment]


def record_bytes(width: int) -> int:
    """The bytes of one record on disk."""
    return RECORD_HEAD + -(-4 * width // 8) * 8


def no_bits(num_records: int) -> Bits:
    """A bitmap for `num_records`, none of them live."""
    return np.zeros(-(-num_records // 64), dtype=np.uint64)


def pack_header(header: Header) -> bytes:
    """The 64 bytes of a header."""
    size = record_bytes(header.width)
    parts = (_SEGMENT_MAGIC, VERSION, HEADER_BYTES, header.width, size, header.seed, header.number, header.store)
    data = _HEADER.pack(*parts)
    return data + _digest(data)


def read_header(path: Path, data: bytes) -> Header:
    """The header of a segment, or a StoreError that says what is wrong with it."""
    if len(data) < HEADER_BYTES:
        raise StoreError(f"{path} is damaged: it has {len(data)} bytes, its header alone has {HEADER_BYTES}.")
    magic, version, _, width, size, seed, number, store = _HEADER.unpack_from(data)
    _check_kind(path, magic, _SEGMENT_MAGIC, version, "a segment of rows")
    if _digest(data[: HEADER_BYTES - 8]) != data[HEADER_BYTES - 8 : HEADER_BYTES] or size != record_bytes(width):
        raise StoreError(f"{path} is damaged: its header does not match its checksum. Use another checkpoint.")
    return Header(width, seed, number, store)


def pack_index(index: Index) -> bytes:
    """The bytes of an index file."""
    segments, bitmaps = [], []
    for segment in index.segments:
        bitmaps.append(segment.live.astype("<u8").tobytes()[: -(-segment.num_records // 8)])
        numbers = {"num_records": segment.num_records, "num_live": segment.num_live, "live_bytes": len(bitmaps[-1])}
        segments.append({"name": segment.name, **numbers})
    shape = {"width": index.width, "record_bytes": record_bytes(index.width), "num_rows": index.num_rows}
    facts = json.dumps({**shape, "segments": segments}).encode()
    data = b"".join([_INDEX_HEAD.pack(_INDEX_MAGIC, VERSION, len(facts)), facts, *bitmaps])
    return data + _digest(data)


def read_index(folder: Path) -> Index:
    """The index file of a checkpoint's folder, or a StoreError."""
    path = folder / INDEX_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{folder} holds no rows of a store: {INDEX_NAME} cannot be read ({error.strerror})."
        ) from error
    if len(data) < _INDEX_HEAD.size + 8:
        raise StoreError(f"{path} is damaged: it has {len(data)} bytes only. Use another checkpoint.")
    magic, version, num_facts = _INDEX_HEAD.unpack_from(data)
    _check_kind(path, magic, _INDEX_MAGIC, version, "an index of rows")
    if _digest(data[:-8]) != data[-8:]:
        raise StoreError(f"{path} is damaged: its content does not match its checksum. Use another checkpoint.")
    at = _INDEX_HEAD.size + num_facts
    facts = json.loads(data[_INDEX_HEAD.size : at])
    segments = []
    for segment in facts["segments"]:
        live = no_bits(segment["num_records"])
        live.view(np.uint8)[: segment["live_bytes"]] = np.frombuffer(data, np.uint8, segment["live_bytes"], at)
        segments.append(IndexedSegment(segment["name"], segment["num_records"], live))
        at += segment["live_bytes"]
    return Index(facts["width"], facts["num_rows"], segments)


def open_segment(path: Path, width: int, num_records: int) -> tuple[int, Header]:
    """(file descriptor for reading, header) of a sealed segment that must hold `num_records` of `width` words."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. Use another checkpoint.") from error
    try:
        header = read_header(path, os.pread(handle, HEADER_BYTES, 0))
        size, needed = os.fstat(handle).st_size, HEADER_BYTES + num_records * record_bytes(width)
        if header.width != width:
            raise StoreError(f"{path} holds records of {header.width} words, its index says {width}.")
        if size < needed:
            raise StoreError(
                f"{path} is damaged: {num_records} records need {needed} bytes, it has {size}. Use another checkpoint."
            )
    except OSError as error:
        os.close(handle)
        raise StoreError(f"{path} cannot be read: {error.strerror}. Use another checkpoint.") from error
    except StoreError:
        os.close(handle)
        raise
    return handle, header


def _check_kind(path: Path, magic: bytes, expected: bytes, version: int, kind: str) -> None:
    if magic != expected:
        raise StoreError(f"{path} is not {kind}: it starts with {magic!r}, not {expected!r}.")
    if version > VERSION:
        raise StoreError(
            f"{path} has format version {version}; this hotbed reads up to {VERSION}. Install a newer hotbed."
        )


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
