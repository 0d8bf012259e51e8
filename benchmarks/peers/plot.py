"""AUC over seconds in, one SVG out; its colours follow the reader's light or dark setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

COLOURS = {"hotbed": "#c2571a", "fuxictr": "#2f77c0", "deepctr": "#3d9463"}
NAMES = {"hotbed": "hotbed", "fuxictr": "FuxiCTR", "deepctr": "DeepCTR-Torch"}
WIDTH, HEIGHT, GAP_X, GAP_Y = 300, 150, 70, 60  # of a panel, and between panels
STYLE = (
    "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.axis{stroke:#999}"
    ".target{stroke:#999;stroke-dasharray:4 3}.paper{fill:#fff}polyline{fill:none;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.paper{fill:#131416}.axis,.target{stroke:#777}}"
)


class Line(NamedTuple):
    """One system's run."""

    system: str
    points: Sequence[tuple[float, float]]  # seconds, AUC


def write_plot(panels: Mapping[str, Sequence[Line]], targets: Mapping[str, float]) -> str:
    """Two panels in a row."""
    rows = -(-len(panels) // 2)
    width, height = 2 * (WIDTH + GAP_X) + 20, rows * (HEIGHT + GAP_Y) + 20
    parts = []
    for i, (name, lines) in enumerate(panels.items()):
        x, y = 60 + i % 2 * (WIDTH + GAP_X), 26 + i // 2 * (HEIGHT + GAP_Y)
        parts.append(f'<g transform="translate({x} {y})">{_panel(name, lines, targets[name])}</g>')
    label = "Valid AUC over seconds of training, one panel for each dataset and model"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f'<style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _panel(name: str, lines: Sequence[Line], target: float) -> str:
    most_x = max(x for line in lines for x, _ in line.points)
    ys = [y for line in lines for _, y in line.points if y > target - 0.05] + [target]
    low, high = min(ys), max(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        return round(x / most_x * WIDTH, 1), round(HEIGHT * (1 - (y - low) / ((high - low) or 1)), 1)

    parts = [f'<text class="title" x="0" y="-10">{name}</text>']
    parts.append(f'<path class="axis" fill="none" d="M0 0V{HEIGHT}H{WIDTH}"/>')
    parts.append(f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{most_x:.1f} s</text>')
    parts.append(f'<text x="-6" y="4" text-anchor="end">{high:.3f}</text>')
    parts.append(f'<text x="-6" y="{HEIGHT}" text-anchor="end">{low:.3f}</text>')
    _, height = at(0, target)
    parts.append(f'<path class="target" d="M0 {height}H{WIDTH}"/>')
    parts.append(f'<text x="{WIDTH}" y="{height - 4}" text-anchor="end">target {target}</text>')
    for i, line in enumerate(lines):
        shown = " ".join("{},{}".format(*at(x, y)) for x, y in line.points if y >= low)
        parts.append(f'<polyline stroke="{COLOURS[line.system]}" points="{shown}"/>')
        where = f'x="{i * 95}" y="{HEIGHT + 28}"'
        parts.append(f'<text {where} style="fill:{COLOURS[line.system]}">{NAMES[line.system]}</text>')
    return "".join(parts)
