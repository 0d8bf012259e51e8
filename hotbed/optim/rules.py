"""The update rules of the row optimizers, each written once.

A rule is three plain functions over numbers. `row` runs once per row and may carry one number of state; `element` runs for
every weight and may carry two; `first` gives the initial state. They use only arithmetic and the names in `MATH`, so
the same source runs over torch tensors (the reference, broadcasting [U, 1] against [U, D]), over scalars inside a compiled
loop (Numba) and over blocks (Triton, which takes annotations for its own types: so there are none here).

    row(r, mean_square, lr, h)        -> (r', c0, c1)       r: row state, mean_square: of the row's gradient, h: constants
    element(w, g, a, b, c0, c1, h)    -> (w', a', b')       w: weight, g: gradient, a and b: state
    first(w, f)                       -> (a, b)             f: three constants; the row state starts at f[2]

`row` is computed in float64 and its results are rounded to the record's type, because 1 - 0.999**step loses four digits
in float32; `element` is computed in the record's type.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MATH = ("sqrt", "exp2", "where", "absolute")


def _constant_first(w, f):
    return f[0], f[1]


class Rule(NamedTuple):
    """How one optimizer moves a row."""

    name: str
    element_states: tuple[str, ...]  # columns as wide as the vector
    row_states: tuple[str, ...]  # columns of width one
    row: Callable[..., Any]
    element: Callable[..., Any]
    uses_mean_square: bool = False
    first: Callable[..., Any] = _constant_first
    divides_by_rate: bool = False  # at a learning rate of 0 there is no update: rows stay as they are

    def bind(self, math: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(row, element) with the names of MATH taken from `math`."""
        return _bind(self.row, math), _bind(self.element, math)

    def bind_first(self, math: Mapping[str, Any]) -> Callable[..., Any]:
        """`first` with the names of MATH taken from `math`."""
        return _bind(self.first, math)


def _bind(function: Callable[..., Any], math: Mapping[str, Any]) -> Callable[..., Any]:
    namespace = {"__builtins__": builtins, **math}  # torch imports parts of itself inside operators
    return types.FunctionType(function.__code__, namespace, function.__name__)


# Rule.bind gives these names their meaning; unbound they mean nothing.
sqrt: Any = None
exp2: Any = None
where: Any = None
absolute: Any = None


def _constant_rate_row(r, mean_square, lr, h):
    return r, lr, 0.0


def _descent_element(w, g, a, b, c0, c1, h):
    return w - c0 * g, a, b


def _adagrad_element(w, g, a, b, c0, c1, h):
    a = a + g * g
    return w - c0 * g / (sqrt(a) + h[0]), a, b


def _rowwise_adagrad_row(r, mean_square, lr, h):
    r = r + mean_square
    return r, lr / (sqrt(r) + h[0]), 0.0


def _adam_row(r, mean_square, lr, h):
    step = r + 1.0
    return step, lr / (1.0 - exp2(step * h[5])), 1.0 / sqrt(1.0 - exp2(step * h[6]))


def _adam_element(w, g, a, b, c0, c1, h):
    a = h[1] * a + h[2] * g
    b = h[3] * b + h[4] * (g * g)
    return w - c0 * a / (sqrt(b) * c1 + h[0]), a, b


def _ftrl_row(r, mean_square, lr, h):
    return r, 1.0 / lr, 0.0


def _ftrl_element(w, g, a, b, c0, c1, h):
    n = b + g * g
    a = a + g - (sqrt(n) - sqrt(b)) * c0 * w
    shrunk = where(a > 0.0, a - h[1], a + h[1])
    return where(absolute(a) <= h[1], a - a, -shrunk / ((h[0] + sqrt(n)) * c0 + h[2])), a, n


def _ftrl_first(w, f):
    return w * f[0] - where(w > 0.0, f[1], where(w < 0.0, 0.0 - f[1], f[2])), f[2]


SGD_RULE = Rule("sgd", (), (), _constant_rate_row, _descent_element)
ADAGRAD_RULE = Rule("adagrad", ("sum_of_squares",), (), _constant_rate_row, _adagrad_element)
ROWWISE_ADAGRAD_RULE = Rule(
    "rowwise_adagrad", (), ("sum_of_mean_squares",), _rowwise_adagrad_row, _descent_element, uses_mean_square=True
)
ADAM_RULE = Rule("adam", ("mean", "variance"), ("step",), _adam_row, _adam_element)
FTRL_RULE = Rule("ftrl", ("z", "n"), (), _ftrl_row, _ftrl_element, first=_ftrl_first, divides_by_rate=True)
RULES = (SGD_RULE, ADAGRAD_RULE, ROWWISE_ADAGRAD_RULE, ADAM_RULE, FTRL_RULE)
