"""What one request may be, and how many there may be at once; and the answer to one that is more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Of a server."""

    body_bytes: int = 4 << 20
    candidates: int = 4096  # of one request
    in_flight: int = 256  # requests that are being read, wait or are scored
    seconds: float = 5.0  # from the first byte of a request to its answer


class RequestError(Exception):
    """A request that gets no scores: what is wrong, where, the limit, and the status of the answer."""

    def __init__(self, status: int, what: str, *, where: str | None = None, limit: Any = None) -> None:
        super().__init__(what)
        self.status, self.what, self.where, self.limit = status, what, where, limit

    @property
    def document(self) -> dict[str, Any]:
        """The body of the answer."""
        found: dict[str, Any] = {"error": self.what}
        if self.where is not None:
            found["where"] = self.where
        if self.limit is not None:
            found["limit"] = self.limit
        return found
