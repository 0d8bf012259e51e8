"""Terminal sessions of the commands: `python -m tests.sessions` records them for the pages in docs/commands.

Every example runs in a folder with a small click log, a dataset and two runs; what a command prints goes to docs/sessions.
`tests/test_cli_grammar.py` runs the same examples and validates their JSON.
"""

import contextlib
import io
import os
import random
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

from hotbed.cli import main

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 100  # columns
DEMO_ROWS = 3000  # of the embedded log, whose 2,000,000 would take too long here

# the example of each command that is run; it is one of those in its help
EXAMPLES = {
    "train": "hotbed train --data mydata --batch-size 64 --cache 90%",
    "prepare": "hotbed prepare clicks.csv --label click --out mydata --splits train=0.8,valid=0.1,test=0.1",
    "tune": "hotbed tune --data mydata --trials 2 --epochs 1",
    "evaluate": "hotbed evaluate runs/demo",
    "predict": "hotbed predict runs/mine new.csv --out scores.csv",
    "models": "hotbed models",
    "data describe": "hotbed data describe mydata",
    "data list": "hotbed data list",
    "data get": "hotbed data get movielens-1m --dry-run",
    "data make": "hotbed data make criteo-like:20_000 --out clicks",
    "report": "hotbed report runs/demo runs/mine --out compare.html",
    "plan": "hotbed plan mydata --batch-size 64 --cache 90% --what-if cache=50%,100% --html plan.html",
    "simulate": "hotbed simulate ids.npy --batch-size 64 --cache 30% --curve --html curves.html",
    "explain": "hotbed explain runs/mine --table ad --value a7",
    "verify": "hotbed verify --data mydata --steps 5",
    "bench": "hotbed bench --device cpu --rows-scale 0.001 --batch-size 64 --dim 8 --mlp 0 --cache 30% --steps 10",
    "topo": "hotbed topo",
    "top": "hotbed top runs/demo",
    "checkpoint list": "hotbed checkpoint list runs/mine",
    "checkpoint verify": "hotbed checkpoint verify runs/mine",
    "checkpoint diff": "hotbed checkpoint diff runs/demo runs/mine",
    "checkpoint prune": "hotbed checkpoint prune runs/mine --keep 1 --dry-run",
    "export": "hotbed export runs/mine",
}
# what else is needed when an example runs again
AGAIN = {
    "prepare": "--overwrite",
    "predict": "--overwrite",
    "data make": "--overwrite --dry-run",
    "export": "--overwrite",
}
SESSIONS = {name: ROOT / "docs" / "sessions" / f"{name.replace(' ', '-')}.txt" for name in EXAMPLES}


def make_place(folder: Path) -> None:
    """Write clicks.csv, new.csv, ids.npy, and make mydata, runs/mine and runs/demo, in the current folder."""
    chance = random.Random(7)
    lines = ["click,ad,user,price"]
    for _ in range(1500):
        ad = min(int(chance.expovariate(0.2)), 30)
        click = int(chance.random() < 0.1 + 0.02 * (ad % 9))
        lines.append(f"{click},a{ad},u{chance.randrange(200)},{chance.random():.2f}")
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    (folder / "new.csv").write_text("\n".join(lines[:40]) + "\n")
    ids = np.minimum(np.random.default_rng(1).zipf(1.3, (900, 2)), 400) - 1
    np.save(folder / "ids.npy", ids.astype(np.int64))
    for line in (
        "prepare clicks.csv --label click --out mydata --splits train=0.8,valid=0.1,test=0.1 -q",
        "train --data mydata --batch-size 64 --cache 90% --checkpoint-every 5 --set train.keep_checkpoints=2 "
        "--set train.checkpoint_full_every=1 --out runs/mine -q",
        "train --out runs/demo -q",
    ):
        call(line)


def call(line: str) -> str:
    """What a command prints to stdout; an error if it fails."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            main(shlex.split(line))
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"hotbed {line} ended with {end.code}: {printed.getvalue()}") from end
    return printed.getvalue()


def record() -> None:
    """Run every example and keep what it prints."""
    os.environ["COLUMNS"] = str(WIDTH)
    with tempfile.TemporaryDirectory() as place, mock.patch("hotbed.data.embedded.TRAIN_ROWS", DEMO_ROWS):
        os.environ["HOTBED_CACHE"] = f"{place}/cache"
        os.chdir(place)
        make_place(Path(place))
        for name, line in EXAMPLES.items():
            more = " --overwrite" if name == "prepare" else ""
            text = "\n".join(one.rstrip() for one in call(line.removeprefix("hotbed ") + more).splitlines())
            SESSIONS[name].parent.mkdir(exist_ok=True)
            text = text.replace(str(Path(sys.executable).parent / "hotbed"), "hotbed")
            SESSIONS[name].write_text(f"$ {line}\n{text}\n")
            sys.stdout.write(f"{SESSIONS[name]}\n")


if __name__ == "__main__":
    record()
