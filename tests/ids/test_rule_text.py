import pytest

from hotbed.errors import ConfigError
from hotbed.ids import Admit, Expire, TableRules
from hotbed.ids.rules import RuleArrays, parse_admit, parse_expire


def test_tables_are_swept_before_every_so_many_batches():
    rules = RuleArrays([TableRules(None, Expire(unused_steps=9, every=every)) for every in (1, 3)] + [TableRules()])
    assert [rules.due(batch).tolist() for batch in (2, 3)] == [[True, False, False], [True, True, False]]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", None),
        ("after 3", Admit(after=3)),
        ("  after   100_000 ,sketch 64MiB", Admit(after=100_000, sketch="64MiB")),
        ("sketch 1 GiB, after 2", Admit(after=2, sketch="1 GiB")),
        ("probability 0.1", Admit(probability=0.1)),
        ("probability 1e-3", Admit(probability=0.001)),
    ],
)
def test_admit(text, rule):
    assert parse_admit(text) == rule


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", None),
        ("unused 100000 steps", Expire(unused_steps=100_000)),
        ("unused 1 step", Expire(unused_steps=1)),
        ("unused 7d, every 500", Expire(unused="7d", every=500)),
        ("score below 0.5, half-life 10_000", Expire(score_below=0.5, half_life=10_000)),
        ("half-life 9, every 2, score below 1", Expire(score_below=1.0, half_life=9, every=2)),
    ],
)
def test_expire(text, rule):
    assert parse_expire(text) == rule


@pytest.mark.parametrize(
    ("parse", "text", "told"),
    [
        (parse_admit, "afer 3", r"must be 'after 3', .*, not 'afer 3'; 'afer 3' means nothing there"),
        (parse_admit, "after 3, after 4", "says after twice"),
        (parse_admit, "after 3,", "'' means nothing"),
        (parse_admit, "after -1", "means nothing"),
        (parse_admit, "after 0", "after: must be 1 to"),
        (parse_admit, "sketch 64MiB", "goes with after="),
        (parse_admit, "after 3, sketch much", "sketch: must be an amount of memory"),
        (parse_expire, "unused 100", "means nothing there"),
        (parse_expire, "unused 5 steps, unused 7d", "give one of"),
        (parse_expire, "score below 0.5", "score_below and half_life go together"),
    ],
)
def test_mistakes_are_reported(parse, text, told):
    with pytest.raises(ConfigError, match=told):
        parse(text)
