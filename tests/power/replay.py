"""Recorded operations in, a verdict out: what the project's own code finds in every state a power loss may leave."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.power.disk import Mark, State, states
from tests.power.record import Recorder


class Tally(NamedTuple):
    """One operation, for the table at the end of the tests."""

    name: str
    operations: int
    states: int
    seconds: float


TALLIES: list[Tally] = []


def replay(
    name: str,
    recorder: Recorder,
    room: Path,
    found: Callable[[Path], str],
    allowed: Callable[[tuple[str, ...]], set[str]],
) -> None:
    """Every state: `found` opens it and names what is there, which must be `allowed` after what was promised before it."""
    began, count = time.perf_counter(), 0
    names: dict[bytes, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        for one in ("fsync", "fdatasync"):
            patch.setattr(os, one, lambda _: None)
        for state in states(recorder.start, recorder.operations):
            count += 1
            if state.digest not in names:
                names[state.digest] = _open(state, room, found)
            wanted = allowed(state.said)
            if names[state.digest] not in wanted:
                raise AssertionError(
                    f"{name}: power lost after {state.after} operations ({_last(recorder, state)}), promised {state.said}: "
                    f"found {names[state.digest]!r}, not one of {sorted(wanted)}. The disk holds {_listed(state)}"
                )
    operations = sum(not isinstance(one, Mark) for one in recorder.operations)
    TALLIES.append(Tally(name, operations, count, time.perf_counter() - began))


def _open(state: State, room: Path, found: Callable[[Path], str]) -> str:
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    state.lay_out(room)
    try:
        return found(room)
    except Exception as error:  # what no state may do; told with the state
        return f"{type(error).__name__}: {error}"


def _last(recorder: Recorder, state: State) -> str:
    return type(recorder.operations[state.after - 1]).__name__ if state.after else "none"


def _listed(state: State) -> str:
    return ", ".join(path if data is None else f"{path} ({len(data)})" for path, data in state.files.items())
