"""`hotbed plan`: what a run will need and how fast it will be, before it starts; other budgets; a recommendation."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from hotbed.cli import options as opt
from hotbed.cli.console import err, out, print_json, table_of_numbers
from hotbed.cli.plot import curve_text
from hotbed.cli.settings import one_dataset, open_dataset, read_config, settings_of_flags, suited_config
from hotbed.host.memory import in_words
from hotbed.run.run_file import given_settings

if TYPE_CHECKING:
    from hotbed.forecast.choose import Choice, Shares
    from hotbed.forecast.curves import Curves
    from hotbed.forecast.forecast import Forecast
    from hotbed.forecast.request import ForecastRequest
    from hotbed.forecast.what_if import Advice

_TABLES = 8  # that are listed
_CALIBRATE = ("auto", "again", "no")


def plan_command(
    place: opt.DataPlace = None,
    data: opt.Data = None,
    hbm: opt.CacheBytes = None,
    cache: opt.CacheShare = None,
    memory: opt.Memory = None,
    ssd: opt.Ssd = None,
    model: opt.ModelName = None,
    batch_size: opt.BatchSize = None,
    dim: opt.Dim = None,
    optimizer: opt.RowOptimizer = None,
    policy: opt.CachePolicy = None,
    ranks: opt.Ranks = None,
    device: opt.Device = None,
    sets: opt.Sets = [],  # noqa: B006  never changed
    what_if: list[str] = typer.Option(
        [],
        "--what-if",
        help="NAME=VALUE,VALUE; NAME is hbm, cache, memory, ssd, batch_size, dim, optimizer, policy or ranks.",
    ),
    choose: bool = typer.Option(
        False,
        "--choose",
        help="Choose precision, cache, and with --ranks placement and k, from the budgets; what is given is kept.",
    ),
    links: Path | None = typer.Option(
        None, metavar="FILE", help="The links between ranks, as `torchrun ... -m hotbed topo --json` printed them."
    ),
    calibrate: str = typer.Option(
        "auto",
        help="auto: measure this machine unless it has been measured; again: always measure; no: leave speed out.",
    ),
    curve: opt.Curve = None,
    html: opt.Html = None,
    as_json: opt.AsJson = False,
) -> None:
    """Forecast what a run needs and how fast it will be, without training.

    Without arguments: the run of `hotbed train`, the default model on the embedded click log. DATA and --data are the same.
    --memory is for the rows below the cache.

    Hit rates come from simulating the cache on the run's own batches, bytes from its
    budgets, samples/s from a few seconds of measuring this machine, which are kept
    for the next time. Exit code 3: something does not fit; the output says why.

    [bold]For example:[/bold]

    hotbed plan

    hotbed plan criteo-like --hbm 16MiB

    hotbed plan mydata --hbm 1GiB --memory 2GiB --ssd rows:8GiB --model dlrm --dim 64

    hotbed plan mydata --batch-size 64 --cache 90% --what-if cache=50%,100% --html plan.html

    hotbed plan criteo-like --hbm 16MiB --ranks 4 --choose
    """
    from hotbed.errors import ConfigError, ExitCode

    if calibrate not in _CALIBRATE:
        raise ConfigError(f"--calibrate is one of {', '.join(_CALIBRATE)}, not {calibrate!r}")
    opt.local_only(html=html, links=links)
    data, curve = one_dataset(place, data), curve is not False
    given = settings_of_flags(
        data=data, model=model, dim=dim, batch_size=batch_size, hbm=hbm, cache=cache, memory=memory, ssd=ssd,
        optimizer=optimizer, policy=policy, device=device,
    )  # fmt: skip
    dataset = open_dataset(data)
    names = given_settings(None, given, sets)
    config = suited_config(read_config(None, given, sets), names, dataset, lambda _: None)
    with err().status("simulating and measuring"):
        from hotbed.forecast.forecast import make_forecast
        from hotbed.forecast.links import ASSUMED, read_links
        from hotbed.forecast.request import ForecastRequest
        from hotbed.forecast.what_if import advise, parse_variation, vary
        from hotbed.parallel.world import World
        from hotbed.run.config_check import raise_problems
        from hotbed.train.build_ranks import rank_problems

        request = ForecastRequest(
            config, dataset, ranks or 1, calibrate, links=ASSUMED if links is None else read_links(links)
        )
        raise_problems(rank_problems(config, World(0, request.world)))
        changes = [parse_variation(text) for text in what_if]
        choice = _choose(request, names) if choose else None
        if choice is not None:
            request = choice.request
        forecast = make_forecast(request) if choice is None else choice.forecast
        tables = {change.name: vary(request, change) for change in changes}
        advice = advise(request, forecast) if choice is None else choice.cache
        curves = _curves(request, html is not None) if curve or html is not None else None
    if html is not None:
        _write_page(html, request, forecast, curves)
    if as_json:
        figures = {**forecast.figures(), "recommendation": None if advice is None else advice._asdict()}
        figures["choice"] = None if choice is None else choice.figures()
        figures["what_if"] = {name: {value: one.figures() for value, one in found} for name, found in tables.items()}
        print_json({**figures, **({} if curves is None else curves.figures())})
    else:
        out().print(parts_table(forecast))
        out().print(forecast_text(forecast))
        for name, found in tables.items():
            out().print(change_table(name, found))
            if unfit := unfit_text(name, found):
                out().print(unfit)
        if curves is not None:
            out().print(curve_text(curves))
        if advice is not None:
            out().print(advice_text(advice))
        if choice is not None:
            out().print(choice_text(choice))
    if forecast.problems:
        for problem in forecast.problems:
            err().print(f"does not fit, because {problem}")
        raise typer.Exit(ExitCode.DOES_NOT_FIT)


def _curves(request: ForecastRequest, tables: bool) -> Curves:
    """Miss curves of the run's policy, of LRU and of the optimum."""
    from hotbed.forecast.curves import curves_of

    given = request.config.tables
    return curves_of(request.given, request.replay, [given.policy], request.ahead, tables=tables, warmup=given.warmup)


