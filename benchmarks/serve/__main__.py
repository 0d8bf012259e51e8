"""Serve a model of a given size under load, with updates and malformed requests meanwhile, and report how they were answered.

    python -m benchmarks.serve                       500 requests/s for 60 s, 20 updates, 1,000 malformed requests
    python -m benchmarks.serve --seconds 20          a short one
    python -m benchmarks.serve --workers 2           two processes
    python -m benchmarks.serve --spread              ids of all candidates uniform over all rows: few are in the cache

The model is made once under --work (about 4 GB of checkpoints). Server and load generator are two processes and share the cores
of this machine. Checkpoints appear one by one while requests come; scores of some answers are compared with those of the
checkpoint they name.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import hotbed
from benchmarks.results_file import append_rows
from benchmarks.serve.model import make_bodies, make_run, malformed
from hotbed.checkpoint.chain import folders_in

RESULTS = "benchmarks/results/serve.csv"


def main() -> None:
    given = _arguments()
    run = make_run(given.work, given.gigabytes, given.updates)
    bodies = make_bodies(given.bodies, given.candidates, given.context, spread=given.spread)
    file = given.work / "bodies.pickle"
    file.write_bytes(pickle.dumps((bodies, malformed(bodies[0], given.candidates))))
    serving, waiting = _lay_out(given.work, run, given.updates)
    server, port, log = _start(serving, given)
    try:
        _warm(port, bodies)
        before = _metrics(port)
        feeder = threading.Thread(target=_feed, args=(port, serving, waiting, given), daemon=True)
        feeder.start()
        pids = _processes(server.pid)
        cpu = sum(map(_cpu, pids))
        found = _drive(port, file, given)
        feeder.join()
        found["server_cores"] = round((sum(map(_cpu, pids)) - cpu) / found["seconds"], 3)
        found["load_average"] = round(os.getloadavg()[0], 2)
        _settle(port, given.updates * given.workers)
        found |= _of_server(before, _metrics(port), server.pid)
    finally:
        server.terminate()
        code = server.wait(60)
    found["exit_code"] = code
    found["compared_scores"] = _compare(run, bodies, found.pop("kept"), given)
    _say(found, given, log)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, default=Path("data-cache/serve"), help="where the model is made and kept (%(default)s)"
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the rows")
    parser.add_argument("--memory", default="100MB", help="of hotbed serve (%(default)s)")
    parser.add_argument("--rate", type=float, default=500, help="valid requests a second")
    parser.add_argument("--seconds", type=float, default=60, help="of load (%(default)s)")
    parser.add_argument("--candidates", type=int, default=100, help="of every request (%(default)s)")
    parser.add_argument(
        "--context", type=int, help="of the 26 id features, those that hold for all candidates (13; 0 with --spread)"
    )
    parser.add_argument("--map", action="store_true", help="serve with --map")
    parser.add_argument("--spread", action="store_true", help="ids uniform over all rows instead of Zipf")
    parser.add_argument("--bodies", type=int, default=3000, help="distinct requests")
    parser.add_argument("--updates", type=int, default=20, help="newer checkpoints on the way (%(default)s)")
    parser.add_argument("--malformed", type=int, default=1000, help="requests on the way (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="of hotbed serve (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of hotbed serve, in each worker (%(default)s)")
    parser.add_argument("--out", help=f"append a row to a CSV file, such as {RESULTS}")
    given = parser.parse_args()
    if given.context is None:
        given.context = 0 if given.spread else 13
    return given


def _lay_out(work: Path, run: Path, updates: int) -> tuple[Path, list[Path]]:
    """A run folder with the first checkpoint only, and the others next to it, one rename away. All are hard links."""
    serving, waiting = work / "serving", work / "waiting"
    for folder in (serving, waiting):
        shutil.rmtree(folder, ignore_errors=True)
    (serving / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "config.json", serving)
    first, *rest = folders_in(run / "checkpoints")
    shutil.copytree(first, serving / "checkpoints" / first.name, copy_function=os.link)
    for one in rest[:updates]:
        shutil.copytree(one, waiting / one.name, copy_function=os.link)
    return serving, [waiting / one.name for one in rest[:updates]]


def _start(serving: Path, given: argparse.Namespace) -> tuple[subprocess.Popen[bytes], int, Path]:
    log = given.work / "server.log"
    command = [sys.executable, "-m", "hotbed", "serve", str(serving), "--port", "0", "--memory", given.memory]
    command += ["--workers", str(given.workers), "--threads", str(given.threads), "--poll", "0.5"]
    command += ["--map"] if given.map else []
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out)
    for _ in range(1200):
        match = re.search(r"listening on http://127.0.0.1:(\d+)", log.read_text())
        if match:
            return server, int(match[1]), log
        if server.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text()[-2000:]}")
        time.sleep(0.1)
    raise SystemExit("the server did not come up in 120 s")


def _warm(port: int, bodies: list[bytes]) -> None:
    """Compile, and fill the cache with what comes often."""
    for body in bodies[:300]:
        _post(port, "/score", body)


def _feed(port: int, serving: Path, waiting: list[Path], given: argparse.Namespace) -> None:
    """One checkpoint after the other, but none before the server has taken over the one before.

    Evenly over the first 70 % of the run: whole checkpoints take longest, and the last one must answer requests, too.
    """
    start = time.monotonic()
    for number, one in enumerate(waiting, 1):
        time.sleep(max(0.0, start + number * 0.7 * given.seconds / len(waiting) - time.monotonic()))
        os.rename(one, serving / "checkpoints" / one.name)
        _settle(port, number * given.workers)


def _drive(port: int, file: Path, given: argparse.Namespace) -> dict[str, Any]:
    to = given.work / "found.json"
    command = [sys.executable, "-m", "benchmarks.serve.load", str(port), str(file), str(to)]
    command += ["--rate", str(given.rate), "--seconds", str(given.seconds), "--malformed", str(given.malformed)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(to.read_text())
    return found


def _settle(port: int, updates: int) -> None:
    """Until the last checkpoint scores."""
    for _ in range(120):
        metrics = _metrics(port)
        if sum(value for name, value in metrics.items() if name.startswith("hotbed_serve_updates_total")) >= updates:
            return
        time.sleep(0.5)


def _of_server(before: dict[str, float], after: dict[str, float], pid: int) -> dict[str, Any]:
    def since(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    places = {
        place: since(f'hotbed_serve_row_lookups_total{{place="{place}"}}')
        for place in ("cache", "files", "first_values")
    }
    ways = {
        name.partition('"')[2][:-2]: int(n)
        for name, n in after.items()
        if name.startswith("hotbed_serve_updates_total")
    }
    return {
        "updates": ways,
        "failed_updates": int(after["hotbed_serve_failed_updates_total"]),
        "cache_hits": round(places["cache"] / max(1.0, sum(places.values())), 4),
        "requests_a_batch": round(
            since("hotbed_serve_batched_requests_total") / since("hotbed_serve_batches_total"), 2
        ),
        "rows_mb": round(after["hotbed_serve_rows_bytes"] / 1e6, 1),
        "resident_mb": round(after["hotbed_serve_resident_bytes"] / 1e6, 1),
        "peak_resident_mb": round(max(map(_peak, _processes(pid))) / 1e6, 1),
        "private_mb": round(max(map(_private, _processes(pid)[1:] or [pid])) / 1e6, 1),
    }


def _compare(run: Path, bodies: list[bytes], kept: list[tuple[int, str]], given: argparse.Namespace) -> dict[str, Any]:
    """Answers that name the last checkpoint, against its scores; the largest difference of a probability."""
    last = folders_in(run / "checkpoints")[given.updates]
    wanted = f"step-{int(last.name.partition('.')[0])}-"
    every = int(given.rate * given.seconds) // given.malformed if given.malformed else 0
    worst, count = 0.0, 0
    with hotbed.load(last, memory="100MB", scratch=given.work) as scorer:
        for number, text in kept:
            answer = orjson.loads(text)
            if answer["model"].startswith(wanted):
                valid = number - (number // (every + 1) if every else 0)
                tree = orjson.loads(bodies[valid % len(bodies)])
                size = len(next(iter(tree["candidates"].values())))
                columns = tree["candidates"] | {name: [one] * size for name, one in tree["context"].items()}
                worst = max(worst, float(np.abs(scorer.score(columns) - np.array(answer["scores"])).max()))
                count += size
    return {"scores": count, "largest_difference": worst}


def _say(found: dict[str, Any], given: argparse.Namespace, log: Path) -> None:
    for name, value in found.items():
        print(f"{name:>22}  {value}")
    failed = sum(n for name, n in found["status"].items() if name.startswith("valid failed"))
    others = sum(
        n for name, n in found["status"].items() if name.startswith("malformed") and not re.search(r": 4\d\d$", name)
    )
    compared = found["compared_scores"]
    answered = len(found["models"]) == given.updates + 1  # every version, while requests came
    right = compared["scores"] > 0 and compared["largest_difference"] <= 1e-6
    good = failed == 0 and others == 0 and found["p99_ms"] < 50 and answered and right
    print(
        f"{'bar':>22}  {'held' if good else 'missed'}: {failed} valid requests failed, p99 {found['p99_ms']} ms, "
        f"{len(found['models']) - 1} of {given.updates} updates answered requests (server log: {log})"
    )
    if given.out:
        names = (
            "rate",
            "seconds",
            "candidates",
            "context",
            "spread",
            "map",
            "gigabytes",
            "memory",
            "updates",
            "malformed",
            "workers",
            "threads",
        )
        row = {name: getattr(given, name) for name in names} | {"valid_failed": failed}
        row |= {name: found[name] for name in found if isinstance(found[name], int | float) and name not in row}
        append_rows(given.out, [row])


def _post(port: int, path: str, body: bytes) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def _metrics(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _processes(pid: int) -> list[int]:
    """The server, then its workers if it has several."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def _private(pid: int) -> int:
    """Memory that no other process shares."""
    found = re.findall(r"Private_(?:Clean|Dirty):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return sum(map(int, found)) * 1024


def _peak(pid: int) -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 if match else 0


if __name__ == "__main__":
    main()
