"""`hotbed plan`: what a run will take and how fast it will be, before it starts; what else could be asked; what to take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotbed.cli.console import err, out
from hotbed.cli.dataset import DEFAULT_DATA, open_dataset
from hotbed.cli.plan_text import advice_text, change_table, outlook_text, parts_table, unfit_text
from hotbed.cli.plot import curve_text
from hotbed.cli.settings import share

if TYPE_CHECKING:
    from hotbed.forecast.curves import Curves
    from hotbed.forecast.forecast import Outlook
    from hotbed.forecast.request import Asked
    from hotbed.run.config import RunConfig

_CALIBRATE = ("auto", "again", "no")


def plan_command(
    data: str = typer.Argument(DEFAULT_DATA, help="A dataset directory, or criteo-like, criteo-like:ROWS, adult."),
    hbm: str | None = typer.Option(None, help="Device memory for rows and all that finds them, e.g. 2GiB."),
    cache: float | None = typer.Option(
        None, parser=share, metavar="SHARE", help="The same as a share of the rows, e.g. 0.015."
    ),
    memory: str | None = typer.Option(None, help="Most host memory for rows behind the cache, e.g. 64GiB."),
    ssd: str | None = typer.Option(None, help="Folder and bytes for rows that memory does not hold, DIR:1TiB."),
    model: str | None = typer.Option(None, help="Model name; `hotbed models` lists them."),
    batch_size: int | None = typer.Option(None, min=1, help="Samples of a step, of all ranks together."),
    dim: int | None = typer.Option(None, min=1, help="Width of an embedding vector."),
    optimizer: str | None = typer.Option(None, help="Row optimizer: sgd, adagrad, rowwise_adagrad, adam, ftrl."),
    policy: str | None = typer.Option(None, help="Which rows stay in the cache: oracle, lfu, lru or static."),
    world: int = typer.Option(1, min=1, help="Ranks that train together; rows are spread over them."),
    device: str | None = typer.Option(None, help="auto, cpu, cuda or cuda:N: where the speed is measured."),
    sets: list[str] = typer.Option([], "--set", help="path=value, as for `hotbed train`; may be given many times."),
    what_if: list[str] = typer.Option(
        [], "--what-if", help="NAME=VALUE,VALUE: hbm, cache, memory, ssd, batch_size, dim, optimizer, policy or world."
    ),
    calibrate: str = typer.Option(
        "auto", help="auto: measure this machine where nothing is known of it; again: in any case; no: leave speed out."
    ),
    curve: bool = typer.Option(True, help="Miss ratios over the size of the cache."),
    html: Path | None = typer.Option(None, help="Write all of it as a page, with the curve of every table."),
    as_json: bool = typer.Option(False, "--json", help="All figures as JSON."),
) -> None:
    """Say what a run would take and how fast it would be, without training.

    Without arguments: the run of `hotbed train`, the default model on the embedded click log.

    Hit rates come from simulating the run's own batches with the cache that trains,
    bytes from its budgets, samples/s from a few seconds of measuring this machine,
    kept for the next time. Exit code 2 says that something does not fit, and why.

    [bold]For example:[/bold]

    hotbed plan

    hotbed plan criteo-like --hbm 16MiB

    hotbed plan DIR --hbm 2GiB --memory 64GiB --ssd /fast/rows:1TiB --model dlrm --dim 64

    hotbed plan DIR --hbm 2GiB --what-if hbm=1GiB,2GiB,4GiB --what-if dim=16,32,64 --html plan.html
    """
    from hotbed.errors import ConfigError

    if calibrate not in _CALIBRATE:
        raise ConfigError(f"--calibrate is one of {', '.join(_CALIBRATE)}, not {calibrate!r}")
    given: dict[str, Any] = {
        "data.path": data, "model.name": model, "model.dim": dim, "data.batch_size": batch_size, "tables.hbm": hbm,
        "tables.cache": cache, "tables.memory": memory, "tables.ssd": ssd, "tables.optimizer": optimizer,
        "tables.policy": policy, "train.device": device,
    }  # fmt: skip
    config = _config({path: value for path, value in given.items() if value is not None}, sets)
    dataset = open_dataset(data)
    with err().status("simulating and measuring"):
        from hotbed.forecast.forecast import look_out
        from hotbed.forecast.request import Asked
        from hotbed.forecast.what_if import advise, parse_change, vary

        asked = Asked(config, dataset, world, calibrate)
        changes = [parse_change(text) for text in what_if]
        outlook = look_out(asked)
        tables = {change.name: vary(asked, change) for change in changes}
        advice = advise(asked, outlook)
        curves = _curves(asked, outlook, html is not None) if curve or html is not None else None
    if html is not None:
        _write_page(html, asked, outlook, curves)
    if as_json:
        figures = {**outlook.figures(), "recommendation": None if advice is None else advice._asdict()}
        figures["what_if"] = {name: {value: one.figures() for value, one in found} for name, found in tables.items()}
        out().print_json(data={**figures, **({} if curves is None else curves.figures())}, highlight=False)
    else:
        out().print(parts_table(outlook))
        out().print(outlook_text(outlook), soft_wrap=True)
        for name, found in tables.items():
            out().print(change_table(name, found))
            if unfit := unfit_text(name, found):
                out().print(unfit, soft_wrap=True)
        if curves is not None:
            out().print(curve_text(curves))
        if advice is not None:
            out().print(advice_text(advice), soft_wrap=True)
    if outlook.problems:
        for problem in outlook.problems:
            err().print(f"does not fit, because {problem}", soft_wrap=True)
        raise typer.Exit(2)


def _config(given: dict[str, Any], sets: list[str]) -> RunConfig:
    from hotbed.run.config import raise_problems
    from hotbed.run.run_file import compose

    config, problems = compose(None, given, sets)
    with err().status("loading torch"):
        from hotbed.train.build import option_problems
    raise_problems(problems + option_problems(config))
    return config


def _curves(asked: Asked, outlook: Outlook, tables: bool) -> Curves:
    """Of the run's policy, LRU and the optimum."""
    from hotbed.forecast.curves import curves_of

    return curves_of(asked.given, asked.replay, [asked.config.tables.policy], asked.ahead, tables=tables)


def _write_page(path: Path, asked: Asked, outlook: Outlook, curves: Curves | None) -> None:
    from hotbed.report.plan_page import outlook_section, write_curves

    assert curves is not None, "a page has curves"
    before = outlook_section(outlook.figures())
    write_curves(path, asked.config.data.path, curves, outlook.setting["slots"], before)
