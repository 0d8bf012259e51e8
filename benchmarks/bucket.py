"""From raw text in a bucket to a served model, every path a URI, with the store killed on the way; and how fast that reads.

    python -m benchmarks.bucket [--rows 300000] [--repeats 3] [--csv FILE]

The store is s3rver, a real S3 server that keeps objects on the local disk (`make test` installs it). Bar 1: the dataset and the
model in the bucket have the bytes of local ones, and the same AUC and scores, although the server was killed (SIGKILL) and
started again while `prepare` and while `train` read and wrote. Bar 2: samples/s of `hotbed train` with the dataset in the
bucket, first with an empty read cache (cold), then with a full one (warm), divided by those of a local dataset; each the best
of several runs, taken in turn. Beside it the rate at which this server hands out one large object, which limits the cold case.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.results_file import append_rows
from hotbed.files import RemotePath, path_of
from tests.files.s3 import BUCKET, S3Server

AWAY = 2.0  # seconds for which the server is gone
SPLIT = ["--splits", "train=0.8,valid=0.1,test=0.1"]
SHAPE = ["--batch-size", "2048", "--dim", "16", "--no-forecast", "--quiet"]


def hotbed(*arguments: str | Path) -> float:
    """Run a command in a process of its own; its seconds."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hotbed", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"hotbed {' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return time.perf_counter() - began


@contextmanager
def outage(server: S3Server, after: float) -> Iterator[None]:
    """Kill the server some seconds into what is done inside, and start it again."""

    def kill() -> None:
        time.sleep(after)
        server.kill()
        time.sleep(AWAY)
        server.start()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def local_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def remote_files(folder: RemotePath) -> dict[str, bytes]:
    start = len(folder.key) + 1
    found = {path.key[start:]: path for path, stat in folder.entries(recursive=True) if stat is not None}
    return {name: path.read_bytes() for name, path in found.items() if not name.endswith("/")}


def same(what: str, one: object, other: object) -> None:
    if one != other:
        raise SystemExit(f"MISS: {what} differs between bucket and local disk")
    print(f"same {what}", flush=True)


def bar_1(server: S3Server, home: Path, logs: Path, bucket: RemotePath) -> None:
    """Bytes, AUC and scores."""
    for path in sorted(logs.iterdir()):
        (bucket / "logs" / path.name).put(path)
    seconds = hotbed("prepare", logs, "--out", home / "data", *SPLIT)
    with outage(server, seconds / 2):
        hotbed("prepare", bucket / "logs", "--out", bucket / "data", *SPLIT)
    same("bytes of the dataset", remote_files(bucket / "data"), local_files(home / "data"))
    run = ["--checkpoint-every", "40", *SHAPE]
    seconds = hotbed("train", "--data", home / "data", "--out", home / "run", *run)
    with outage(server, seconds / 2):
        hotbed("train", "--data", bucket / "data", "--out", bucket / "run", *run)
    there, here = remote_files(bucket / "run"), local_files(home / "run")
    weights = [name for name in here if name.startswith("model/") and name.endswith((".safetensors", ".parquet"))]
    same("bytes of the model", {name: there[name] for name in weights}, {name: here[name] for name in weights})
    finals = [json.loads(one["summary.json"])["final"] for one in (there, here)]
    same(f"metrics (test AUC {finals[1]['test']['auc']:.6f})", *finals)
    schema = json.loads(here["model/schema.json"])
    candidate = {one["name"]: 1 for one in schema["dense"]} | {one["name"]: "68fd1e64" for one in schema["features"]}
    same("scores over HTTP", *(served(place, candidate) for place in (bucket / "run", home / "run")))


def served(run: Path, candidate: dict[str, object]) -> object:
    """The answer of `hotbed serve` to one request."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, "-m", "hotbed", "serve", str(run), "--port", "0"], stderr=said)
        try:
            port, deadline = "", time.monotonic() + 180
            while not port and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.2)
                said.seek(0)
                port = next(
                    (one.split(":")[-1].split()[0].strip("/") for one in said.read().split() if "http://127" in one), ""
                )
            body = json.dumps({"rows": [candidate]}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/score", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["scores"]
        finally:
            process.terminate()
            process.wait()


def bar_2(home: Path, bucket: RemotePath, repeats: int) -> list[dict[str, object]]:
    """Samples/s of training, from local disk, cold and warm."""
    cache = Path(os.environ["HOTBED_CACHE"])
    rates: dict[str, list[float]] = {"local": [], "cold": [], "warm": []}
    for _ in range(repeats):
        shutil.rmtree(cache / "remote", ignore_errors=True)
        for name, data in (("local", home / "data"), ("cold", bucket / "data"), ("warm", bucket / "data")):
            hotbed("train", "--data", data, "--out", home / "speed", "--overwrite", *SHAPE)
            rates[name].append(json.loads((home / "speed" / "summary.json").read_text())["samples_per_s"])
    best = {name: max(found) for name, found in rates.items()}
    served_rate = _server_rate(bucket)
    rows: list[dict[str, object]] = []
    for name, rate in best.items():
        print(f"{name:5} {rate:10,.0f} samples/s, {rate / best['local']:6.1%} of local")
        row = {"case": name, "samples_per_s": round(rate), "of_local": round(rate / best["local"], 3)}
        rows.append({**row, "server_MB_per_s": round(served_rate)})
    print(f"the server hands out {served_rate:,.0f} MB/s")
    return rows


def _server_rate(bucket: RemotePath) -> float:
    """MB/s of one object of 64 MB in pieces of 4, past every cache, eight requests at a time."""
    from concurrent.futures import ThreadPoolExecutor

    path, size, piece = bucket / "rate", 64 << 20, 4 << 20
    path.write_bytes(os.urandom(size))
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: path.store.read(path.key, at, at + piece), range(0, size, piece)))
    return size / (time.perf_counter() - began) / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300_000, help="rows of the log")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind, whose median counts")
    parser.add_argument("--csv", help="file to which the results are added")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "s3").mkdir()
        server = S3Server(home / "s3")
        os.environ |= server.environment() | {"HOTBED_CACHE": str(home / "cache")}
        bucket = path_of(f"s3://{BUCKET}/bar")
        assert isinstance(bucket, RemotePath)
        try:
            hotbed("data", "make", "criteo-like", "--rows", str(given.rows), "--days", "3", "--text", home / "logs")
            bar_1(server, home, home / "logs", bucket)
            rows = bar_2(home, bucket, given.repeats)
            if given.csv:
                append_rows(given.csv, [{"rows": given.rows, **row} for row in rows])
        finally:
            server.kill()


if __name__ == "__main__":
    main()
