"""Random interrupts: real signals at random moments of a training loop. `python -m tests.faults.storm --count 2000`.

Half of them are SIGINT, as Ctrl-C sends it; the others come from a handler that raises at once, as a notebook's or a timeout's
may. After each, rows are those of whole updates and training resumes with the right bits, or every call refuses.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import pytest
import torch

from tests.faults.test_walk import KINDS, WAYS, batches_of, tables_of, unrounded
from tests.faults.walk import after, close, states_after

_KINDS = [kind for kind in KINDS if kind != "ranked"]


def interrupt(work: Any, delay: float, politely: bool) -> None:
    """Run the work, and interrupt it after `delay` seconds."""

    def handler(*_: Any) -> None:
        if politely:
            signal.raise_signal(signal.SIGINT)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    torch.set_grad_enabled(True)  # an interrupt at the end of the loop's own torch.no_grad() leaves gradients off


def storm(count: int, seed: int = 0, report: Any = None) -> Counter[str]:
    """How the tables were after each interrupt."""
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    batches = batches_of("abc")
    seconds: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        unrounded(patch)
        states = {
            dynamic: states_after(lambda kind=kind: tables_of(kind, folder, slots=500), batches)
            for dynamic, kind in ((False, "plain"), (True, "dynamic memory"))
        }
        for n in range(count):
            kind, way = draw.choice(_KINDS), draw.choice(list(WAYS))
            tables = tables_of(kind, folder)
            if (kind, way) not in seconds:
                WAYS[way](tables, batches)  # kernels are compiled
                close(tables)
                tables = tables_of(kind, folder)
                began = time.perf_counter()
                WAYS[way](tables, batches)
                seconds[kind, way] = time.perf_counter() - began
                close(tables)
                tables = tables_of(kind, folder)
            delay = max(1e-6, draw.random() * seconds[kind, way])
            interrupt(lambda tables=tables, way=way: WAYS[way](tables, batches), delay, draw.random() < 0.5)
            found = after(tables, batches, states[kind.startswith("dynamic")])
            outcomes[found if found in ("right", "refused") else f"{kind}, {way}: {found}"] += 1
            close(tables)
            if report is not None and n % 50 == 49:
                report(n + 1, outcomes)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    outcomes = storm(given.count, given.seed, lambda n, found: sys.stderr.write(f"\r{n} {dict(found)}"))
    sys.stdout.write(f"\n{given.count} interrupts: {dict(outcomes)}\n")
    return int(set(outcomes) - {"right", "refused"} != set())


if __name__ == "__main__":
    sys.exit(main())
