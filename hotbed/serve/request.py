"""The body of a request in, its checked columns out; infer.py reads another form of it.

Whatever is wrong is a RequestError: what, where, and the limit.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import orjson
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hotbed.scorer.columns import ColumnEncoder

_PARTS = ("context", "candidates", "rows")
_MOST_NAMED = 40  # features in one message


class Answer(NamedTuple):
    """The answer to one request."""

    status: int
    body: bytes


@dataclass(frozen=True)
class Limits:
    """What one request may be, and how many there may be at once."""

    body_bytes: int = 4 << 20
    candidates: int = 4096  # of one request
    in_flight: int = 256  # requests being read, pending or being scored
    seconds: float = 5.0  # from the first byte of a request to its answer

    @property
    def bag_ids(self) -> int:
        """Ids in the bags of all candidates: as many as a body has room for. One of the context is there for each of them."""
        return self.body_bytes // 2


class RequestError(Exception):
    """A request that is refused: what is wrong, where, the limit, and the HTTP status."""

    def __init__(self, status: int, what: str, *, where: str | None = None, limit: Any = None) -> None:
        super().__init__(what)
        self.status, self.what, self.where, self.limit = status, what, where, limit

    @property
    def answer(self) -> Answer:
        """The answer that the client gets."""
        found: dict[str, Any] = {"error": self.what}
        if self.where is not None:
            found["where"] = self.where
        if self.limit is not None:
            found["limit"] = self.limit
        return Answer(self.status, orjson.dumps(found))


class ScoreRequest(NamedTuple):
    """Values by column: one for all candidates, or one for each."""

    size: int
    context: dict[str, Any]
    candidates: dict[str, list[Any]]
    part: str = "candidates"  # of the request that holds them: candidates, rows or inputs

    def where(self, name: str, number: int | None = None) -> str:
        """The path of a feature, or of one of its values, in the request."""
        if name not in self.candidates:
            return _place(self.context_part, name)
        return _place(self.part, name, number)

    @property
    def context_part(self) -> str:
        """The part of the request that holds the values for all candidates."""
        return "inputs" if self.part == "inputs" else "context"


class RequestForm(Protocol):
    """How a request and its answer are written."""

    def read(self, body: bytes, encoder: ColumnEncoder, limits: Limits) -> ScoreRequest:
        """Parse and check, for the model of the encoder."""

    def write(self, scores: Mapping[str, NDArray[np.float64]], version: str) -> bytes:
        """The body of the answer, from the scores of every label that the model learned, the first one first."""


class ScoreForm:
    """POST /score."""

    def read(self, body: bytes, encoder: ColumnEncoder, limits: Limits) -> ScoreRequest:
        return read_request(body, encoder.names, limits)

    def write(self, scores: Mapping[str, NDArray[np.float64]], version: str) -> bytes:
        first, *further = scores.items()
        answer: dict[str, Any] = {"scores": first[1]}
        if further:
            answer["tasks"] = dict(further)
        return orjson.dumps(answer | {"model": version}, option=orjson.OPT_SERIALIZE_NUMPY)


def read_object(body: bytes, parts: Sequence[str], wanted: str) -> dict[str, Any]:
    """The object of a body, which has none but these parts."""
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(400, "the body is not JSON: it is nested too deeply") from None
    if not isinstance(tree, dict):
        raise RequestError(422, f"the body must be an object with {wanted}, not {kind_of(tree)}")
    unknown = [name for name in tree if name not in parts]
    if unknown:
        raise RequestError(422, f"there is no part {unknown[0]!r}; there are {', '.join(parts)}", where=unknown[0])
    return tree


def read_request(body: bytes, names: Sequence[str], limits: Limits) -> ScoreRequest:
    """Parse and check; `names` are the columns that the model reads."""
    tree = read_object(body, _PARTS, "candidates (or rows)")
    context = {} if tree.get("context") is None else tree["context"]
    if not isinstance(context, dict):
        raise RequestError(422, f"context must be an object of features, not {kind_of(context)}", where="context")
    if ("rows" in tree) == ("candidates" in tree):
        raise RequestError(422, "give either candidates (values by feature) or rows (one object for each candidate)")
    rows = tree.get("rows")
    candidates = _of_rows(rows) if rows is not None or "rows" in tree else tree["candidates"]
    if not isinstance(candidates, dict):
        raise RequestError(422, f"candidates must be an object of lists, not {kind_of(candidates)}", where="candidates")
    part = "rows" if "rows" in tree else "candidates"
    request = ScoreRequest(size_of(candidates, part, limits), context, candidates, part)
    check_names(request, names)
    return request


def _of_rows(rows: Any) -> dict[str, list[Any]]:
    """Rows as columns."""
    if not isinstance(rows, list):
        raise RequestError(422, f"rows must be a list of objects, not {kind_of(rows)}", where="rows")
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RequestError(422, f"a row must be an object of features, not {kind_of(row)}", where=f"rows[{number}]")
        if row.keys() != rows[0].keys():
            other = min(row.keys() ^ rows[0].keys())
            raise RequestError(
                422,
                f"all rows must have the same features; this one and the first differ in {other!r}",
                where=f"rows[{number}]",
            )
    if not rows:
        raise RequestError(422, "there are no rows to score", where="rows")
    for name in rows[0]:
        columns[name] = [row[name] for row in rows]
    return columns


def _place(part: str, name: str, number: int | None = None) -> str:
    """The path in the request: candidates.age[3], rows[3].age."""
    at = "" if number is None else f"[{number}]"
    return f"rows{at}.{name}" if part == "rows" else f"{part}.{name}{at}"


def size_of(candidates: Mapping[str, Any], part: str, limits: Limits) -> int:
    """The number of candidates."""
    if not candidates:
        raise RequestError(422, f"there are no candidates in {part}: give at least one feature", where=part)
    sizes = {}
    for name, values in candidates.items():
        if not isinstance(values, list):
            raise RequestError(
                422,
                f"a feature of candidates must be a list of values, not {kind_of(values)}",
                where=f"candidates.{name}",
            )
        sizes[name] = len(values)
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise RequestError(
                422, f"{name!r} has {size} values and {first!r} has {sizes[first]}", where=_place(part, name)
            )
    if not sizes[first]:
        raise RequestError(422, "there are no candidates to score", where=_place(part, first))
    if sizes[first] > limits.candidates:
        where, what = ("rows", "rows") if part == "rows" else (_place(part, first), "candidates")
        raise RequestError(413, f"{sizes[first]} {what} are too many", where=where, limit=limits.candidates)
    return sizes[first]


def check_names(request: ScoreRequest, names: Sequence[str]) -> None:
    """A RequestError for a feature that the model does not have, or for all that are missing."""
    known, (_, context, candidates, part) = set(names), request
    for given in (context, candidates):
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names[:_MOST_NAMED])}"
                where = _place(request.context_part if given is context else part, name[:60])
                raise RequestError(422, f"the model has no feature {name[:60]!r}; {hint}", where=where)
    twice = next((name for name in names if name in context and name in candidates), None)
    if twice is not None:
        raise RequestError(422, f"{twice!r} is in context and in {part}; give one", where=f"context.{twice}")
    absent = [repr(name) for name in names if name not in context and name not in candidates]
    if absent:
        are = "is" if len(absent) == 1 else "are"
        more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
        raise RequestError(
            422,
            f"{', '.join(absent[:_MOST_NAMED])}{more} {are} missing; give null where a value is not known",
            where=part,
        )


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
