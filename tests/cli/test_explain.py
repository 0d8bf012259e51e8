"""`hotbed explain` from the outside."""

import json

import pytest

from tests.data.small import make_dataset

SMALL = ("--set", "data.batch_size=16", "--set", "model.dim=4", "--set", "model.options.hidden=[8]", "--device", "cpu")


@pytest.fixture
def run(hotbed, tmp_path):
    make_dataset(tmp_path / "data", {"train": [200], "valid": [30]}, bags=True)
    given = ("--data", tmp_path / "data", "--cache", "0.3", "--out", tmp_path / "run", "--watch-rows", "a=7,tags=3")
    result = hotbed("train", *given, *SMALL, "--quiet", "--no-forecast")
    assert result.code == 0, result.err
    return tmp_path / "run"


def test_the_story_of_a_row(hotbed, run):
    told = hotbed("explain", run, "--table", "tags", "--id", 3)
    assert told.code == 0, told.err
    for word in ("where", "holds", "gradient last of norm", "used", "moved", "next"):
        assert f"  {word}" in told.out
    found = json.loads(hotbed("explain", run, "--table", "tags", "--id", 3, "--json").out)
    assert found["history"]["agreement"] == 1.0
    assert found["gradient"]["updates"] == found["uses"]["batches"]
    assert found["gradient"]["step"] == found["uses"]["last_step"]
    rows = json.loads(hotbed("explain", run, "--table", "tags", "--top", 2, "--json").out)["rows"]
    assert rows[0]["lookups"] >= rows[1]["lookups"] > 0
    assert "rows of a" in hotbed("explain", run, "--table", "a", "--top", 2, "--by", "evictions").out


def test_words_are_sentences(hotbed, run):
    rows = json.loads(hotbed("explain", run, "--table", "a", "--top", 5, "--json").out)["rows"]
    told = [hotbed("explain", run, "--table", "a", "--id", row["id"]).out for row in rows]
    scored = [one for one in told if "  score" in one]
    assert scored, "no row among those used most is in the cache"
    assert "by the policy oracle; the lowest scores leave first" in scored[0]
    assert "a window usually evicts rows up to" in scored[0]
    assert "by step: " in scored[0]
    assert not any(odd in one for one in told for odd in ("by key", "as usual"))
    assert "a 0 (values that train does not have)" in hotbed("explain", run, "--table", "a", "--id", 0).out


def test_wrong_questions(hotbed, run):
    for options, said in (
        (("--table", "colour", "--id", 1), "Its tables are: a, b, tags"),
        (("--table", "a", "--id", 5000), "rows 0 to 999"),
        (("--table", "a", "--id", "u7"), "use --value u7"),
        (("--table", "a"), "give one of --id"),
        (("--table", "a", "--top", 3, "--id", 1), "leave out --id"),
        (("--table", "a", "--top", 0), "at least 1 row"),
        (("--table", "a", "--top", 3, "--by", "age"), "uses or evictions"),
    ):
        result = hotbed("explain", run, *options)
        assert result.code in (1, 2)
        assert said in result.err
