"""What the page says of tiers and of dynamic ids, and that it says nothing without them."""

import json
import math

import pytest

from hotbed.report.ids import id_charts, ids
from hotbed.report.read import read_run
from hotbed.report.tiers import tier_charts, tiers
from tests.report.conftest import ids_of, tiers_of
from tests.report.test_page import page_of

KIB, MIB = 2**10, 2**20


def changed(run, **changes):
    """The lines of a run, train lines with other `tiers` or `ids`; None takes them away."""
    return {
        **run,
        "metrics.jsonl": [
            {**line, **{name: make(line["step"]) for name, make in changes.items()}}
            if line["kind"] == "train"
            else line
            for line in run["metrics.jsonl"]
        ],
    }


def test_the_page_of_a_run_with_tiers(make_run, tiered_run):
    page = page_of(make_run(**tiered_run))
    order = [name for name in page.ids if name in ("quality", "cache", "tiers", "ids", "data")]
    assert order == ["quality", "cache", "tiers", "ids", "data"]
    asked = 120 * 200
    ssd = sum(200 * 0.5 * math.exp(-step / 30) for step in range(1, 121))
    for words in (
        "What the tiers did",
        f"Of {asked:,} rows that training requested below the device, {100 * (1 - ssd / asked):.1f} % were in memory, and",
        f"{ssd:,.0f} came from the ssd.",
        f"Training read {ssd * 80 / KIB:.1f} KiB from the ssd and wrote {120 * 8000 / KIB:.1f} KiB to it",
        f"{120_000 / KIB:.1f} KiB of that to rewrite files that were mostly stale.",
        f"{120 * 8000 / KIB:.1f} KiB were written to the ssd (wear); compaction ran 12 times.",
        "At the end files took 1.1 MiB of 2.0 MiB (57.2 %), and 75.0 % of their records were live.",
        "Rows in memory and their index took 3.0 MiB of 4.0 MiB; the whole process took 200.1 MiB.",
        "came from memory or ssd",
        "went back to memory or ssd with",
    ):
        assert words in page.text, words
    assert "Compaction lagged behind" not in page.text


def test_the_page_of_a_run_with_dynamic_ids(make_run, tiered_run):
    page = page_of(make_run(**tiered_run))
    for words in (
        "Dynamic ids",
        "24,000 lookups of training gave rows to 1,203 ids of the 2 tables without a vocabulary",
        "963 ids have one now",
        "240 ids lost their row because they were not used.",
        "10.0 % of the lookups of training came before their id was admitted",
        "Dynamic ids by feature, most rows first",
        "user12,0001,2002,400240960",
        "ad12,0003003",
    ):
        assert words in page.text, words


def test_without_them_there_is_no_section(make_run, cached_run):
    run = read_run(make_run(**cached_run))
    assert (tiers(run), ids(run)) == ("", "")
    page = page_of(make_run(**cached_run))
    assert not {"tiers", "ids"} & set(page.ids)
    assert "memory or ssd" not in page.text


def test_every_chart_has_its_points(make_run, tiered_run):
    run = read_run(make_run(**tiered_run))
    found = {chart.identifier: chart for chart in [*tier_charts(run), *id_charts(run)]}
    assert {name: [one.name for one in chart.series] for name, chart in found.items()} == {
        "tier-hits": ["on the device", "in memory, of the others"],
        "tier-rows": ["from memory", "from the ssd", "to the ssd"],
        "tier-bytes": ["from memory", "read from the ssd", "written to the ssd", "of that by compaction"],
        "tier-wear": ["written"],
        "tier-ssd": ["files", "live rows"],
        "tier-memory": ["rows and their index", "growth of the process"],
        "id-rows": ["all", "user", "ad"],
        "id-changes": ["admitted", "expired"],
        "id-rejected": ["share of lookups"],
    }
    assert all(len(one.points) == 120 for chart in found.values() for one in chart.series)
    assert [mark.label for mark in found["tier-ssd"].y_marks] == ["cap 2.0\u202fMiB"]
    assert found["tier-ssd"].y_marks[0].value == 2
    assert found["tier-ssd"].series[0].points[-1] == (12_000, 1_200_000 / MIB)
    assert found["tier-memory"].series[1].points[-1] == (12_000, 119_000 / MIB)
    assert found["tier-wear"].y_label == "KiB"
    assert found["id-rows"].series[0].points[-1] == (12_000, 963)
    assert {y for _, y in found["id-rejected"].series[0].points} == {0.1}


def test_processes_are_added_up(make_run, tiered_run):
    """A run that was stopped after step 50 and went on: its counters began anew."""
    again = changed(
        tiered_run,
        tiers=lambda n: (
            tiers_of(n) if n <= 50 else tiers_of(n, wear=(n - 50) * 8000, resident_bytes=MIB, compactions=0)
        ),
    )
    charts = {chart.identifier: chart for chart in tier_charts(read_run(make_run(**again)))}
    wear = [y for _, y in charts["tier-wear"].series[0].points]
    assert wear == pytest.approx([step * 8000 / KIB for step in range(1, 121)])
    assert [y for _, y in charts["tier-memory"].series[1].points][50:] == [0] * 70
    assert "compaction ran 5 times" in page_of(make_run(**again)).text


def test_memory_that_is_the_cache(make_run, tiered_run):
    alone = changed(
        tiered_run, tiers=lambda n: tiers_of(n, memory_slots=0, memory_hit_rate=None, from_memory=0, live_share=0.4)
    )
    page = page_of(make_run(**alone))
    assert "Memory is the cache of this run." in page.text
    assert "came from the ssd (" in page.text
    assert "Compaction lagged behind." in page.text


@pytest.mark.parametrize("hollow", [None, "much", [1], math.nan])
def test_numbers_that_are_unknown_are_not_told(make_run, tiered_run, hollow):
    spoiled = changed(
        tiered_run,
        tiers=lambda n: dict.fromkeys(tiers_of(n), hollow),
        ids=lambda n: {"user": dict.fromkeys(ids_of(n)["user"], hollow), "ad": hollow},
    )
    packed = "".join(json.dumps(line) + "\n" for line in spoiled["metrics.jsonl"]).encode()
    page = page_of(make_run(**{"metrics.jsonl": packed}))
    assert "nan" not in page.text.lower()
    for words in (
        "requested below the device,",
        "Training read",
        "was written",
        "At the end files",
        "ids have one now",
    ):
        assert words not in page.text, words


def test_many_features_and_odd_names(make_run, tiered_run):
    many = changed(tiered_run, ids=lambda n: {f"<b>{k}": ids_of(n)["user"] | {"rows": k} for k in range(30)})
    page = page_of(make_run(**many))
    assert "<b>29" in page.text
    assert "18 more features" in page.text
    one = page_of(make_run(**changed(tiered_run, ids=lambda n: {"user": ids_of(n)["user"]})))
    assert "ids of the table without a vocabulary" in one.text
