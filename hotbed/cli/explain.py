"""`hotbed explain`: where a row of a run is, its history, and when it is used next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hotbed.cli.console import out, print_json, table_of_numbers, waiting
from hotbed.cli.options import AsJson, RunPlace

if TYPE_CHECKING:
    from hotbed.forecast.explain import Explanation
    from hotbed.forecast.explain.explain import TopRow

_SHOWN_MOVES = 12


def explain_command(
    run: RunPlace,
    table: Annotated[str, typer.Option(help="The table: the name of an id feature.")],
    id: Annotated[
        str | None,
        typer.Option(
            "--id",
            help="The row number, as in the data files (a row of the vocabulary); for raw values use --value.",
        ),
    ] = None,
    value: Annotated[str | None, typer.Option(help="A value as in the raw log, instead of --id.")] = None,
    top: Annotated[
        int | None, typer.Option(help="Instead of one row: this many rows of the table, most used first.")
    ] = None,
    by: Annotated[str, typer.Option(help="What --top ranks by: uses or evictions.")] = "uses",
    as_json: AsJson = False,
) -> None:
    """Show the history of one row: where it is, its uses, admissions and evictions, its score, its next use.

    If the run is not finished, its last checkpoint is read. The run's batches are read again and replayed through its cache
    without rows, which decides exactly as in training; the result is compared with the cache contents in
    the checkpoint. Nothing is trained and nothing is written.

    [bold]For example:[/bold]

    hotbed explain runs/mine --table ad --id 12

    hotbed explain runs/mine --table ad --value a7

    hotbed explain runs/mine --table ad --top 20 --by evictions
    """
    from hotbed.errors import ConfigError
    from hotbed.forecast.explain import explain, top_rows
    from hotbed.run.remote_folder import local_copy

    run = local_copy(run)
    if top is not None:
        if id is not None or value is not None:
            raise ConfigError("--top lists rows of a table; leave out --id and --value.")
        with waiting("replaying the run's batches"):
            rows, notes = top_rows(run, table, top, by)
        if as_json:
            print_json({"table": table, "rows": [row._asdict() for row in rows], "notes": notes})
            return
        out().print(_top_table(table, rows))
        _print_notes(notes)
        return
    number = None if id is None else _number(id)
    with waiting("replaying the run's batches"):
        found = explain(run, table, id=number, value=value)
    if as_json:
        print_json(found.figures())
        return
    for line in explanation_lines(found):
        out().print(line)
    _print_notes(found.notes)


def _number(text: str) -> int:
    from hotbed.errors import ConfigError

    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"--id {text} is not a number. For a value as in the raw log use --value {shlex.quote(text)}."
        ) from None


def explanation_lines(found: Explanation) -> list[str]:
    """The explanation in lines."""
    request = found.request
    name = (
        f"{request.table} {request.id}"
        if request.value is None
        else f"{request.table} {request.value!r} (id {request.id})"
    )
    name += f" ({request.meaning})" if request.meaning and request.value is None else ""
    lines = [f"{name}, as of step {found.step:,} of {found.run}", f"  where    {_where(found)}"]
    norms = found.norms
    if norms is not None:
        states = "".join(f", {state} {norm:.4g}" for state, norm in norms.states.items())
        numbers = "".join(f", {number.replace('_', ' ')} {count:,}" for number, count in norms.numbers.items())
        lines.append(f"  holds    weights of norm {norms.weight:.4g}{states}{numbers}")
    return [*lines, _gradient_line(found), *_history_lines(found), *_score_lines(found), *_next_lines(found)]


def _where(found: Explanation) -> str:
    place = found.place
    words = {
        "cache": "in the cache",
        "memory": "in host memory, below the cache",
        "ssd": "on the ssd",
        "device": "on the device, as all rows are",
        "never trained": "nowhere yet: it was never trained and still has its initial value",
        "no row": "nowhere: the id has no row (never admitted, or expired)",
    }
    return f"{words[place.where]}{f', of rank {place.rank}' if place.rank is not None else ''}"


def _gradient_line(found: Explanation) -> str:
    gradient, request = found.gradient, found.request
    if gradient is None:
        row = shlex.quote(f"{request.table}={request.id}")
        return f"  gradient not recorded; `hotbed train --watch-rows {row}` records it"
    return f"  gradient last of norm {gradient.norm:.4g}, in step {gradient.step:,}; {gradient.updates:,} were recorded"


def _history_lines(found: Explanation) -> list[str]:
    history, uses = found.history, found.uses
    if not uses.lookups:
        lines = ["  used     never in training"]
    else:
        lines = [
            f"  used     {uses.lookups:,} times in {uses.batches:,} batches, first in step {uses.first_step:,}, last in step "
            f"{uses.last_step:,}"
        ]
    if uses.evaluation_lookups:
        lines[0] += f"; {uses.evaluation_lookups:,} times in evaluations"
    if history is not None and history.agreement is not None:
        exact = "" if history.agreement == 1.0 else " (approximate: see the note)"
        lines.append(
            f"  moved    into the cache {_times(history.admissions)}, out of it {_times(history.evictions)}{exact}"
        )
        shown = history.moves[-_SHOWN_MOVES:]
        words = [f"{'in' if move.into_cache else 'out'} {_step_word(move.step, move.while_training)}" for move in shown]
        more = "... " if len(history.moves) > _SHOWN_MOVES else ""
        if words:
            lines.append(f"           by step: {more}{', '.join(words)}")
    return lines


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count:,} times")


def _step_word(step: int, while_training: bool) -> str:
    if while_training:
        return f"{step:,}"
    return f"{step:,} (evaluation)" if step else "before the first step"


def _score_lines(found: Explanation) -> list[str]:
    score = found.score
    if score is None:
        return []
    verdict = "this row would stay" if score.stays else "this row would be among them"
    return [
        f"  score    {score.score:,} by the policy {score.policy}; the lowest scores leave first: {score.rank:,} of the "
        f"{score.num_rows:,} rows in the cache before this one",
        f"           the lowest is {score.lowest:,}; a window usually evicts rows up to {score.threshold:,}: {verdict}",
    ]


def _next_lines(found: Explanation) -> list[str]:
    following = found.next_use
    if following.step is not None:
        return [f"  next     in step {following.step:,}, by the reader's order"]
    rate = "" if following.every is None else f"; so far it was used every {following.every:,.1f} steps"
    left = "no step is left" if found.finished else "in none of the remaining steps"
    return [f"  next     {left}{rate}"]


def _top_table(table: str, rows: list[TopRow]) -> Table:
    known, meaning = any(row.meaning for row in rows), "in the raw log"
    headings = ("id", "lookups", "into the cache", "out of it", *([meaning] if known else []))
    shown = table_of_numbers(f"rows of {table}", *headings, left=(meaning,))
    for row in rows:
        numbers = (row.id, row.lookups, row.admissions, row.evictions)
        shown.add_row(*(f"{number:,}" for number in numbers), *([row.meaning] if known else []))
    return shown


def _print_notes(notes: list[str]) -> None:
    for note in notes:
        out().print(f"note: {note}")
