"""The dataset of a run, found from whatever folder a command is given in.

A run notes the path that it was told, which may be relative, and in data.json where that was. It is looked for where the
command is given, then where it was, then beside the folders that the run lies in: whoever moves runs and data together finds
both.
"""

from __future__ import annotations

from pathlib import Path

from hotbed.data.embedded import is_embedded
from hotbed.errors import RunError
from hotbed.run.folder import read_json


def find_data(named: str, run: Path) -> str:
    """A name or path that opens the dataset `named` by a run; `named` itself where nothing else is found."""
    if is_embedded(named) or Path(named).exists():
        return named
    places = [Path(noted)] if (noted := _noted(run)) else []
    places += [parent / named for parent in run.resolve().parents]
    return next((str(one) for one in places if (one / "schema.json").is_file()), named)


def find_data_or_say(named: str, run: Path) -> str:
    """The same, or a RunError that tells of --data."""
    found = find_data(named, run)
    if not is_embedded(found) and not Path(found).exists():
        raise RunError(
            f"{run} was trained on {named}, which is not there any more. Say where the dataset is now: --data DATASET."
        )
    return found


def _noted(run: Path) -> str:
    """Where the dataset was when the run began."""
    try:
        return str(read_json(run / "data.json").get("path") or "")
    except RunError:
        return ""
