"""The published systems, claim by claim: `python -m benchmarks.papers`.

    python -m benchmarks.papers                  # every claim and verdict, from the files of results
    python -m benchmarks.papers --quick          # small versions of all claims that a CPU can check, in minutes
    python -m benchmarks.papers --quick --only kstep_bytes,policies
    python -m benchmarks.papers --write          # docs/papers.md and docs/papers.svg

--quick starts processes for k-step training, and virtual nodes if it is root. It exits with 1 if a check does not hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.papers.claims import CLAIMS
from benchmarks.papers.page import draw, write_page
from benchmarks.papers.quick import Check, checks

DOCS = Path(__file__).parents[2] / "docs"


def run_checks(wanted: Mapping[str, Check]) -> int:
    """Run checks and print what they found; the number that does not hold."""
    failed = 0
    for name, check in wanted.items():
        start = time.perf_counter()
        try:
            found = check()
        except AssertionError as error:
            failed += 1
            found = f"DOES NOT HOLD: {error}"
        print(f"{name}: {found} [{time.perf_counter() - start:.1f} s]", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="run small versions of the claims on this CPU")
    parser.add_argument("--only", default="", help="with --quick: these checks, by name")
    parser.add_argument("--write", action="store_true", help="write docs/papers.md and docs/papers.svg")
    args = parser.parse_args()
    if args.quick:
        known = checks()
        names = args.only.split(",") if args.only else list(known)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise SystemExit(f"no such checks here: {', '.join(unknown)}; there are {', '.join(known)}")
        raise SystemExit(1 if run_checks({name: known[name] for name in names}) else 0)
    if args.write:
        (DOCS / "papers.md").write_text(write_page())
        (DOCS / "papers.svg").write_text(draw())
        return
    for claim in CLAIMS:
        found = claim.evidence()
        print(f"{claim.paper} {claim.key}: {found.verdict}. {found.ours or found.why}")


if __name__ == "__main__":
    main()
