"""The registry of the papers' claims: complete, its page current, and the checks that need one process hold."""

import importlib.util
import sys
from pathlib import Path

import pytest

from benchmarks.papers import __main__ as command
from benchmarks.papers import page, quick
from benchmarks.papers.claims import CLAIMS, PAPERS
from benchmarks.papers.evidence import Evidence, Missing, find

DOCS = Path(__file__).parents[2] / "docs"
VERDICTS = ("reproduced", "shape reproduced", "not reproduced", "not reproducible here", "not measured", "not built")


def test_every_claim_is_whole():
    assert len(CLAIMS) >= 30
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.paper for claim in CLAIMS} == set(PAPERS)
    known = {**quick.ALONE, **quick.WITH_PROCESSES, **quick.WITH_ROOT}
    assert {claim.quick for claim in CLAIMS if claim.quick} == set(known)
    for claim in CLAIMS:
        found = claim.evidence()
        assert all((claim.shows, claim.theirs, claim.command)), claim.key
        assert found.verdict in VERDICTS
        assert found.ours or found.why, claim.key
        assert bool(found.ours) == bool(found.where), claim.key


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_a_claim_without_a_number_says_so(claim):
    """Nothing that was not measured counts as reproduced."""
    if not claim.evidence().ours:
        assert isinstance(claim.evidence, Missing)
        assert "reproduced" not in claim.evidence.verdict


@pytest.mark.parametrize("text", sorted({claim.command for claim in CLAIMS}))
def test_commands_exist(text):
    name = text.split()[2]
    assert text.startswith("python -m ")
    assert importlib.util.find_spec(name)


def test_the_page_is_current():
    """`python -m benchmarks.papers --write` changes nothing."""
    assert (DOCS / "papers.md").read_text() == page.write_page()
    assert (DOCS / "papers.svg").read_text() == page.draw()


@pytest.mark.parametrize("name", quick.ALONE)
def test_quick(name):
    """The smallest form of --quick: no other processes."""
    assert quick.ALONE[name]()


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["papers"])
    command.main()
    assert len(capsys.readouterr().out.splitlines()) == len(CLAIMS)
    monkeypatch.setattr(sys, "argv", ["papers", "--quick", "--only", "duplicates,kstep_bytes"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["duplicates", "kstep_bytes"]
    monkeypatch.setattr(sys, "argv", ["papers", "--quick", "--only", "nothing"])
    with pytest.raises(SystemExit, match="no such checks here: nothing; there are cache_is_invisible"):
        command.main()


def test_a_check_that_fails_is_reported(capsys):
    def broken() -> str:
        raise AssertionError("1 is not 2")

    assert command.run_checks({"broken": broken, "duplicates": quick.duplicates}) == 1
    assert "broken: DOES NOT HOLD: 1 is not 2" in capsys.readouterr().out


def test_a_row_that_is_missing_is_named():
    with pytest.raises(AssertionError, match=r"wire.csv has no row with \{'trace': 'none'\}"):
        find("wire", trace="none")
    assert Evidence("", "", "not built").why == ""
