"""The rows of benchmarks/kstep.py in, Markdown tables for docs/kstep.md and one SVG out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

Row = dict[str, str]
LINES = {  # of one rule: its name on the page, its colour
    ("params", "1"): ("params", "#2463a8"),
    ("moments", "1"): ("moments", "#c2571a"),
    ("shared_v", "1"): ("shared_v", "#2f8052"),
    ("frozen_v", "1"): ("frozen_v", "#b8336a"),
    ("params", "0"): ("params, lr not scaled", "#7a7a7a"),
}
WIDTH, HEIGHT, GAP = 250, 210, 62  # of a panel, and between panels
BAR = 0.001  # of AUC
BANDWIDTH, LATENCY = 12.5e6, 0.5e-3  # bytes per second and seconds per hop of the slow wire: 100 Mb/s


class Point(NamedTuple):
    """One k of one line."""

    k: int
    y: float
    spread: float = 0.0


def write_page(auc: Sequence[Row], timed: Sequence[Row], path: Path) -> str:
    """The plot to `path`; the tables as text."""
    data = list(dict.fromkeys(row["data"] for row in auc))
    panels = [_panel(f"{name}: AUC - synchronous", _changes(auc, name), marks=(BAR, 0.0, -BAR)) for name in data]
    panels.append(_panel("ms per step, 100 Mb/s", _times(timed), marks=(0.0,)))
    path.write_text(_svg(panels))
    return "\n\n".join([*(_auc_table(auc, name) for name in data), _time_table(timed)])


def _pick(rows: Sequence[Row], **wanted: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _change(rows: Sequence[Row], data: str, key: tuple[str, str], k: str) -> list[float]:
    """AUC less that of synchronous training with the same seed."""
    base = {row["seed"]: float(row["auc"]) for row in _pick(rows, data=data, k="1")}
    found = _pick(rows, data=data, rule=key[0], scale_lr=key[1], k=k)
    return [float(row["auc"]) - base[row["seed"]] for row in found]


def _ks(rows: Sequence[Row]) -> list[str]:
    return sorted({row["k"] for row in rows if row["k"] != "1"}, key=int)


def _changes(rows: Sequence[Row], data: str) -> dict[tuple[str, str], list[Point]]:
    lines = {}
    for key in LINES:
        changes = [(int(k), _change(rows, data, key, k)) for k in _ks(rows)]
        points = [Point(k, statistics.mean(c), (max(c) - min(c)) / 2) for k, c in changes if c]
        lines[key] = [Point(1, 0.0), *points]
    return lines


def _times(rows: Sequence[Row]) -> dict[tuple[str, str], list[Point]]:
    """Overlapped, of each rule; and of "params" when it is waited for, in the place of the rates that are not scaled."""
    slow = _pick(rows, wire="slow")
    start = [Point(1, float(row["ms_per_step"])) for row in _pick(slow, k="1")]
    lines = {}
    for key in LINES:
        found = _pick(slow, rule=key[0], overlap=key[1])
        lines[key] = start + sorted(Point(int(row["k"]), float(row["ms_per_step"])) for row in found if row["k"] != "1")
    return lines


def _auc_table(rows: Sequence[Row], data: str) -> str:
    base = [float(row["auc"]) for row in _pick(rows, data=data, k="1")]
    dense = int(_pick(rows, data=data, k="1")[0]["dense_bytes_per_step"])
    lines = [
        f"| {data}: rule | k | AUC, mean of {len(base)} seeds | change | by seed | dense bytes per step | of synchronous |",
        "|---|---|---|---|---|---|---|",
        f"| synchronous | 1 | {statistics.mean(base):.5f} | | | {dense:,} | 1 |",
    ]
    for key, (name, _) in LINES.items():
        for k in _ks(rows):
            changes = _change(rows, data, key, k)
            if not changes:
                continue
            found = _pick(rows, data=data, rule=key[0], scale_lr=key[1], k=k)
            sent = int(found[0]["dense_bytes_per_step"])
            mean = statistics.mean(float(row["auc"]) for row in found)
            each = ", ".join(f"{change:+.5f}" for change in changes)
            lines.append(
                f"| {name} | {k} | {mean:.5f} | {statistics.mean(changes):+.5f} | {each} | {sent:,} | 1 / {dense / sent:.1f} |"
            )
    return "\n".join(lines)


def _time_table(rows: Sequence[Row]) -> str:
    lines = [
        "| rule | k | overlap | dense bytes per step | ms of wire per step | ms per step over it | without it |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _pick(rows, wire="slow"):
        twin = _pick(rows, wire="none", rule=row["rule"], k=row["k"], overlap=row["overlap"])
        free = float(twin[0]["ms_per_step"]) if twin else float("nan")
        slow, overlap = float(row["ms_per_step"]), "yes" if row["overlap"] == "1" else "no"
        sent, num_hops = int(row["dense_bytes_per_step"]), 2 * (int(row["ranks"]) - 1)
        wire = 1e3 * (sent / BANDWIDTH + num_hops * LATENCY / int(row["k"]))
        lines.append(f"| {row['rule']} | {row['k']} | {overlap} | {sent:,} | {wire:.1f} | {slow:.1f} | {free:.1f} |")
    return "\n".join(lines)


def _panel(title: str, lines: dict[tuple[str, str], list[Point]], marks: Sequence[float]) -> str:
    points = [point for line in lines.values() for point in line]
    low = min([*(p.y - p.spread for p in points), *marks])
    high = max([*(p.y + p.spread for p in points), *marks])
    ks = sorted({p.k for p in points})
    place: dict[int, float] = {k: WIDTH * (i + 0.5) / len(ks) for i, k in enumerate(ks)}

    def at(y: float) -> float:
        return 24 + (HEIGHT - 48) * (high - y) / (high - low or 1.0)

    parts = [f'<text x="0" y="10" class="title">{title}</text>']
    parts += [f'<text x="{place[k]:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{k}</text>' for k in ks]
    for value in sorted({*marks, low, high}) if len(marks) == 1 else marks:
        label = f"{value:+.3f}" if len(marks) > 1 else f"{value:.0f}"
        parts.append(f'<path d="M0 {at(value):.1f}H{WIDTH}" class="mark"/>')
        parts.append(f'<text x="-5" y="{at(value) + 4:.1f}" text-anchor="end">{label}</text>')
    for number, (key, line) in enumerate(lines.items()):
        parts.append(_line(line, LINES[key][1], lambda p, n=number: (place[p.k] + 3 * n - 4.5, at(p.y)), at))
    return "".join(parts)


def _line(
    line: Sequence[Point], color: str, where: Callable[[Point], tuple[float, float]], at: Callable[[float], float]
) -> str:
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(where, line))
    parts = [f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="1.5"/>']
    for point in line:
        x, y = where(point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>')
        if point.spread:
            top, bottom = at(point.y + point.spread), at(point.y - point.spread)
            parts.append(f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="{color}"/>')
    return "".join(parts)


def _svg(panels: Sequence[str]) -> str:
    width, height = len(panels) * (WIDTH + GAP) + 10, HEIGHT + 46
    style = "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.mark{stroke:#ccc;stroke-dasharray:3 3}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({GAP - 12 + number * (WIDTH + GAP)} 8)">{panel}</g>')
    for number, (name, color) in enumerate(LINES.values()):
        x, y = GAP - 12 + number * 170, HEIGHT + 32
        label = f"{name} (right: waited for)" if number == len(LINES) - 1 else name
        parts.append(
            f'<circle cx="{x + 4}" cy="{y - 4}" r="4" fill="{color}"/><text x="{x + 14}" y="{y}">{label}</text>'
        )
    return "".join([*parts, "</svg>\n"])
