"""`hotbed top`: the progress of a run, live, from the log in its folder or from its metrics endpoint."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hotbed.cli.console import err, out, print_json
from hotbed.cli.options import AsJson, MaybeRunPlaces
from hotbed.cli.top_state import FINISHED, RUNNING, RunStatus, SplitEvaluation, StateSource, runs_below, source_of
from hotbed.errors import RunError
from hotbed.report.formats import compact, count, decimal, duration, milliseconds, percent, significant, size
from hotbed.run.folder import is_training

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 32  # characters
RUNS = Path("runs")  # the default of `hotbed train`
_PARTS = ("reader", "plan", "wait", "copy", "look_up", "model", "update", "dense", "other")


def top_command(
    runs: MaybeRunPlaces = None,
    once: bool = typer.Option(
        False, "--once", help="Print one frame and exit; the default where stdout is not a terminal."
    ),
    every: float = typer.Option(1.0, min=0.1, help="Seconds between two updates."),
    as_json: AsJson = False,
) -> None:
    """Watch runs while they train: loss, speed, tiers, hit rates, bytes, stalls, the reader's queue, time left.

    RUN may also be http://HOST:PORT of `hotbed train --metrics-port`. Default: the active runs in runs/, else the newest one
    there. --json prints the state once. Only files of the run are read, which does not slow it down. Ctrl-C ends the display,
    not the run.

    [bold]For example:[/bold]

    hotbed top

    hotbed top runs/demo

    hotbed top http://127.0.0.1:9100 --once
    """
    sources = [source_of(_local(given)) for given in runs or _runs_here()]
    console = out()
    states = [source.look() for source in sources]
    if as_json:
        print_json({"runs": [{**dataclasses.asdict(state), "steps_per_s": state.steps_per_s} for state in states]})
        return
    if once or not console.is_terminal or not any(state.status == RUNNING for state in states):
        for state in states:
            console.print(frame(state))
        return
    _live(sources, every)


def _local(place: str) -> str:
    """The folder in which a run of a store trains on this machine; any other place as it is."""
    from hotbed.files import is_remote, path_of, shown_path
    from hotbed.run.remote_run import working_folder

    if place.startswith(("http://", "https://")) or not is_remote(place):
        return place
    folder = working_folder(path_of(place))  # type: ignore[arg-type]
    if not folder.is_dir():
        raise RunError(
            f"{shown_path(place)} does not train on this machine. `hotbed report` shows what has arrived in the store; with "
            "`hotbed train --metrics-port` a run can be watched from elsewhere: `hotbed top http://HOST:PORT`."
        )
    return str(folder)


def _runs_here() -> list[str]:
    """The active runs in runs/, else the newest one."""
    found = runs_below(RUNS)
    if not found:
        raise RunError(
            f"there is no run in {RUNS}/ of this folder. Name one: `hotbed top RUN`, the folder of `hotbed train --out`, or "
            "the http://HOST:PORT of `hotbed train --metrics-port`."
        )
    training = [str(run) for run in found if is_training(run)]
    if not training:
        err().print(f"no run in {RUNS}/ is active; this is the newest")
    return training or [str(found[-1])]


def _live(sources: list[StateSource], every: float) -> None:
    """Refresh until all runs have ended."""
    from rich.console import Group
    from rich.live import Live

    try:
        with Live(console=out(), auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                states = [source.look() for source in sources]
                live.update(Group(*map(frame, states)), refresh=True)
                if not any(state.status == RUNNING for state in states):
                    return
                time.sleep(every)
    except KeyboardInterrupt:
        return


def frame(state: RunStatus) -> RenderableType:
    """The panel of one run."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    color = {RUNNING: "green", FINISHED: "cyan"}.get(state.status, "yellow")
    title = Text.assemble((state.status, color), " ", (state.name, "bold"))
    parts: list[RenderableType] = []
    if state.about or state.why:
        parts.append(Text(" ".join(one for one in (state.about, f"({state.why})" if state.why else "") if one)))
    if state.total_steps > 0 and math.isfinite(state.step):
        bar = Table.grid(expand=True)  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=state.total_steps, completed=min(state.step, state.total_steps)))
        parts.append(bar)
    if not state.numbers:
        parts.append(Text("no line in the log yet: the first comes after train.log_every steps"))
    parts.append(_table(state))
    return Panel(Group(*parts), title=title, title_align="left")


def _table(state: RunStatus) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, said in rows_of(state):
        table.add_row(name, Text(said))
    return table


def rows_of(state: RunStatus) -> list[tuple[str, str]]:
    """(label, text) of every line; unknown values are left out."""
    found = [("step", _step(state)), ("loss", _loss(state)), ("speed", _speed(state))]
    splits = [path.removesuffix("/log_loss") for path in state.numbers if path.endswith("/log_loss")]
    found += [(split, _split(state, split)) for split in splits]
    found += [("time of a step", _parts(state)), ("reader", _reader(state))]
    found += [("cache", _cache(state)), ("tiers", _tiers(state)), ("ids", _ids(state)), ("memory", _memory(state))]
    return [(name, said) for name, said in found if said]


