"""Kill runs with SIGKILL and check that each ends like an undisturbed one: `python -m benchmarks.crash --kills 200 [--seed N]`.

For every way to keep rows (plain, cache over memory, memory over ssd, three tiers; ids of a vocabulary, and dynamic ones that
are admitted and expire) and both kinds of checkpoint one run trains undisturbed. Then runs are killed again and again: at a
moment drawn over the whole life of a process; right before a change to the disk drawn among all of them (a rename, a link, a
removal, a new file); or some milliseconds into a stage drawn among the short ones, such as adopting segments.
`hotbed checkpoint prune` is killed now and then as well. After each kill `hotbed checkpoint verify` must find every checkpoint
complete; then the run continues with --resume, or starts again if there is none yet. Its end must be the same, bit for bit:
metrics.jsonl but for times, the model, and the last checkpoint with all its rows. Exits with 1 at the first run that is not.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.crash.processes import Command
from benchmarks.crash.runs import (
    CASES,
    Case,
    Failure,
    KilledRun,
    ReferenceRun,
    Tally,
    differences_of,
    no_kills,
    undisturbed,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="of runs, over all cases (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when (%(default)s)")
    parser.add_argument("--only", default="", help="cases whose name holds this text, such as 'dynamic ids, three'")
    parser.add_argument("--folder", type=Path, help="where runs are made; a folder for temporary files if not given")
    asked = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="hotbed-crash-", dir=asked.folder)).resolve()
    tally, began = no_kills(), time.perf_counter()
    cases = [case for case in CASES if asked.only in str(case)]
    if not cases:
        parser.error(f"--only {asked.only!r} names none of: {'; '.join(map(str, CASES))}")
    try:
        kill_runs(root, cases, asked.kills, random.Random(asked.seed), tally)
    except Failure as failure:
        print(f"\nFAILED after {tally.num_kills} kills (--seed {asked.seed}): {failure}\nThe run is kept in {root}")
        return 1
    shutil.rmtree(root)
    print_tally(tally)
    seconds, runs = time.perf_counter() - began, tally.lives.total()
    print(f"passed: {tally.num_kills} kills in {runs} runs, all ended bit-identical, {seconds:.0f} s")
    return 0


def kill_runs(root: Path, cases: Sequence[Case], num_kills: int, draw: random.Random, tally: Tally) -> None:
    """Kill runs `num_kills` times, the cases in turn."""
    wholes: list[ReferenceRun] = []
    first: dict[str, int] = {}  # case that trains the same rows
    Command(["--version"], root).ended()  # everything is imported now, and in no one's time
    for number, case in enumerate(cases):
        wholes.append(undisturbed(case, root / f"whole-{number}"))
        shutil.rmtree(root / f"whole-{number}")
        print(
            f"undisturbed, {case}: {wholes[-1].seconds:.1f} s, {wholes[-1].num_changes} changes to the disk", flush=True
        )
        like = first.setdefault(case.ids, number)
        other = [
            name for name in differences_of(wholes[like].end, wholes[-1].end) if name.startswith(("model/", "metrics"))
        ]
        if other:
            raise Failure(f"{case} ends with another {', '.join(other)} than {cases[like]}")
    number = 0
    while tally.num_kills < num_kills:
        case, whole = cases[number % len(cases)], wholes[number % len(cases)]
        folder = root / f"killed-{number}"
        kills = KilledRun(case, folder, whole, draw, tally).live(num_kills - tally.num_kills)
        shutil.rmtree(folder)
        number += 1
        print(f"run {number}, {case}: {kills} kills; {tally.num_kills} of {num_kills}", flush=True)


def print_tally(tally: Tally) -> None:
    """How the kills fell."""
    for title, counts in (("killed", tally.kinds), ("while", tally.stages), ("left behind", tally.leftovers)):
        print(f"{title}:")
        for name, count in counts.most_common():
            print(f"  {count:5}  {name}")


if __name__ == "__main__":
    sys.exit(main())