def _choose(request: ForecastRequest, given: Collection[str]) -> Choice:
    from hotbed.forecast.choose import choose

    return choose(request, given)


def _write_page(path: Path, request: ForecastRequest, forecast: Forecast, curves: Curves | None) -> None:
    from hotbed.forecast.page import forecast_section, write_curves

    assert curves is not None, "a page has curves"
    before = forecast_section(forecast.figures())
    write_curves(path, request.config.data.path, curves, forecast.setting["slots"], before)


def parts_table(forecast: Forecast) -> Table:
    """The bytes of every tier."""
    setting = forecast.setting
    title = f"{setting['model']} on {setting['data']}: {setting['rows']:,} rows of {setting['record_bytes']} bytes"
    table = table_of_numbers(title, "tier", "what", "bytes", "", left=("tier", "what", ""))
    for tier in ("device", "memory", "ssd"):
        parts = [part for part in forecast.parts if part.tier == tier]
        for number, part in enumerate(parts):
            table.add_row(
                tier if not number else "", part.name, in_words(part.num_bytes), "exact" if part.exact else "estimate"
            )
        if parts:
            table.add_row("", "in all", in_words(forecast.bytes_of(tier)), "", style="bold", end_section=True)
    return table


def forecast_text(forecast: Forecast) -> str:
    """Traffic and speed in a few lines."""
    return "\n".join([*_traffic_lines(forecast), *_speed_lines(forecast), *forecast.notes])


def _traffic_lines(forecast: Forecast) -> list[str]:
    traffic = forecast.traffic
    if traffic is None:
        return [] if forecast.problems else ["every row is on the device: nothing is moved"]
    lines = [
        f"cache: {forecast.setting['slots']:,} slots hit {100 * traffic.hit_rate:.2f} % of the distinct rows of a window, "
        f"{100 * traffic.lookup_hit_rate:.2f} % of the lookups",
        _cache_bytes(forecast),
        f"a step: {traffic.misses:,.0f} rows missed, {traffic.created:,.0f} of them new; "
        f"{in_words(forecast.bytes_in)} to the device, {in_words(forecast.bytes_out)} back",
    ]
    if traffic.memory_hit_rate is not None:
        lines.append(
            f"memory: has {100 * traffic.memory_hit_rate:.1f} % of the rows requested below the device; ssd: "
            f"{in_words(traffic.from_ssd * forecast.record)} read and "
            f"{in_words(traffic.to_ssd * forecast.record)} written a step"
        )
    if forecast.wires is not None:
        wires = forecast.wires
        lines.append(
            f"network: a rank sends {in_words(wires.in_node)} in the node and {in_words(wires.across)} across nodes a step; "
            f"training waits {1e3 * wires.seconds:.2f} ms for it (projected)"
        )
    return lines


