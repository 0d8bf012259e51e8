"""Small jobs of `prepare` in processes of their own, with small reels and pieces, that can be killed at any rename on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.data.raw_files import criteo_line, write
from tests.fresh import Program

# argv: out, inputs, options of prepare, rename to die before: its number (0: none), or a folder that a file first comes into
CODE = """
import itertools, json, os, signal, sys
import hotbed.data.formats.blocks, hotbed.data.prepare.parse, hotbed.data.prepare.write
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import HotbedError

out, inputs, options, deadly = json.loads(sys.argv[1])
hotbed.data.formats.blocks.REEL_BYTES = 20_000
hotbed.data.prepare.parse.PIECE_IDS = 1500
hotbed.data.prepare.write.PART_ROWS, hotbed.data.prepare.write.GROUP_ROWS = 150, 64
replace, numbers = os.replace, itertools.count(1)

def dying(source, target):
    if ".partial" in str(target) and deadly in (next(numbers), os.path.basename(os.path.dirname(target))):
        os.kill(os.getpid(), signal.SIGKILL)  # two threads rename: each has a number of its own
    replace(source, target)

os.replace = dying
try:
    prepare(inputs, out, say=print, **options)
except HotbedError as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("renames", next(numbers) - 1)
"""


def run(out: Path, inputs: list[Path], options: dict, deadly: int | str = 0) -> tuple[int, str, str]:
    done = Program(CODE, json.dumps([str(out), [str(path) for path in inputs], options, deadly])).ended()
    return done.returncode, done.stdout, done.stderr


def digest(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write_logs(directory: Path, rows: tuple[int, ...] = (400, 100, 300)) -> list[Path]:
    """Criteo logs with some bad rows and ids of every frequency; the first has several reels."""
    files, number = [], 0
    for file, count in enumerate(rows):
        lines = []
        for i in range(count):
            number += 1
            ids = {1: f"{number % 7:x}", 2: f"{number:x}", 3: f"{number * number % 97:x}"}
            lines.append("bad" if i % 90 == 50 else criteo_line((number % 3 == 0 and 1) or 0, {1: number, 2: ""}, ids))
        files.append(write(directory / f"day_{file}.tsv", *lines))
    return files
