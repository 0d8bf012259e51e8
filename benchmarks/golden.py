"""Golden losses and rows of eight configurations: `python -m benchmarks.golden --device cpu --out before.json`.

Each configuration trains a few dozen small batches through hotbed's public names, with caches that evict in every window, and
leaves every loss as a hexadecimal float and the sha256 of all rows with their optimizer state, by id. After a change that must
not change a bit, `--compare before.json` trains again and exits with 1 at the first step that differs.

The loss is made of additions and multiplications whose order is fixed, so that no vector width and no library of matrix
products shows in it: what differs, hotbed did. To record an older tree, copy this file into its benchmarks folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import hotbed
from hotbed import Admit, Expire, Jagged, Normal, Table, Uniform, optim

STEPS, BATCH, LAST = 40, 64, 16  # batches, the samples of one, and of the last: powers of two
WORLD = 2
Rows = dict[str, dict[str, np.ndarray[Any, Any]]]  # table -> ids and columns


class Case(NamedTuple):
    """One configuration."""

    optimizer: Any
    tables: Mapping[str, Table]
    kind: str = "ids"  # of the batches: "ids", "bags" or "dynamic"
    options: Mapping[str, Any] = {}  # how the rows are kept; ssd= is a size
    ahead: Mapping[str, int] | None = None  # of prefetch; None: the plain loop
    world: int = 1


PRESET = {
    "user": Table(rows=6000, dim=8, init=Normal(0.3)),
    "item": Table(rows=4000, dim=8, features=("item", "last_item"), init=Uniform(0.25)),
    "ad": Table(rows=3000, dim=16, hashing=True, init=Normal(0.2)),
}
BAGS = {
    "user": Table(rows=6000, dim=8, pooling="mean", init=Normal(0.3)),
    "item": Table(rows=4000, dim=8, features=("item", "last_item"), init=Uniform(0.25), padding_id=3),
    "ad": Table(rows=3000, dim=16, hashing=True, pooling="none", init=Normal(0.2)),
}
DYNAMIC = {
    "user": Table(rows=None, dim=8, admit=Admit(after=2), expire=Expire(unused_steps=9, every=4), init=Normal(0.3)),
    "item": Table(rows=None, dim=8, features=("item", "last_item"), expire=Expire(unused_steps=12, every=5)),
    "ad": Table(rows=None, dim=16, admit=Admit(probability=0.5), init=Normal(0.2)),
}
AHEAD = {"window": 3, "look_ahead": 8}
CASES = {
    "plain": Case(optim.Adagrad(lr=0.05), PRESET),
    "cached": Case(optim.Adam(lr=0.01), PRESET, options={"cache": 0.04}),
    "prefetched": Case(optim.RowwiseAdagrad(lr=0.05), PRESET, options={"cache": 0.06}, ahead=AHEAD),
    "tiered": Case(
        optim.FTRL(lr=0.05, l1=0.001),
        PRESET,
        options={"cache": 0.05, "memory": "400KiB", "ssd": "16MiB"},
        ahead=AHEAD,
    ),
    "dynamic": Case(optim.Adam(lr=0.01), DYNAMIC, "dynamic", {"hbm": "110KiB", "memory": "16MiB"}, AHEAD),
    "two ranks": Case(optim.RowwiseAdagrad(lr=0.05), PRESET, options={"cache": 0.08}, ahead=AHEAD, world=WORLD),
    "bags": Case(optim.SGD(lr=0.05, weight_decay=0.01, clip_norm=1.0), BAGS, "bags", {"cache": 0.15}, AHEAD),
    "bf16": Case(optim.Adam(lr=0.01), PRESET, options={"cache": 0.06, "precision": "bf16"}, ahead=AHEAD),
}


class Draws:
    """Numbers from a seed (splitmix64): the same on every machine and with every version of numpy and torch."""

    def __init__(self, seed: int) -> None:
        self.state = np.uint64(seed)

    def bits(self, count: int) -> np.ndarray[Any, Any]:
        """So many times 64 random bits."""
        with np.errstate(over="ignore"):
            z = self.state + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            self.state = z[-1] if count else self.state
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return z ^ (z >> np.uint64(31))

    def below(self, limit: int, count: int) -> np.ndarray[Any, Any]:
        """Integers from 0 on, all alike."""
        return (self.bits(count) >> np.uint64(33)).astype(np.int64) % limit

    def skewed(self, limit: int, count: int) -> np.ndarray[Any, Any]:
        """Integers from 0 on; a third are frequent ones, as ids of click logs are."""
        often = self.below(limit // 50, count)
        return np.where(self.below(3, count) == 0, often, self.below(limit, count))


def batches_of(kind: str, seed: int) -> list[tuple[dict[str, Any], Tensor]]:
    """(features, labels) of every step."""
    draws = Draws(seed)
    batches = []
    for step in range(STEPS):
        size = LAST if step == STEPS - 1 else BATCH
        rows = {"user": 6000, "item": 4000, "last_item": 4000, "ad": 1 << 40}
        ids = {name: draws.skewed(limit, size) for name, limit in rows.items()}
        if kind == "dynamic":  # some come all the time, others for a while; all over 64 bits
            ids = {name: draws.skewed(200, size) + 20 * step for name in rows}
            ids = {
                name: (one.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
                for name, one in ids.items()
            }
        features: dict[str, Any] = {name: torch.from_numpy(one) for name, one in ids.items()}
        if kind == "bags":
            features = bags_of(draws, size)
        batches.append((features, torch.from_numpy(draws.below(2, size).astype(np.float32))))
    return batches


def bags_of(draws: Draws, size: int) -> dict[str, Any]:
    """Means, weighted sums, plain ids with a padding id, and sequences of four."""

    def jagged(limit: int, weighted: bool) -> Jagged:
        lengths = draws.below(5, size)
        values = torch.from_numpy(draws.skewed(limit, int(lengths.sum())))
        weights = torch.from_numpy(draws.below(16, len(values)).astype(np.float32) / 8) if weighted else None
        return Jagged(values, torch.from_numpy(np.concatenate([[0], lengths.cumsum()])), weights)

    return {
        "user": jagged(6000, weighted=False),
        "item": jagged(4000, weighted=True),
        "last_item": torch.from_numpy(draws.skewed(150, size)),
        "ad": torch.from_numpy(draws.skewed(1 << 40, 4 * size).reshape(size, 4)),
    }


def halved(values: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, a power of two, in an order that is the same everywhere."""
    while values.shape[dim] > 1:
        one, other = values.chunk(2, dim)
        values = one + other
    return values.squeeze(dim)


