"""Text values in, int64 or float64 out, with a code for each value: OK, missing, or the reason why it is wrong.

Floats equal Python's float() bit for bit: numbers of up to 15 digits with a small exponent are exact after one multiplication
or division; all others (rare) go through float() itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hotbed.data.formats.chunk import Text
from hotbed.host.jit import njit

OK, MISSING, NOT_A_NUMBER, TOO_LARGE, _SLOW = 0, 1, 2, 3, 4

_POWERS = 10.0 ** np.arange(23)  # exact in float64
_MAX_INT = np.uint64(2**63 - 1)
_IS_HEX = np.array([chr(byte) in "0123456789abcdefABCDEF" for byte in range(256)])


class ParsedNumbers(NamedTuple):
    """Numbers and a code each; a value whose code is not OK is 0 (integers) or NaN (floats)."""

    values: np.ndarray  # int64 or float64 [n]
    codes: np.ndarray  # uint8 [n]


def parse_integers(text: Text) -> ParsedNumbers:
    """Decimal integers with an optional sign; TOO_LARGE beyond 64 bits."""
    n = len(text.starts)
    values, codes = np.zeros(n, dtype=np.int64), np.empty(n, dtype=np.uint8)
    _parse_integers(text.data, text.starts, text.ends, values, codes)
    return ParsedNumbers(values, codes)


def parse_floats(text: Text) -> ParsedNumbers:
    r"""Decimal numbers; empty, nan, na, n/a, null, none (any case), -, ? and \N are MISSING.

    inf and beyond float64 are TOO_LARGE.
    """
    n = len(text.starts)
    values, codes = np.full(n, np.nan), np.empty(n, dtype=np.uint8)
    _parse_floats(text.data, text.starts, text.ends, values, codes)
    for i in np.flatnonzero(codes == _SLOW):
        values[i] = float(text.string(int(i)))
        codes[i] = OK
    infinite = np.isinf(values)
    values[infinite] = np.nan
    codes[infinite] = TOO_LARGE
    return ParsedNumbers(values, codes)


def hex_codes(text: Text) -> np.ndarray:
    """OK for 1 to 16 hex digits, MISSING for none, TOO_LARGE for more, NOT_A_NUMBER for other text; uint8 [n]."""
    codes = np.empty(len(text.starts), dtype=np.uint8)
    _check_hex(text.data, text.starts, text.ends, codes)
    return codes


@njit(nogil=True, cache=True)
def _parse_integers(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, values: np.ndarray, codes: np.ndarray
) -> None:
    for i in range(len(starts)):
        begin, end = starts[i], ends[i]
        if begin == end:
            codes[i] = MISSING
            continue
        negative = data[begin] == 45
        if negative or data[begin] == 43:
            begin += 1
        codes[i] = OK if begin < end else NOT_A_NUMBER
        total = np.uint64(0)
        for k in range(begin, end):
            digit = np.uint64(data[k]) - np.uint64(48)
            if digit > np.uint64(9):
                codes[i] = NOT_A_NUMBER
                break
            if total > (_MAX_INT - digit) // np.uint64(10):
                codes[i] = TOO_LARGE  # keep reading: a letter later on means that it is not a number
            total = total * np.uint64(10) + digit
        if codes[i] == OK:
            values[i] = -np.int64(total) if negative else np.int64(total)


@njit(nogil=True, cache=True)
def _parse_floats(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, values: np.ndarray, codes: np.ndarray
) -> None:
    for i in range(len(starts)):
        begin, end = starts[i], ends[i]
        while begin < end and data[begin] == 32:
            begin += 1
        while end > begin and data[end - 1] == 32:
            end -= 1
        if begin == end:
            codes[i] = MISSING
        else:
            codes[i], values[i] = _parse_float(data, begin, end)


@njit(nogil=True, cache=True)
def _parse_float(data: np.ndarray, begin: int, end: int) -> tuple[int, float]:
    k = begin
    negative = data[k] == 45
    if negative or data[k] == 43:
        k += 1
    mantissa, digits, exponent, seen = 0, 0, 0, False
    point = False
    while k < end:
        byte = data[k]
        if byte == 46 and not point:
            point = True
        elif 48 <= byte <= 57:
            seen = True
            if mantissa > 0 or byte > 48:
                digits += 1
            if digits <= 15:
                mantissa = mantissa * 10 + (byte - 48)
                exponent -= point
        else:
            break
        k += 1
    if not seen:
        return _word(data, begin, end), np.nan
    if k < end and (data[k] | 32) == 101:  # e or E
        k += 1
        down = k < end and data[k] == 45
        if k < end and (data[k] == 45 or data[k] == 43):
            k += 1
        if k == end:
            return NOT_A_NUMBER, np.nan
        power = 0
        while k < end and 48 <= data[k] <= 57:
            power = min(power * 10 + (data[k] - 48), 100_000)
            k += 1
        exponent += -power if down else power
    if k < end:
        return NOT_A_NUMBER, np.nan
    if digits > 15 or exponent > 22 or exponent < -22:
        return _SLOW, np.nan
    value = float(mantissa)
    value = value * _POWERS[exponent] if exponent >= 0 else value / _POWERS[-exponent]
    return OK, -value if negative else value


@njit(nogil=True, cache=True)
def _word(data: np.ndarray, begin: int, end: int) -> int:
    """The code of text without digits: missing, too large, or not a number."""
    if _equals(data, begin, end, b"nan") or _equals(data, begin, end, b"na"):
        return MISSING
    if _equals(data, begin, end, b"null") or _equals(data, begin, end, b"none") or _equals(data, begin, end, b"n/a"):
        return MISSING
    if end - begin == 1 and (data[begin] == 45 or data[begin] == 63):  # - or ?
        return MISSING
    if end - begin == 2 and data[begin] == 92 and data[begin + 1] == 78:  # \N, as databases write it
        return MISSING
    if data[begin] == 43 or data[begin] == 45:
        begin += 1
    if _equals(data, begin, end, b"inf") or _equals(data, begin, end, b"infinity"):
        return TOO_LARGE
    return NOT_A_NUMBER


@njit(nogil=True, cache=True)
def _equals(data: np.ndarray, begin: int, end: int, word: bytes) -> bool:
    if end - begin != len(word):
        return False
    for k in range(len(word)):  # noqa: SIM110  Numba has no all()
        if (data[begin + k] | 32) != word[k]:
            return False
    return True


@njit(nogil=True, cache=True)
def _check_hex(data: np.ndarray, starts: np.ndarray, ends: np.ndarray, codes: np.ndarray) -> None:
    for i in range(len(starts)):
        length = ends[i] - starts[i]
        codes[i] = MISSING if length == 0 else (TOO_LARGE if length > 16 else OK)
        is_hex = True
        for k in range(starts[i], ends[i]):
            is_hex &= _IS_HEX[data[k]]
        if not is_hex:
            codes[i] = NOT_A_NUMBER
