"""`hotbed verify`: proves on the user's settings and data that a cache changes no bit."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from hotbed.cli import options as opt
from hotbed.cli.console import err, out, print_json
from hotbed.cli.ranks import join_ranks
from hotbed.cli.settings import open_dataset, read_config, settings_of_flags
from hotbed.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from hotbed.data.dataset import Dataset
    from hotbed.parallel.world import World
    from hotbed.run.config import RunConfig
    from hotbed.tables.module import EmbeddingTables
    from hotbed.train.build import BuiltTraining
    from hotbed.types import Batch
    from hotbed.verify import Step, TwinStorage, Verdict


def verify_command(
    run_file: opt.RunFile = None,
    data: opt.Data = None,
    model: opt.ModelName = None,
    device: opt.Device = None,
    batch_size: opt.BatchSize = None,
    cache: opt.CacheShare = None,
    hbm: opt.CacheBytes = None,
    policy: opt.CachePolicy = None,
    seed: opt.Seed = None,
    sets: opt.Sets = [],  # noqa: B006  never changed
    steps: opt.Steps = None,
    ranks: opt.Ranks = None,
    inject: Annotated[
        str | None, typer.Option(help="Flip one bit on purpose, to see it detected: row, state, write-back or lookup.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Prove that the cache is invisible: train plainly and cached side by side, and compare every bit.

    Two copies of the model train on the same batches of your data: one with all rows in
    one tensor, the other with a cache on demand, then with prefetching, then over memory
    and ssd. After every step the loss, the vectors, their gradients and the rows of the
    batch with their optimizer states are compared, and at the end all rows that were used.
    The first difference is reported: step, table, id, both values. Exit code 1 if there is one.
    Without arguments: 50 steps of the run of `hotbed train`, the default model on the embedded click log, with the smallest
    cache that holds a batch. An epoch is the most: smaller batches (--batch-size) make more steps of it.

    [bold]For example:[/bold]

    hotbed verify

    hotbed verify run.yaml --steps 200 --cache 0.02

    hotbed verify --inject write-back

    hotbed verify --data mydata --steps 5

    hotbed verify --data adult --ranks 2
    """
    if ranks is not None and ranks > 1:
        raise typer.Exit(_with_ranks(ranks))
    given = settings_of_flags(
        data=data, model=model, device=device, batch_size=batch_size, seed=seed, policy=policy, cache=cache, hbm=hbm
    )
    config = read_config(run_file, given, sets)
    if config.tables.store_precision != "same":
        raise ConfigError(
            f"tables.store_precision={config.tables.store_precision} rounds every row that leaves the cache, so results "
            "depend on the cache. Verify without it: --set tables.store_precision=same"
        )
    with join_ranks() as joint:
        world = joint.connect(config.train.device, config.parallel.timeout)
        verdicts = _verify(config, world, steps or 50, inject, as_json or not world.is_first)
        verdicts = _first_found(world.gather(verdicts))
        if world.is_first:
            _print_verdicts(verdicts, f"{config.model.name} on {config.data.path}", world.size, as_json)
            if inject is not None and not as_json:
                found = not verdicts[-1].same
                out().print("The bit flipped on purpose was found." if found else "The bit was NOT found.")
        if not all(verdict.same for verdict in verdicts):
            raise typer.Exit(1)


def _with_ranks(ranks: int) -> int:
    """Run this command again in `ranks` processes."""
    arguments = sys.argv[1:]
    at = next(i for i, argument in enumerate(arguments) if argument.split("=")[0] == "--ranks")
    del arguments[at : at + (1 if "=" in arguments[at] else 2)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with subprocess.Popen([*launch, "-m", "hotbed", *arguments], stderr=subprocess.PIPE, text=True) as launched:
        try:
            _, said = launched.communicate()
        except BaseException:
            launched.terminate()  # torchrun ends its ranks
            raise
    if launched.returncode not in (0, 1):
        err().print(said, markup=False)
    return launched.returncode


def _verify(config: RunConfig, world: World, steps: int, inject: str | None, quiet: bool) -> list[Verdict]:
    from hotbed.train.step import repeatable
    from hotbed.verify import inject as damage
    from hotbed.verify import verify

    dataset = open_dataset(config.data.path)
    injected = None if inject is None else damage(inject)
    verdicts = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=err(), transient=True, disable=quiet or not err().is_terminal)
    with tempfile.TemporaryDirectory(prefix="hotbed-verify-") as folder, repeatable(), bar:
        twins = _Twins(config, dataset, world, Path(folder))
        batches = twins.batches(steps)
        for way in _ways(config, twins, batches, Path(folder)):
            task = bar.add_task(way.name, total=len(batches))
            verdict = verify(twins.make, batches, way, partial(_advance, bar, task), injected=injected, agree=world.any)
            verdicts.append(verdict)
            if world.any(not verdict.same):
                break
    return verdicts


def _advance(bar: Progress, task: TaskID, step: int) -> None:
    bar.update(task, completed=step)