def loss_of(vectors: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """A small factorization machine with fixed weights and squared error."""
    logit = torch.zeros_like(labels)
    before: dict[int, Tensor] = {}
    for number, name in enumerate(sorted(vectors)):
        vector = vectors[name]
        pooled = halved(vector, 1) if vector.dim() == 3 else vector  # [B, T, D] or [B, D]
        dim = pooled.shape[1]
        weight = torch.tensor([(3 * number + 5 * d) % 7 / 8 - 0.375 for d in range(dim)], device=labels.device)
        logit = logit + halved(pooled * weight, 1)
        if dim in before:
            logit = logit + halved(pooled * before[dim], 1)
        before[dim] = pooled
    error = logit - labels
    return halved(error * error, 0) * (1.0 / labels.shape[0])


def tables_of(case: Case, seed: int, device: str, folder: Path) -> Any:
    """The tables of a configuration; what is on an ssd goes to the folder."""
    options = dict(case.options) | {"seed": seed, "output": "dict", "device": device}
    if "ssd" in options:
        options["ssd"] = f"{folder}:{options['ssd']}"
    make = hotbed.ShardedTables if case.world > 1 else hotbed.EmbeddingTables
    return make(case.tables, case.optimizer, **options)


def losses_of(tables: Any, case: Case, batches: Sequence[tuple[dict[str, Any], Tensor]]) -> list[str]:
    """Train on these batches: their losses."""
    loader = [features for features, _ in batches]
    feed = loader if case.ahead is None else hotbed.prefetch(loader, tables, **case.ahead)
    losses = []
    for features, (_, labels) in zip(feed, batches, strict=True):
        loss = loss_of(tables(features), labels)
        loss.backward()
        losses.append(loss.item().hex())
    return losses


def train(case: Case, seed: int, device: str, folder: Path) -> dict[str, Any]:
    """What one rank has at the end: losses, rows by table, what else training learned, evictions."""
    tables = tables_of(case, seed, device, folder)
    batches = [part_of(batch, case.world, device) for batch in batches_of(case.kind, seed)]
    found = {"losses": losses_of(tables, case, batches), "rows": rows_of(tables), "others": others_of(tables)}
    return found | {"evictions": int(tables.counters().evictions)}


def part_of(batch: tuple[dict[str, Any], Tensor], world: int, device: str) -> tuple[dict[str, Any], Tensor]:
    """This rank's samples, on the device."""
    features, labels = batch
    if world > 1:
        size = labels.shape[0] // world
        mine = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
        features, labels = {name: ids[mine] for name, ids in features.items()}, labels[mine]

    def move(ids: Any) -> Any:
        if isinstance(ids, Jagged):
            return Jagged(*(None if one is None else one.to(device) for one in ids))
        return ids.to(device)

    return {name: move(ids) for name, ids in features.items()}, labels.to(device)


def rows_of(tables: Any) -> Rows:
    """Every row of every table with its optimizer state."""
    found = {}
    for name in tables.tables:
        ids, columns = tables.rows(name)
        found[name] = {"ids": ids.cpu().numpy()}
        for column, values in columns.items():
            found[name][column] = values.detach().cpu().contiguous().view(torch.uint8).numpy()
    return found


def others_of(tables: Any) -> dict[str, Any]:
    """Of dynamic ids: the row that ids share until they are admitted, and the counts of ids."""
    counts = {name: [int(count) for count in each] for name, each in tables.id_counts().items()}
    shared: dict[str, str] = {}
    for name in counts:
        columns = tables.shared_row(name) or {}
        shared |= {f"{name}.{key}": value.cpu().numpy().tobytes().hex() for key, value in sorted(columns.items())}
    return {"id_counts": counts, "shared_rows": shared}


def digest(parts: Sequence[Rows]) -> dict[str, str]:
    """The sha256 of the rows of every table, by id, whichever rank has them."""
    hashes = {}
    for table in parts[0]:
        columns = {name: np.concatenate([part[table][name] for part in parts]) for name in sorted(parts[0][table])}
        order = np.argsort(columns["ids"], kind="stable")
        state = hashlib.sha256()
        for name, values in columns.items():
            state.update(f"{name} {list(values.shape)} ".encode() + np.ascontiguousarray(values[order]).tobytes())
        hashes[table] = state.hexdigest()
    return hashes


def run_rank(rank: int, name: str, seed: int, device: str, folder: str) -> None:
    """In a process of its own: train, and leave what was found in the folder."""
    world = CASES[name].world
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    os.environ.update({key: str(value) for key, value in numbers.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = train(CASES[name], seed, device, Path(folder) / str(rank))
    rows = {f"{table}/{column}": values for table, each in found.pop("rows").items() for column, values in each.items()}
    np.savez(f"{folder}/rows-{rank}.npz", **rows)
    Path(f"{folder}/found-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(name: str, seed: int, device: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank found. On one GPU the ranks share it, over Gloo."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=run_rank, args=(rank, name, seed, device, str(folder)))
        for rank in range(CASES[name].world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    codes = [rank.exitcode for rank in ranks]
    if any(codes):
        raise RuntimeError(f"{name}: the ranks ended with exit codes {codes}; their errors stand above")
    found = []
    for number in range(len(ranks)):
        one = json.loads((folder / f"found-{number}.json").read_text())
        rows: Rows = {}
        for key, values in np.load(folder / f"rows-{number}.npz").items():
            table, _, column = key.partition("/")
            rows.setdefault(table, {})[column] = values
        found.append(one | {"rows": rows})
    return found


def record(name: str, seed: int, device: str) -> dict[str, Any]:
    """What is golden of one configuration."""
    with tempfile.TemporaryDirectory() as folder:
        if CASES[name].world > 1:
            parts = run_ranks(name, seed, device, Path(folder))
        else:
            parts = [train(CASES[name], seed, device, Path(folder) / "ssd")]
    evictions = sum(part["evictions"] for part in parts)
    if name != "plain" and evictions < STEPS:
        raise RuntimeError(f"{name}: {evictions} rows left the cache in {STEPS} steps, which proves little")
    losses = [" ".join(each) for each in zip(*(part["losses"] for part in parts))]
    found = {"seed": seed, "losses": losses, "rows": digest([part["rows"] for part in parts])}
    return found | ({"others": parts[0]["others"]} if CASES[name].kind == "dynamic" else {})


def environment(device: str) -> dict[str, str]:
    """What the bits may depend on."""
    name = torch.cuda.get_device_name(device) if device != "cpu" else platform.machine()
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    vectors = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "device": name, "cpu": (models or [""])[0], "vectors": vectors}


def differences(golden: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """A line for every configuration that is not the same."""
    for name, one in found.items():
        expected = golden.get(name)
        if expected is None:
            yield f"{name}: not recorded"
        elif expected["seed"] != one["seed"]:
            yield f"{name}: recorded with seed {expected['seed']}, trained with {one['seed']}"
        elif expected["losses"] != one["losses"]:
            pairs = enumerate(zip(expected["losses"], one["losses"], strict=True))
            step, (before, now) = next((step, pair) for step, pair in pairs if pair[0] != pair[1])
            yield f"{name}: the loss of step {step} was {before} and is {now}"
        elif expected["rows"] != one["rows"]:
            wrong = sorted(table for table in one["rows"] if expected["rows"].get(table) != one["rows"][table])
            yield f"{name}: all losses agree, the rows of {', '.join(wrong)} after the last step do not"
        elif expected.get("others") != one.get("others"):
            yield f"{name}: losses and rows agree, the counts of dynamic ids do not"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where to train: cpu or cuda")
    parser.add_argument("--out", type=Path, help="the file to write what was found to")
    parser.add_argument("--compare", type=Path, help="a file written before; exits with 1 where a bit differs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="some of the configurations")
    parser.add_argument("--seed", type=int, default=11, help="of batches and rows")
    args = parser.parse_args()
    found = {}
    for name in args.only:
        found[name] = record(name, args.seed, args.device)
        print(f"{name}: {STEPS} steps, last loss {found[name]['losses'][-1]}", flush=True)
    where = environment(args.device)
    if args.out is not None:
        args.out.write_text(json.dumps({"environment": where, "configurations": found}, indent=1) + "\n")
    if args.compare is not None:
        golden = json.loads(args.compare.read_text())
        if golden["environment"] != where:
            print(f"recorded on {golden['environment']}, compared on {where}")
        wrong = list(differences(golden["configurations"], found))
        print("\n".join(wrong) if wrong else f"{len(found)} configurations: losses and rows are the same to the bit")
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