def _cache_bytes(forecast: Forecast) -> str:
    """Bytes of rows and index; and those of all rows without a cache, if that is less."""
    rows, index = (
        sum(part.num_bytes for part in forecast.parts if part.name == name)
        for name in ("rows in the cache", "index of the cache")
    )
    text = f"cache: {in_words(rows)} of rows, {in_words(index)} of index for them and for the batches ahead"
    whole = forecast.setting["rows"] // forecast.setting["world"] * forecast.record
    if whole and rows + index > whole:
        text += f"; all rows without a cache take less, {in_words(whole)}: leave out --cache or --hbm"
    return text


def _speed_lines(forecast: Forecast) -> list[str]:
    speed = forecast.speed
    if speed is None:
        return []
    stages = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in speed.stages.items())
    return [
        f"speed: {speed.samples_per_s:,.0f} samples/s, {1e3 * speed.step:.2f} ms a step; {speed.bottleneck} is the bottleneck "
        f"(ms alone: {stages})"
    ]


def change_table(name: str, found: list[tuple[str, Forecast]]) -> Table:
    """One line for each value, at most 80 columns wide. Rows missed and bytes moved are per step."""
    table = Table(
        title=f"what if {name} were (rows missed and bytes moved: per step)",
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for heading in (name, "slots", "device", "memory", "missed", "moved", "samples/s", "waits for"):
        table.add_column(heading, justify="right", no_wrap=True)
    for value, one in found:
        figures: list[Any] = [value, _count(one.setting["slots"])]
        if one.problems:
            table.add_row(*figures, *["-"] * 5, "no fit")
            continue
        figures += [in_words(one.bytes_of("device")), in_words(one.bytes_of("memory"))]
        figures.append("-" if one.traffic is None else f"{one.traffic.misses:,.0f}")
        figures.append(in_words(one.bytes_in + one.bytes_out))
        speed = one.speed
        figures += ["-", "-"] if speed is None else [f"{speed.samples_per_s:,.0f}", speed.bottleneck]
        table.add_row(*figures)
    return table


def unfit_text(name: str, found: list[tuple[str, Forecast]]) -> str:
    """Why some values do not fit; "" if all do."""
    lines = [f"{name}={value} does not fit, because {problem}" for value, one in found for problem in one.problems]
    return "\n".join(lines)


def _count(slots: int | None) -> str:
    return "all" if slots is None else f"{slots:,}"


def advice_text(advice: Advice) -> str:
    """The recommendation."""
    cache = f"{advice.option}: {advice.why}"
    return f"recommended: no cache: {advice.whole}. With a cache: {cache}" if advice.whole else f"recommended: {cache}"


def choice_text(choice: Choice) -> str:
    """What was chosen and why, the division of the cache, and what to add to the command."""
    lines = [f"chosen: {one.name}={one.value}: {one.why}" for one in choice.settings]
    if choice.shares is not None:
        lines += _shares_lines(choice.shares)
    if choice.forecast.problems:
        lines.append("chosen: nothing, since no precision fits these budgets")
    else:
        lines.append(f"add to the command: {choice.options or 'nothing'}")
    return "\n".join(lines)


def _shares_lines(shares: Shares) -> list[str]:
    better = "one cache for all tables" if shares.together <= shares.apart else "a cache for every table"
    lines = [
        f"cache by table: {better}. One for all misses {100 * shares.together:.2f} % of the distinct rows of a batch, the "
        f"best division {100 * shares.apart:.2f} % (LRU)"
    ]
    most = sorted(shares.tables, key=lambda one: -one.slots)
    listed = ", ".join(f"{one.name} {one.slots:,} ({100 * one.share:.3g} %)" for one in most[:_TABLES])
    rest = f", and {len(most) - _TABLES} more (--json)" if len(most) > _TABLES else ""
    return [*lines, f"the best division, slots and share of the rows that occur: {listed}{rest}"]
