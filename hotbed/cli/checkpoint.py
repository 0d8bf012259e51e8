"""`hotbed checkpoint`: list, verify, compare and prune the checkpoints of a run."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from hotbed.cli.console import out, print_json, progress_bar, table_of_numbers
from hotbed.cli.options import AsJson, Checkpoints, DryRun
from hotbed.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hotbed.checkpoint.diff import Diff


class _Subcommands(TyperGroup):
    """Lists the subcommands if an unknown one is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            close = difflib.get_close_matches(args[0], self.commands, n=1)
            close = ["diff"] if args[0] == "compare" else close
            meant = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"there is no `hotbed checkpoint {args[0]}`.{meant} There are {', '.join(self.commands)}."
            )
        return super().resolve_command(ctx, args)


checkpoint_app = typer.Typer(
    cls=_Subcommands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False
)
_MOST_LINES = 40  # of dense tensors or tables


@checkpoint_app.command("list", no_args_is_help=True)
def list_command(run: Checkpoints, as_json: AsJson = False) -> None:
    """List checkpoints: step, kind, parent, size, rows, age.

    A [bold]full[/bold] checkpoint holds every row ever trained; an [bold]incremental[/bold] one only the rows touched since
    its parent. `hotbed train --resume RUN` uses the newest. With torchrun each rank has its own chain, and a step counts once
    all ranks have it.

    [bold]For example:[/bold]

    hotbed checkpoint list runs/mine
    """
    from hotbed.checkpoint.manifest import read_manifest
    from hotbed.errors import RunError
    from hotbed.host.memory import in_words
    from hotbed.run.remote_folder import local_copy

    run = local_copy(run)
    if as_json:
        print_json({"checkpoints": [_facts(folder) for folder in _folders(run)]})
        return
    table = Table()
    for heading in ("checkpoint", "step", "kind", "parent", "size", "rows", "age"):
        side = "right" if heading in ("step", "size", "rows", "age") else "left"
        table.add_column(heading, justify=side, no_wrap=heading == "checkpoint")  # type: ignore[arg-type]
    for folder in _folders(run):
        try:
            found = read_manifest(folder)
        except RunError as error:
            table.add_row(_label(folder), "-", "damaged", str(error), "-", "-", "-")
            continue
        size, rows = in_words(found.num_bytes), f"{found.num_rows:,}"
        table.add_row(
            _label(folder),
            f"{found.step:,}",
            found.kind,
            found.parent or "-",
            size,
            rows,
            _age(time.time() - found.time),
        )
    out().print(table)
    _print_rank_steps(run)


@checkpoint_app.command("verify", no_args_is_help=True)
def verify_command(run: Checkpoints, as_json: AsJson = False) -> None:
    """Verify every byte of every checkpoint: checksums, rows, and complete chains. Names what is damaged.

    Exit code 1 if something is wrong. Nothing is changed.

    [bold]For example:[/bold]

    hotbed checkpoint verify runs/mine
    """
    from hotbed.checkpoint.read import problems_of
    from hotbed.errors import RunError
    from hotbed.run.remote_folder import local_copy

    folders = _folders(local := local_copy(run))
    problems: dict[Path, list[str]] = {}
    with _bar("verifying", _bytes_of(folders)) as report:
        for folder in folders:
            problems[folder] = problems_of(folder, report)
    problems = {folder: found for folder, found in problems.items() if folder.exists()}  # a running training may prune
    wrong = [text for found in problems.values() for text in found]
    good = [_label(folder) for folder, found in problems.items() if not found]
    if as_json:
        print_json({"intact": good, "problems": wrong})
        if wrong:
            raise typer.Exit(ExitCode.FAILURE)
        return
    if not wrong:
        out().print(f"{len(good)} checkpoint{'s are' if len(good) > 1 else ' is'} intact: {', '.join(good)}")
        _print_rank_steps(local)
        return
    way_out = f" The newest intact one is {good[-1]}; move the later ones away to resume from it." if good else ""
    count = f"{len(wrong)} problem{'s' * (len(wrong) > 1)}"
    raise RunError("\n  - ".join([f"{count} in {run}:{way_out}", *wrong]))


