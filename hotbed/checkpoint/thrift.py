"""The little of Thrift's compact encoding that the headers of a Parquet file need: structs of numbers, texts, lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["byte", "int", "long", "text", "struct"]
_CODES: dict[Kind, int] = {"byte": 3, "int": 5, "long": 6, "text": 8, "struct": 12}
_LIST = 9
_TRUE, _FALSE = 1, 2


class Field(NamedTuple):
    """One field of a struct; a list of values makes it a list, True or False a boolean."""

    number: int
    kind: Kind
    value: int | bytes | Sequence[int | bytes]


def varint(number: int) -> bytes:
    """An unsigned number, seven bits a byte."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def struct(*fields: Field) -> bytes:
    """An encoded struct; field numbers ascend."""
    out, last = bytearray(), 0
    for number, kind, value in fields:
        if isinstance(value, bool):
            code = _TRUE if value else _FALSE
        else:
            code = _CODES[kind] if isinstance(value, int | bytes) else _LIST
        out.append((number - last) << 4 | code)
        last = number
        if isinstance(value, int | bytes):
            out += b"" if isinstance(value, bool) else _value(kind, value)
        else:
            size = len(value)
            out += bytes([min(size, 15) << 4 | _CODES[kind]]) + (varint(size) if size >= 15 else b"")
            for one in value:
                out += _value(kind, one)
    return bytes(out) + b"\0"


def _value(kind: Kind, value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value if kind == "struct" else varint(len(value)) + value
    return bytes([value]) if kind == "byte" else varint(value << 1 if value >= 0 else (-value << 1) - 1)
