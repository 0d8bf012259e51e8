"""An ssd's folder and budget in; how fast records are read from it, and whether all rows would fit, out."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from hotbed.budget import Room, parse_ssd
from hotbed.build import Sketch
from hotbed.memory import in_words

_BYTES = 32 << 20
_RECORD_EXTRA = 16  # bytes that a record takes on the ssd beside its content
_SPARE = 1 + 1 / 256  # one segment is kept for rewriting


def ssd_problems(found: Sketch, room: Room | None, ssd: str) -> list[str]:
    """Nothing, or that the rows do not fit."""
    if room is None or not ssd or room.place.folder is None:
        return []
    _, budget = parse_ssd(ssd)
    rows = min(found.amounts.rows, found.most_used)
    needed = rows * (found.amounts.record + _RECORD_EXTRA) * _SPARE
    if needed <= budget:
        return []
    return [
        f"the rows do not fit on the ssd: {rows:,} rows of {found.amounts.record} bytes take {in_words(needed)} once all are "
        f"used, and tables.ssd gives {in_words(budget)}. Give {in_words(needed * 1.05)} or more, a smaller model.dim, or "
        "tables.precision=bf16"
    ]


def ssd_speed(ssd: str, record: int) -> float:
    """Bytes/s of records read at random places of a file in the folder, a tenth of a second of it; what a warm file gives."""
    folder, _ = parse_ssd(ssd)
    place = folder
    while not place.is_dir() and place != place.parent:
        place = place.parent
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=place, prefix="hotbed-plan-") as file:
        file.write(os.urandom(1 << 20) * (_BYTES >> 20))
        file.flush()
        os.fsync(file.fileno())
        places = np.random.default_rng(0).integers(0, _BYTES - record, 4096).tolist()
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < 0.1:
            for at in places[:256]:
                os.pread(file.fileno(), record, at)
            done += 256
            places = places[256:] + places[:256]
        return done * record / (time.perf_counter() - began)
    return 0.0


def folder_of(ssd: str) -> Path:
    """The folder of 'FOLDER:BYTES'."""
    return parse_ssd(ssd)[0]
