"""Number parsing against Python's own int() and float()."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotbed.data.formats.parse_numbers import (
    MISSING,
    NOT_A_NUMBER,
    OK,
    TOO_LARGE,
    hex_codes,
    parse_floats,
    parse_integers,
)
from tests.data.raw_files import text_of

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False).map(repr), st.from_regex(NUMBER, fullmatch=True)))
@example("9007199254740993")
@example("0.1")
@example("123456789012345678901234567890")
@example("1e-400")
@example("4.9e-324")
@example("000000000000000000000000.5")
@example("1e00000000000000000005")
def test_floats_equal_python(text):
    if not text.isascii():
        return
    values, codes = parse_floats(text_of([text]))
    expected = float(text)
    if math.isinf(expected):
        assert codes[0] == TOO_LARGE
    else:
        assert codes[0] == OK
        assert np.float64(expected).tobytes() == values[0].tobytes()


@given(st.text(alphabet="0123456789+-.eEinfaINF_x \t", max_size=8))
def test_floats_take_what_the_grammar_takes(text):
    code = parse_floats(text_of([text])).codes[0]
    plain = text.strip(" ")
    assert (code == OK) == bool(NUMBER.fullmatch(plain) and math.isfinite(float(plain)))


@pytest.mark.parametrize("text", ["", "  ", "nan", "NaN", "NA", "N/A", "null", "None", "-", "?", r"\N"])
def test_words_for_missing(text):
    values, codes = parse_floats(text_of([text]))
    assert codes[0] == MISSING
    assert math.isnan(values[0])


@pytest.mark.parametrize("text", ["inf", "-inf", "+Infinity", "1e309", "-1e9999"])
def test_infinite_is_too_large(text):
    assert parse_floats(text_of([text])).codes[0] == TOO_LARGE


@given(st.integers(-(10**21), 10**21))
@example(2**63 - 1)
@example(2**63)
@example(-(2**63) + 1)
@example(2**64)
@example(2**64 + 5)
@example(10**20)
def test_integers_equal_python(number):
    values, codes = parse_integers(text_of([str(number)]))
    if abs(number) < 2**63:
        assert (codes[0], values[0]) == (OK, number)
    else:
        assert codes[0] == TOO_LARGE


@pytest.mark.parametrize("text", ["-", "+", "1.0", "1e3", " 1", "1 ", "0x1f", "1_000", "٣", "99999999999999999999x"])
def test_not_an_integer(text):
    assert parse_integers(text_of([text])).codes[0] == NOT_A_NUMBER


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", MISSING),
        ("0", OK),
        ("ffffFFFFffffFFFF", OK),
        ("1" * 17, TOO_LARGE),
        ("68fd1e6g", NOT_A_NUMBER),
        ("-1", NOT_A_NUMBER),
    ],
)
def test_hex(text, code):
    assert hex_codes(text_of(["0", text]))[1] == code