class _Twins:
    """Learners of one config that differ in where rows are stored."""

    def __init__(self, config: RunConfig, dataset: Dataset, world: World, folder: Path) -> None:
        self._config, self._dataset, self._world, self._folder = config, dataset, world, folder
        self._sizes: list[int] = []  # samples of each batch on all ranks

    def batches(self, steps: int) -> list[Batch]:
        """The first batches of the run; this rank's part of them."""
        loader = self._built({}).training.loaders.train
        self._sizes = [loader.size_of(number) for number in range(min(steps, len(loader)))]
        return list(islice(loader.epoch(0), steps))

    def least_share(self, batches: list[Batch]) -> float:
        """The smallest share of the rows that holds any batch of all ranks."""
        most = 0
        for batch in batches:
            most = max(most, sum(np.unique(column).size for column in self._columns(batch)))
        rows = sum(one.rows or 0 for one, *_ in self._dataset.schema.tables.values())
        return min(1.0, 1.05 * sum(self._world.gather(most)) / max(rows, 1))

    def least_memory(self, batches: list[Batch]) -> str:
        """Memory over an ssd: the index of all rows and an eighth of the used rows, so that the others do go to the ssd."""
        from hotbed.tables.sizing.enough import least_over_ssd
        from hotbed.train.build import sketch

        columns = zip(*(self._columns(batch) for batch in batches), strict=True)
        used = sum(np.unique(np.concatenate(column)).size for column in columns)
        used = max(1, sum(self._world.gather(used)))
        groups = sketch(self._config, self._dataset, self._world).amounts.groups
        return str(least_over_ssd(groups, used, -(-used // (8 * self._world.size))))

    def make(self, **where: Any) -> tuple[EmbeddingTables, Step]:
        """A learner; without arguments, the one without a cache."""
        learner = self._built(where).training.learner
        sizes = iter(self._sizes)

        def step(batch: Batch) -> Tensor:
            size = next(sizes)
            return learner.step(batch, size if self._world.size > 1 else None).loss

        return learner.tables, step

    def _columns(self, batch: Batch) -> list[NDArray[np.int64]]:
        """The ids of each feature."""
        return [*batch.ids.numpy().T, *(bag.values.numpy() for bag in batch.bags.values())]

    def _built(self, where: dict[str, Any]) -> BuiltTraining:
        from hotbed.train.build import build

        kept = {"cache": 0.0, "hbm": "", "memory": "", "ssd": "", **where}
        config = dataclasses.replace(self._config, tables=dataclasses.replace(self._config.tables, **kept))
        return build(config, self._dataset, self._folder / "run", (), self._world)


def _ways(config: RunConfig, twins: _Twins, batches: list[Batch], folder: Path) -> list[TwinStorage]:
    from hotbed.verify import TwinStorage

    tables = config.tables
    where: dict[str, Any] = {"cache": tables.cache, "hbm": tables.hbm}
    if not tables.cache and not tables.hbm:
        where = {"cache": max(0.015, twins.least_share(batches))}
    memory, ssd = tables.memory or twins.least_memory(batches), f"{folder / 'rows'}:{_ssd_bytes(tables.ssd)}"
    window, look_ahead = tables.window or None, tables.look_ahead or None
    tiers = {**where, "memory": memory, "ssd": ssd}
    return [
        TwinStorage("cached, on demand", where, ahead=False),
        TwinStorage("cached, prefetched", where, window=window, look_ahead=look_ahead),
        TwinStorage("memory and ssd below, prefetched", tiers, window=window, look_ahead=look_ahead),
    ]


def _ssd_bytes(given: str) -> str:
    return given.rpartition(":")[2] if ":" in given else "64GiB"


def _print_verdicts(verdicts: list[Verdict], name: str, ranks: int, as_json: bool) -> None:
    if as_json:
        print_json({"same": all(one.same for one in verdicts), "ways": [_as_json(one) for one in verdicts]})
        return
    grid = Grid("way", "steps", "lookups", "rows", "evictions", "verdict")
    for column in grid.columns[1:-1]:
        column.justify = "right"
    for verdict in verdicts:
        numbers = (verdict.steps, verdict.lookups, verdict.rows, verdict.evictions)
        said = "the same bits" if verdict.same else "different"
        grid.add_row(verdict.way.name, *(f"{number:,}" for number in numbers), said)
    out().print(grid)
    name = f"{name}, {ranks} ranks" if ranks > 1 else name
    found = [verdict.difference.text() for verdict in verdicts if verdict.difference is not None]
    if found:
        out().print(*found, sep="\n", markup=False)
        said = "the cache changed a result. Unless you used --inject, this is a bug: please report it with the lines above."
    elif not any(verdict.evictions for verdict in verdicts):
        said = "the same bits, but no row was evicted: give a smaller --cache or more --steps."
    else:
        said = "the cache is invisible. Every loss, vector, gradient, row and state had the same bits."
    out().print(f"{name}: {said}", markup=False)


def _first_found(by_rank: list[list[Verdict]]) -> list[Verdict]:
    """The verdicts of all ranks as one: counts are added, the first difference is kept."""
    joined_verdicts = []
    for verdicts in zip(*by_rank, strict=True):
        found = min((one.difference for one in verdicts if one.difference is not None), default=None)
        counts = {name: sum(getattr(one, name) for one in verdicts) for name in ("lookups", "rows", "evictions")}
        joined_verdicts.append(verdicts[0]._replace(**counts, difference=found))
    return joined_verdicts


def _as_json(verdict: Verdict) -> dict[str, Any]:
    difference = None if verdict.difference is None else verdict.difference._asdict()
    numbers = {name: getattr(verdict, name) for name in ("steps", "lookups", "rows", "evictions")}
    return {"way": verdict.way.name, "same": verdict.same, **numbers, "difference": difference}
