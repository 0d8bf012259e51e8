"""Figures: what is drawn, how many points, and what cannot be drawn."""

import json
import math
import re

import pytest

from hotbed.report.charts import BOTTOM, LEFT, RIGHT, TOP, Chart, ReferenceLine, Series, figure


def chart(*series, **options):
    return Chart("c", "Loss", "A caption.", "samples seen", "nats", series, **options)


def payload(html):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html)[1])


def paths(html, kind="curve"):
    """The drawn pieces of curves inside series groups, as lists of points."""
    found = re.findall(rf'<path class="{kind}" d="((?:[ML][-\d.]+ [-\d.]+)+)"/>', html.split("</ul>")[-1])
    return [[tuple(map(float, p.split())) for p in re.split("[ML]", d) if p] for d in found]


def test_a_line_ends_where_its_values_are():
    html = figure(chart(Series("loss", [(k * 10, 0.5 + 0.1 * k) for k in range(6)], 1)))
    ((*points,),) = paths(html)
    assert points[0] == (LEFT, BOTTOM)
    assert points[-1] == (RIGHT, TOP)
    assert len(points) == 6
    assert html.count("<circle") == 6
    assert payload(html)["series"][0]["points"][2] == [20, 0.7]


def test_counts_keep_all_digits():
    html = figure(chart(Series("loss", [(1_077_248, 1 / 3)], 1)))
    assert payload(html)["series"][0]["points"] == [[1_077_248, 0.333333]]


def test_very_long_series_are_thinned_to_a_thousand_points_with_their_extremes():
    values = [(k, math.sin(k / 900)) for k in range(50_000)]
    values[31_337] = (31_337, 5.0)
    html = figure(chart(Series("loss", values, 1)))
    (points,) = paths(html)
    assert len(points) <= 1000
    assert payload(html)["y"][1] >= 5.0
    assert [31_337, 5.0] in payload(html)["series"][0]["points"]
    assert html.count("<circle") == 0
    assert len(html) < 80_000


def test_nan_and_infinity_break_the_line_and_stay_out_of_the_numbers():
    values = [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 3.0), (5, 2.0), (6, 1e200)]
    html = figure(chart(Series("loss", values, 1)))
    d = re.search(r'class="curve" d="([^"]*)"', html)[1]
    assert d.count("M") == 2
    assert d.count("L") == 2
    points = payload(html)["series"][0]["points"]
    assert [x for x, y in points if y is not None] == [0, 1, 4, 5]
    assert "nan" not in html.lower().replace("nats", "")


def test_a_point_between_gaps_is_a_dot_in_a_long_line():
    points = [(float(x), 1.0 if x == 100 or x > 150 else math.nan) for x in range(200)]
    found = figure(chart(Series("a", points, 1)))
    assert found.count("<circle") == 1


@pytest.mark.parametrize("value", [0.5, 0.0, -3.0, 1e-300])
def test_one_point_is_a_dot(value):
    html = figure(chart(Series("loss", [(100, value)], 1)))
    assert html.count("<circle") == 1
    assert '<path class="curve"' not in html
    assert 'r="3.5"' in html


@pytest.mark.parametrize("series", [(), (Series("a", [], 1),), (Series("a", [(1, math.nan)], 1),)])
def test_nothing_to_draw_is_said(series):
    html = figure(chart(*series))
    assert "No values were recorded." in html
    assert "<svg" not in html


def test_faint_noise_does_not_set_the_frame_but_is_told():
    noise = [(k, 9.0 if k == 3 else 0.5 + 0.01 * (k % 2)) for k in range(200)]
    html = figure(chart(Series("raw", noise, 1, "faint"), Series("smoothed", [(k, 0.5) for k in range(200)], 1)))
    assert payload(html)["y"][1] < 1
    assert "Single values run from 0.5000 to 9.0000; the rarest lie outside the frame." in html


def test_marks_lie_inside_the_frame_with_their_label():
    html = figure(chart(Series("auc", [(0, 0.6), (9, 0.7)], 1), y_marks=(ReferenceLine(0.79, "best <possible>"),)))
    assert payload(html)["y"][1] >= 0.79
    assert "best &lt;possible&gt;" in html
    html = figure(chart(Series("s", [(0.001, 0.1), (1, 1)], 1), x_marks=(ReferenceLine(0.015, "1.5 %"),), log_x=True))
    x = float(re.search(r'class="mark" d="M([\d.]+)', html)[1])
    assert x == pytest.approx(LEFT + (RIGHT - LEFT) * math.log(15) / math.log(1000), abs=0.1)


def test_error_bars_and_diagonal():
    dots = Series("share", [(0.1, 0.12), (0.5, 0.45)], 1, "dots", spread=(0.02, 0.0))
    html = figure(chart(dots, x_format="share", y_format="share", zero=True, diagonal="perfect"))
    assert html.count('class="spread"') == 1
    assert "perfect" in html
    assert html.count("<circle") == 2


def test_the_table_says_what_the_plot_shows():
    raw = [(k, k / 100) for k in range(100)]
    html = figure(chart(Series("raw", raw, 1, "faint"), Series("valid", [(50, 0.25), (99, math.nan)], 2)))
    rows = re.findall(r"<tr><th scope=\"row\">(\d+)</th><td>(.*?)</td><td>(.*?)</td></tr>", html)
    assert len(rows) <= 42
    assert rows[0] == ("0", "0.0000", "")
    assert ("99", "0.9900", "–") in rows
    assert any(row[0] == "50" and row[2] == "0.2500" for row in rows)


def test_the_drawing_is_named_for_those_who_cannot_see_it():
    html = figure(chart(Series("loss", [(0, 0.7), (900, 0.4)], 1)))
    assert 'role="img" aria-label="Loss over samples seen. loss from 0.7000 at 0 to 0.4000 at 900."' in html


def test_names_are_escaped_everywhere():
    html = figure(chart(Series("</script><script>alert(1)</script>", [(0, 1.0)], 1), Series('"&', [(0, 1.0)], 2)))
    assert "<script>alert" not in html
    assert html.count("</script>") == 1
    assert payload(html)["series"][1]["name"] == '"&'