@checkpoint_app.command("diff", no_args_is_help=True)
def diff_command(
    one: Annotated[Path, typer.Argument(help="A checkpoint, or a run for its newest.")],
    other: Annotated[Path, typer.Argument(help="The checkpoint or run to compare with.")],
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: settings, tables, rows changed, added and gone, dense weights.

    [bold]For example:[/bold]

    hotbed checkpoint diff runs/demo/checkpoints/000000001000 runs/demo/checkpoints/000000002000

    hotbed checkpoint diff runs/demo runs/mine
    """
    from hotbed.checkpoint.chain import chain_of
    from hotbed.checkpoint.diff import diff
    from hotbed.checkpoint.layouts import entries_of
    from hotbed.run.remote_folder import local_copy

    both = entries_of(local_copy(one)), entries_of(local_copy(other))
    links = [link.folder for entries in both for entry in entries for link in chain_of(entry)]
    with _bar("comparing", _bytes_of(links)) as report:
        found = diff(*both, report)
    if as_json:
        print_json(_diff_figures(found))
        return
    console = out()
    said = [f"{e[0].folder}{f', of all {len(e)} ranks' if len(e) > 1 else ''}" for e in both]
    console.print(" -> ".join(said))
    for path, (before, after) in found.settings.items():
        console.print(f"  {path}: {before!r} -> {after!r}")
    for name, what in found.shapes.items():
        console.print(f"  table {name}: {what}")
    console.print(_rows_table(found))
    for tensor in found.dense[:_MOST_LINES]:
        change = "" if tensor.largest is None else f", by {tensor.largest:.3g} at most"
        console.print(f"  dense {tensor.name}: {tensor.what}{change}")
    if len(found.dense) > _MOST_LINES:
        console.print(f"  and {len(found.dense) - _MOST_LINES} more dense tensors")
    if not found.dense:
        console.print("  dense weights: the same")
    if found.frozen:
        console.print(f"  {found.frozen} linked ssd files were not compared")


@checkpoint_app.command("prune", no_args_is_help=True)
def prune_command(
    run: Checkpoints,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest stay, with the checkpoints they depend on.")],
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints and leftovers of killed writers. A checkpoint that a kept one depends on stays.

    With ranks, the newest checkpoints that all ranks have are counted, and newer ones stay.

    [bold]For example:[/bold]

    hotbed checkpoint prune runs/mine --keep 1 --dry-run
    """
    from hotbed.checkpoint.chain import clean, locked, remove
    from hotbed.files import is_remote, shown_path
    from hotbed.host.memory import in_words

    if is_remote(run):
        raise ConfigError(
            f"{shown_path(run)} is in an object store; train.keep_checkpoints prunes there while a run trains."
        )
    doomed, size = list[Path](), 0
    for root, find_old in _prunings(run, keep):
        with locked(root):
            old = find_old()
            doomed, size = doomed + old, size + _bytes_of(old)
            if not dry_run:
                clean(root)
                remove(old)
    if as_json:
        print_json({"dry_run": dry_run, "removed": [_label(one) for one in doomed], "num_bytes": size})
        return
    what = "would be removed" if dry_run else "removed"
    names = ", ".join(_label(one) for one in doomed) or "-"
    out().print(f"{len(doomed)} checkpoints {what}, {in_words(size)}: {names}")


def _facts(folder: Path) -> dict[str, Any]:
    """A checkpoint as JSON has it."""
    from hotbed.checkpoint.manifest import read_manifest
    from hotbed.errors import RunError

    try:
        found = read_manifest(folder)
    except RunError as error:
        return {"name": _label(folder), "damaged": str(error)}
    facts = {"step": found.step, "kind": found.kind, "parent": found.parent or None, "num_bytes": found.num_bytes}
    return {"name": _label(folder), **facts, "num_rows": found.num_rows, "time": found.time}


def _diff_figures(found: Diff) -> dict[str, Any]:
    tables = {
        name: {word: getattr(rows, word) for word in ("same", "changed", "added", "gone", "largest", "largest_id")}
        for name, rows in found.tables.items()
    }
    dense = [{"name": one.name, "what": one.what, "largest": one.largest} for one in found.dense]
    settings = {path: list(values) for path, values in found.settings.items()}
    return {"settings": settings, "shapes": dict(found.shapes), "tables": tables, "dense": dense}


def _prunings(place: Path, keep: int) -> Iterator[tuple[Path, Callable[[], list[Path]]]]:
    """Every folder with old checkpoints, and a function that finds them once the folder is locked."""
    from hotbed.checkpoint.chain import unneeded
    from hotbed.checkpoint.layouts import is_of_rank, root_of, run_of, steps_of, unneeded_before, worlds_in
    from hotbed.errors import RunError

    first = _folders(place)[0]
    if is_of_rank(place.resolve()) or is_of_rank(place.resolve().parent):
        raise RunError(f"{place} belongs to one rank, and all ranks keep the same steps. Give {run_of(first)}.")
    checkpoints = first.parent.parent if is_of_rank(first.parent) else first.parent
    for world in worlds_in(checkpoints):
        if world == 1:
            yield checkpoints, partial(unneeded, checkpoints, keep)
        elif steps := list(steps_of(checkpoints, world)):
            roots = [root_of(checkpoints, rank, world) for rank in range(world)]
            yield from ((root, partial(unneeded_before, root, steps[-keep:][0])) for root in roots)


def _folders(place: Path) -> list[Path]:
    """The checkpoints of a run or a folder, of all ranks, or the named one."""
    from hotbed.checkpoint.chain import find, folders_in
    from hotbed.checkpoint.layouts import ranks_in

    for root in (place / "checkpoints", place):
        if folders := [folder for one in (root, *ranks_in(root)) for folder in folders_in(one)]:
            return folders
    return [find(place).folder]


def _label(folder: Path) -> str:
    """The name of a checkpoint, with the rank that wrote it."""
    from hotbed.checkpoint.layouts import is_of_rank

    return f"{folder.parent.name}/{folder.name}" if is_of_rank(folder.parent) else folder.name


def _print_rank_steps(place: Path) -> None:
    """For a run of several ranks, print the steps that all of them have."""
    from hotbed.checkpoint.layouts import steps_of, worlds_in

    for root in (place / "checkpoints", place):
        for world in (world for world in worlds_in(root) if world > 1):
            steps = ", ".join(f"{step:,}" for step in steps_of(root, world)) or "none"
            out().print(f"steps that all {world} ranks have: {steps}")


def _bytes_of(folders: list[Path]) -> int:
    size = 0
    for folder in folders:
        with suppress(OSError):  # a running training may prune
            size += sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return size


def _rows_table(found: Diff) -> Table:
    headings = ("table", "same", "changed", "added", "gone", "largest change", "at id")
    table = table_of_numbers(None, *headings, left=("table",))
    lines = sorted(found.tables.items(), key=lambda one: -one[1].changed - one[1].added - one[1].gone)
    for name, rows in lines[:_MOST_LINES]:
        counts = [f"{count:,}" for count in (rows.same, rows.changed, rows.added, rows.gone)]
        move = "-" if rows.largest is None else f"{rows.largest:.3g}"
        table.add_row(name, *counts, move, "-" if rows.largest_id is None else str(rows.largest_id))
    if len(lines) > _MOST_LINES:
        table.caption = f"{len(lines) - _MOST_LINES} more tables changed less"
    return table


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes, on a terminal."""
    done = 0
    with progress_bar(title, "bytes") as report:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report("", done, total)

        yield advance
