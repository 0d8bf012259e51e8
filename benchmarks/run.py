"""The CPU tables of README.md, one after the other: `make bench`, or `python -m benchmarks.run [--out FILE.csv]`, ten minutes.

Runs benchmarks.embedding_step, and benchmarks.deepfm_training with both row optimizers. docs/benchmarks.md lists all others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

COMMANDS = (
    ["benchmarks.embedding_step"],
    ["benchmarks.deepfm_training", "--optimizer", "adagrad"],
    ["benchmarks.deepfm_training", "--optimizer", "adam"],
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="CSV file to append to")
    args = parser.parse_args()
    failed = 0
    for module, *options in COMMANDS:
        print(f"\n== {module} {' '.join(options)}", flush=True)
        out = ["--out", args.out] if args.out else []
        failed |= subprocess.run([sys.executable, "-m", module, *options, *out], check=False).returncode
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