def _step(state: RunStatus) -> str:
    if not math.isfinite(state.step):
        return ""
    total = f" of {count(state.total_steps)}" if math.isfinite(state.total_steps) else ""
    left = f", {duration(state.seconds_left)} left" if state.seconds_left >= 0 else ""
    gone = f", {duration(state.seconds)} so far" if math.isfinite(state.seconds) else ""
    return f"{count(state.step)}{total}, epoch {count(state.epoch)}, {compact(state.samples)} samples{gone}{left}"


def _loss(state: RunStatus) -> str:
    if not math.isfinite(state.get("train/loss")):
        return ""
    return f"{decimal(state.get('train/loss'))}, AUC {decimal(state.get('train/auc'))}  {curve(state.losses)}"


def _split(state: RunStatus, split: str) -> str:
    """The newest evaluation of a split, and the best one if it is another."""
    said = f"AUC {decimal(state.get(f'{split}/auc'))}, log loss {decimal(state.get(f'{split}/log_loss'))}"
    newest, best = state.newest.get(split), state.best.get(split)
    if newest is None or best is None:
        return said
    kept = ", whose weights are kept" if newest.step == state.kept_step else ""
    said = f"{said} {_after(newest)}{kept}"
    if best.step == newest.step:
        return said
    kept = ", whose weights are kept" if best.step == state.kept_step else ""
    return f"{said}; best AUC {decimal(best.auc)} {_after(best)}{kept}"


def _after(evaluated: SplitEvaluation) -> str:
    epoch = f" (epoch {count(evaluated.epoch)})" if math.isfinite(evaluated.epoch) else ""
    return f"after step {count(evaluated.step)}{epoch}"


def curve(values: list[float], width: int = _CURVE) -> str:
    """The values as a line of blocks, the newest last."""
    if len(values) < 2:
        return ""
    shown = (
        [values[round(k * (len(values) - 1) / (width - 1))] for k in range(width)] if len(values) > width else values
    )
    low, high = min(shown), max(shown)
    spread = (high - low) or 1.0
    return "".join(_BARS[min(int((value - low) / spread * len(_BARS)), len(_BARS) - 1)] for value in shown)


def _speed(state: RunStatus) -> str:
    rate = state.get("train/samples_per_s")
    if not math.isfinite(rate):
        return ""
    steps = f", {significant(state.steps_per_s, 3)} steps/s" if math.isfinite(state.steps_per_s) else ""
    return f"{compact(rate)} samples/s{steps}"


def _parts(state: RunStatus) -> str:
    group = "device_times" if math.isfinite(state.get("device_times/model")) else "times"
    known = {name: state.get(f"{group}/{name}") for name in _PARTS}
    known = {name: value for name, value in known.items() if math.isfinite(value)}
    total = sum(known.values())
    if total <= 0:
        return ""
    shares = sorted(((value / total, name) for name, value in known.items()), reverse=True)
    listed = ", ".join(f"{name.replace('_', '')} {percent(share, 0)}" for share, name in shares if share >= 0.01)
    return f"{milliseconds(total)}: {listed}"


def _reader(state: RunStatus) -> str:
    ready = state.get("times/ready")
    return f"{significant(ready, 2)} batches ready when training asks" if math.isfinite(ready) else ""


def _cache(state: RunStatus) -> str:
    if not math.isfinite(state.get("cache/lookup_hit_rate")):
        return ""
    said = (
        f"{percent(state.get('cache/lookup_hit_rate'))} of lookups hit, {percent(state.get('cache/hit_rate'))} of rows, "
        f"stalled {percent(state.get('cache/stall_share'))}"
    )
    return f"{said}; {_rate(state, 'cache/bytes_in')} in, {_rate(state, 'cache/bytes_out')} out"


def _tiers(state: RunStatus) -> str:
    if not math.isfinite(state.get("tiers/ssd_bytes")):
        return ""
    below = state.get("tiers/memory_hit_rate")
    hits = f"{percent(below)} of misses in memory; " if math.isfinite(below) else ""
    return (
        f"{hits}memory {size(state.get('tiers/memory_bytes'))} of {size(state.get('tiers/memory_budget'))}, "
        f"ssd {size(state.get('tiers/ssd_bytes'))} of {size(state.get('tiers/ssd_cap'))}; "
        f"{_rate(state, 'tiers/bytes_read')} read, {_rate(state, 'tiers/bytes_written')} written"
    )


def _ids(state: RunStatus) -> str:
    names = ("rows", "admitted", "rejected", "expired")
    total = {name: [value for path, value in state.numbers.items()
                    if path.startswith("ids/") and path.endswith(f"/{name}")] for name in names}  # fmt: skip
    if not total["rows"]:
        return ""
    return ", ".join(f"{compact(sum(values))} {name}" for name, values in total.items())


def _memory(state: RunStatus) -> str:
    resident, device = state.get("memory/resident_bytes"), state.get("memory/device_bytes")
    if not math.isfinite(resident):
        return ""
    return f"process {size(resident)}" + (f", device {size(device)}" if math.isfinite(device) else "")


def _rate(state: RunStatus, path: str) -> str:
    """Bytes per batch as bytes per second."""
    amount = state.get(path) * state.steps_per_s
    return f"{size(amount)}/s" if math.isfinite(amount) else "–"
