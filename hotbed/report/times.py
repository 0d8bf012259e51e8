"""A run -> how its steps spend their time: a sentence, a table of the parts, two charts; nothing without a clock.

Times are means over the steps of an interval. On a CPU the training thread does the work, and its parts add up to the step.
On CUDA it only launches kernels: there a step consists of the parts of the training stream, measured on a sample of the steps,
and the parts of the thread show whether it keeps up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hotbed.report.charts import Chart, Series, figure
from hotbed.report.curves import over_samples
from hotbed.report.formats import MISSING, bar, milliseconds, percent, section, table
from hotbed.report.points import StepParts, TimesPoint, usable
from hotbed.report.read import RunRecord

WORDS = {
    "reader": ("reader", "waiting for the next batch to be read"),
    "plan": ("plan", "choosing slots for the rows of the batches ahead"),
    "wait": ("stall", "waiting for rows in transfer"),
    "copy": ("copy", "rows leave their slots and others take them"),
    "look_up": ("lookup", "rows become vectors"),
    "model": ("model", "forward, loss and backward"),
    "update": ("update", "gradients are summed per row, and rows are updated"),
    "dense": ("dense update", "the dense weights move"),
    "other": ("other", "between steps: rates, lines of the log"),
}
CURVES = 5  # parts drawn alone
MANY = 4  # intervals
SLOW_READER = 0.1  # of the time
MILLI = 1e3


def times(run: RunRecord) -> str:
    """The section, or nothing."""
    points = without_warmup([point.times for point in run.train if point.times])
    thread = mean_parts(points, lambda one: one.thread)
    if thread is None:
        return ""
    device = mean_parts(points, lambda one: one.device)
    charts = "".join(figure(chart) for chart in time_charts(run))
    listed = f'<div class="figures"><div>{_table(thread, device)}</div><div>{charts}</div></div>'
    return section("times", "Where the time goes", _said(thread, device), listed)


def without_warmup(points: list[TimesPoint]) -> list[TimesPoint]:
    """Without the first interval, in which kernels are compiled and buffers filled, if there are enough others."""
    return points[1:] if len(points) > MANY else points


def mean_parts(points: list[TimesPoint], of: Callable[[TimesPoint], StepParts | None]) -> StepParts | None:
    """Seconds of a mean step over all intervals; None if unknown."""
    known = [(of(point), point.steps) for point in points if usable(point.steps) and point.steps > 0]
    weighed = [(parts, steps) for parts, steps in known if parts is not None and all(map(usable, parts))]
    total = sum(steps for _, steps in weighed)
    if total <= 0:
        return None
    return StepParts(
        *(sum(parts[k] * steps for parts, steps in weighed) / total for k in range(len(StepParts._fields)))
    )


def time_charts(run: RunRecord) -> list[Chart]:
    """What a step took, and how many batches the reader had ready, over samples seen."""
    points = [(point.samples, point.times) for point in run.train if point.times]
    on_device = any(point.device for _, point in points)
    found = [(x, point.device if on_device else point.thread) for x, point in points]
    drawn = [(x, parts) for x, parts in found if parts is not None]
    mean = mean_parts(
        without_warmup([point for _, point in points]), lambda one: one.device if on_device else one.thread
    )
    shown = sorted(StepParts._fields, key=lambda name: -(getattr(mean, name) if mean else 0.0))[:CURVES]
    shown = [name for name in shown if mean is not None and getattr(mean, name) > 0]
    rest = [name for name in StepParts._fields if name not in shown]
    lines = [
        Series(WORDS[name][0], [(x, MILLI * getattr(parts, name)) for x, parts in drawn], color)
        for color, name in enumerate(shown, start=1)
    ]
    others = [(x, MILLI * sum(getattr(parts, name) for name in rest)) for x, parts in drawn]
    where = "the CUDA stream that trains, sampled" if on_device else "the thread that trains"
    return [
        over_samples(
            run,
            "step-parts",
            "Parts of a step",
            f"Time of a mean step of {where}; the {len(shown)} largest parts, and the rest together.",
            "ms per step",
            (*lines, Series("the rest", others, CURVES + 1)),
            y_format="significant",
            zero=True,
            robust=True,
        ),
        over_samples(
            run,
            "reader-queue",
            "Batches ready",
            "Batches that were ready when training needed the next one. Near zero, training waits for the reader: more "
            "data.threads or a faster disk help.",
            "batches",
            (Series("ready", [(x, point.ready) for x, point in points], 3),),
            y_format="significant",
            zero=True,
        ),
    ]


def _said(thread: StepParts, device: StepParts | None) -> str:
    step = device or thread
    total = sum(step)
    if not total > 0:
        return ""
    largest = max(StepParts._fields, key=lambda name: getattr(step, name))
    name, about = WORDS[largest]
    said = (
        f'<p class="finding">A step took {milliseconds(total)} on average, once kernels were loaded. '
        f"<strong>{percent(getattr(step, largest) / total)} of it was {name}</strong>: {about}.</p>"
    )
    if thread.reader > SLOW_READER * sum(thread):
        said += (
            f"<p>Training waited {percent(thread.reader / sum(thread))} of its time for batches to be read. More reader "
            "threads (<code>data.threads</code>) or larger batches help, if there are cores to spare.</p>"
        )
    return said


def _table(thread: StepParts, device: StepParts | None) -> str:
    head = ["part", "ms per step", "share"]
    columns: list[StepParts | None] = [device, thread] if device is not None else [thread]
    if device is not None:
        head = ["part", "stream<small>ms per step</small>", "share", "thread<small>ms per step</small>"]
    main = columns[0]
    assert main is not None, "one of the two is known"
    total = sum(main)
    rows = []
    for name, (word, about) in WORDS.items():
        mine = getattr(main, name)
        cells = [f"{word}<small>{about}</small>", _ms(mine), bar(mine / total if total > 0 else math.nan)]
        rows.append([*cells, _ms(getattr(thread, name))] if device is not None else cells)
    ends = ["together", _ms(total), ""]
    rows.append([*ends, _ms(sum(thread))] if device is not None else ends)
    return table("A mean step", head, rows, kind="wide")


def _ms(seconds: float) -> str:
    return f"{MILLI * seconds:.3f}" if usable(seconds) else MISSING
