"""An outlook as text: tables of bytes, a few lines on traffic and speed, what-if tables, a recommendation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from hotbed.host.memory import in_words

if TYPE_CHECKING:
    from hotbed.forecast.forecast import Outlook
    from hotbed.forecast.what_if import Advice


def parts_table(outlook: Outlook) -> Table:
    """Bytes of every tier."""
    setting = outlook.setting
    title = f"{setting['model']} on {setting['data']}: {setting['rows']:,} rows of {setting['record_bytes']} bytes"
    table = Table(title=title, title_justify="left")
    for heading, justify in (("tier", "left"), ("what", "left"), ("bytes", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for tier in ("device", "memory", "ssd"):
        parts = [part for part in outlook.parts if part.tier == tier]
        for number, part in enumerate(parts):
            table.add_row(
                tier if not number else "", part.name, in_words(part.num_bytes), "exact" if part.exact else "estimate"
            )
        if parts:
            table.add_row("", "in all", in_words(outlook.bytes_of(tier)), "", style="bold", end_section=True)
    return table


def outlook_text(outlook: Outlook) -> str:
    """Traffic and speed, in a few lines."""
    return "\n".join([*_traffic_lines(outlook), *_speed_lines(outlook), *outlook.notes])


def _traffic_lines(outlook: Outlook) -> list[str]:
    traffic = outlook.traffic
    if traffic is None:
        return [] if outlook.problems else ["every row is on the device: nothing is moved"]
    lines = [
        f"cache: {outlook.setting['slots']:,} slots hit {100 * traffic.hit_rate:.2f} % of the distinct rows of a window, "
        f"{100 * traffic.lookup_hit_rate:.2f} % of the look-ups",
        _cache_bytes(outlook),
        f"a step: {traffic.misses:,.0f} rows missed, {traffic.created:,.0f} of them new; "
        f"{in_words(outlook.bytes_in)} to the device, {in_words(outlook.bytes_out)} back",
    ]
    if traffic.memory_hit_rate is not None:
        lines.append(
            f"memory: has {100 * traffic.memory_hit_rate:.1f} % of the rows asked below the device; ssd: "
            f"{in_words(traffic.from_ssd * outlook.record)} read and {in_words(traffic.to_ssd * outlook.record)} written a step"
        )
    if outlook.wires is not None:
        wires = outlook.wires
        lines.append(
            f"network: a rank sends {in_words(wires.in_node)} in the node and {in_words(wires.across)} across nodes a step; "
            f"{1e3 * wires.seconds:.2f} ms of it are waited for (projected)"
        )
    return lines


def _cache_bytes(outlook: Outlook) -> str:
    """Rows and index apart; and what no cache would take, where that is less."""
    rows, index = (
        sum(part.num_bytes for part in outlook.parts if part.name == name)
        for name in ("rows in the cache", "index of the cache")
    )
    text = f"cache: {in_words(rows)} of rows, {in_words(index)} of index that finds them and those of the batches ahead"
    whole = outlook.setting["rows"] // outlook.setting["world"] * outlook.record
    if whole and rows + index > whole:
        text += f"; all rows without a cache take less, {in_words(whole)}: leave out --cache or --hbm"
    return text


def _speed_lines(outlook: Outlook) -> list[str]:
    speed = outlook.speed
    if speed is None:
        return []
    stages = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in speed.stages.items())
    return [
        f"speed: {speed.samples_per_s:,.0f} samples/s, {1e3 * speed.step:.2f} ms a step; {speed.bottleneck} is what the others "
        f"wait for (ms alone: {stages})"
    ]


def change_table(name: str, found: list[tuple[str, Outlook]]) -> Table:
    """One line for each value; 80 columns are enough. Rows missed and bytes moved are those of a step."""
    table = Table(
        title=f"what if {name} were (rows missed and bytes moved: of a step)",
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


def unfit_text(name: str, found: list[tuple[str, Outlook]]) -> str:
    """Why some values do not fit; "" where all do."""
    told = [f"{name}={value} does not fit, because {problem}" for value, one in found for problem in one.problems]
    return "\n".join(told)


def _count(slots: int | None) -> str:
    return "all" if slots is None else f"{slots:,}"


def advice_text(advice: Advice) -> str:
    """What to take."""
    cache = f"{advice.option}: {advice.why}"
    return f"recommended: no cache: {advice.whole}. With a cache: {cache}" if advice.whole else f"recommended: {cache}"
