"""The translator against its reference over dicts: random streams, rules, look-ahead, going back, saving and loading."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.errors import ConfigError, StoreError
from hotbed.ids import UNKNOWN, Admit, Expire, IdCounts, TableRules, Translator
from hotbed.ids.batch import touch, unused
from hotbed.ids.rules import NEVER, TIME
from tests.ids.reference import ReferenceTranslator

QUARANTINE = 4
ADMISSIONS = st.sampled_from(
    [
        None,
        Admit(after=1),
        Admit(after=2),
        Admit(after=4),
        Admit(after=3, sketch=1024),
        Admit(after=300, sketch=4096),
        Admit(probability=0.3),
        Admit(probability=1.0),
    ]
)
EXPIRIES = st.sampled_from(
    [
        None,
        Expire(unused_steps=2, every=1),
        Expire(unused_steps=3, every=3),
        Expire(unused=5, every=2),
        Expire(score_below=1, half_life=2, every=2),
        Expire(score_below=0.6, half_life=1, every=5),
    ]
)
RULES = st.lists(st.builds(TableRules, ADMISSIONS, EXPIRIES, st.sampled_from([None, 0])), min_size=1, max_size=3)
IDS = st.one_of(st.integers(-2, 9), st.sampled_from([-(2**63), 2**63 - 1, 2**32, 2**33]))
LOOKUPS = st.lists(st.tuples(st.integers(0, 2), IDS), max_size=12)
STREAMS = st.lists(LOOKUPS, min_size=1, max_size=25)
LONG_STREAMS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-2, 9)), min_size=2, max_size=9), min_size=10, max_size=30
)


def arrays(lookups, num_tables):
    tables = np.array([table % num_tables for table, _ in lookups], dtype=np.uint16)
    return tables, np.array([id_ for _, id_ in lookups], dtype=np.int64)


def pairs(lookups, num_tables):
    return [(table % num_tables, id_) for table, id_ in lookups]


def clock(number: int) -> int:
    """Batches come in pairs at one second, and then there is a pause."""
    return 1_000 + (number // 2) * 3


def new(rules, seed=0):
    return Translator(rules, first_row=100, seed=seed, capacity=1 << 16, quarantine=QUARANTINE)


def state_of(translator: Translator) -> dict:
    """All of it, comparable."""
    keys = np.concatenate([np.empty(0, dtype=np.int64), *translator.live_keys()])
    parts = translator.rows_state(keys) | translator.rest_state()
    return {name: (column.dtype.str, column.shape, column.tobytes()) for name, column in parts.items()}


def copied(translator: Translator, rules, seed=0) -> Translator:
    """A new one with the state of another, in parts."""
    other = new(rules, seed)
    parts = (translator.rows_state(keys) for keys in translator.live_keys(chunk=3))
    assert other.load_state(parts, translator.rest_state()) == []
    return other


def agree(translator: Translator, reference: ReferenceTranslator) -> None:
    state = reference.state
    translator.check_integrity()
    assert translator.batch == state.batch
    assert translator.end == 100 + state.next_row
    assert len(translator) == len(state.rows)
    for (table, id_), row in state.rows.items():
        tables, ids = translator.id_of(np.array([100 + row.number]))
        assert (int(tables[0]), int(ids[0])) == (table, id_)
    for table in range(len(reference.rules)):
        assert translator.counts(table) == IdCounts(*state.counters[table])
        assert translator.shared_key(table) == (100 + state.shared[table] if table in state.shared else -1)
    rest = translator.rest_state()
    assert sorted(rest["quarantined_rows"].tolist()) == sorted(row for _, row in state.quarantined)
    waiting = zip(rest["waiting_tables"].tolist(), rest["waiting_ids"].tolist(), rest["waiting_counts"].tolist())
    assert {(table, id_): count for table, id_, count in waiting} == state.waiting
    for table, lines in state.sketches.items():
        assert rest[f"sketch_{table}"].tolist() == lines


@settings(max_examples=100)
@given(rules=RULES, stream=STREAMS, seed=st.integers(0, 3))
def test_like_the_reference(rules, stream, seed):
    translator, reference = new(rules, seed), ReferenceTranslator(rules, 100, seed, QUARANTINE)
    for number, lookups in enumerate(stream, start=1):
        known = pairs(lookups, len(rules))
        before = state_of(translator)
        keys, released = translator.translate(*arrays(lookups, len(rules)), learns=False)
        assert keys.tolist() == reference.translate(known, learns=False)[0]
        assert not released.shape[0]
        assert state_of(translator) == before, "evaluation changes nothing"
        keys, released = translator.translate(*arrays(lookups, len(rules)), learns=True, now=clock(number))
        assert (keys.tolist(), released.tolist()) == reference.translate(known, learns=True, now=clock(number))
        agree(translator, reference)
        translator.trained(number)


STEPS = ["ahead", "ahead", "trained", "checkpoint", "resume", "roll back", "evaluate"]
JOURNEYS = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2)), min_size=8, max_size=40)  # batches beyond


@settings(max_examples=120)
@given(rules=RULES, stream=LONG_STREAMS, journey=JOURNEYS)
def test_going_back_leaves_no_trace(rules, stream, journey):
    """What a pipeline does: batches ahead, reports, checkpoints in between, loops left early.

    States and answers are bit for bit those of a translator that never looks ahead.
    """
    num_tables = len(rules)
    plain, states, answers = new(rules), [], []
    states.append(state_of(plain))
    for number, lookups in enumerate(stream, start=1):
        result = plain.translate(*arrays(lookups, num_tables), learns=True, now=clock(number))
        answers.append((result.keys.tolist(), result.released.tolist()))
        plain.trained(number)
        states.append(state_of(plain))
    translator, done, ahead = new(rules), 0, 0
    for step, amount in journey:
        if step == "ahead":
            for _ in range(min(2 + amount, len(stream) - ahead, done + QUARANTINE - ahead)):
                ahead += 1
                result = translator.translate(*arrays(stream[ahead - 1], num_tables), learns=True, now=clock(ahead))
                assert (result.keys.tolist(), result.released.tolist()) == answers[ahead - 1]
            assert state_of(translator) == states[ahead]
        elif step == "trained":
            done = min(done + amount, ahead)
            translator.trained(done)
        elif step == "evaluate" and ahead:
            translator.translate(*arrays(stream[ahead - 1], num_tables), learns=False)
        elif step == "roll back":
            ahead = min(done + amount, ahead)
            rows = translator.roll_back(ahead)
            assert not translator.is_live(rows).any()
            assert state_of(translator) == states[ahead]
        elif step in ("checkpoint", "resume"):
            number = min(done + amount, ahead)
            with translator.rewound(number):
                assert state_of(translator) == states[number]
                translator.check_integrity()
                loaded = copied(translator, rules)
            assert state_of(loaded) == states[number]
            assert state_of(translator) == states[ahead]
            if step == "resume":
                translator, done, ahead = loaded, number, number
        translator.check_integrity()


def learn(translator, ids, table=0, now=None):
    tables = np.full(len(ids), table, dtype=np.uint16)
    result = translator.translate(tables, np.array(ids, dtype=np.int64), learns=True, now=now)
    translator.trained(translator.batch)
    return result.keys.tolist()


def test_rows_in_order_of_first_occurrence():
    translator = Translator([TableRules()])
    assert learn(translator, [7, -3, 7, 9, -3]) == [0, 1, 0, 2, 1]
    assert learn(translator, [1, 9]) == [3, 2]


def test_ids_that_have_a_row_of_their_own():
    translator = Translator([TableRules()], first_row=10)
    assert learn(translator, [7, 9]) == [10, 11]
    assert translator.has_row(np.zeros(3, dtype=np.uint16), np.array([7, 9, 8])).tolist() == [True, True, False]


def test_occurrences_of_one_batch_count_each():
    translator = Translator([TableRules(Admit(after=5))], first_row=10)
    assert learn(translator, [4, 4, 4]) == [10, 10, 10], "shared"
    assert learn(translator, [4, 8, 4]) == [11, 10, 11], "all occurrences of a batch read the same row"
    assert translator.counts(0) == IdCounts(seen=6, admitted=1, rejected=4, expired=0)
    known = translator.translate(np.zeros(2, dtype=np.uint16), np.array([4, 99]), learns=False)
    assert known.keys.tolist() == [11, 10]


def test_unknown_ids_without_admission():
    translator = Translator([TableRules(padding=5)])
    keys = translator.translate(np.zeros(2, dtype=np.uint16), np.array([4, 5]), learns=False).keys
    assert keys.tolist() == [UNKNOWN, -1]


def test_expired_rows_wait_before_they_are_used_again():
    translator = Translator([TableRules(None, Expire(unused_steps=2, every=2))], quarantine=4)
    learn(translator, [1, 2])
    learn(translator, [3])
    learn(translator, [3])
    assert learn(translator, [1, 4]) == [3, 4], "batch 4: 1 and 2 were last used in batch 1, before the last two"
    learn(translator, [5])
    learn(translator, [5])
    learn(translator, [5])
    result = translator.translate(np.zeros(2, dtype=np.uint16), np.array([6, 7]), learns=True)
    assert result.released.tolist() == [0, 1], "batch 8 sweeps four batches later"
    assert result.keys.tolist() == [0, 1]
    translator.check_integrity()


def test_expiry_by_time():
    translator = Translator([TableRules(None, Expire(unused="1m", every=1))])
    learn(translator, [1, 2], now=1_000)
    learn(translator, [1], now=1_060)
    assert translator.counts(0).expired == 0
    learn(translator, [1], now=1_061)
    assert translator.counts(0).expired == 1
    assert translator.translate(np.zeros(2, dtype=np.uint16), np.array([1, 2]), learns=False).keys.tolist() == [
        0,
        UNKNOWN,
    ]


def test_probability_is_near_what_was_asked():
    translator = Translator([TableRules(Admit(probability=0.25))], seed=3)
    learn(translator, range(20_000))
    assert 4_700 < len(translator) < 5_300
    other = Translator([TableRules(Admit(probability=0.25))], seed=4)
    learn(other, range(20_000))
    assert state_of(other)["id"] != state_of(translator)["id"]


def test_a_sketch_is_never_late():
    """Counts in a sketch are never too low, and with room enough they are right for nearly all."""
    translator = Translator([TableRules(Admit(after=3, sketch="64KiB"))])
    learn(translator, range(2_000))
    learn(translator, range(2_000))
    assert len(translator) < 20
    learn(translator, range(2_000))
    assert len(translator) == 2_000


def test_more_ids_than_rows_change_nothing():
    rules = [TableRules(), TableRules(Admit(after=2), Expire(unused_steps=1, every=1))]
    translator = Translator(rules, capacity=8)
    translator.translate(np.array([0, 1, 1, 1], dtype=np.uint16), np.array([1, 1, 1, 2]), learns=True)
    translator.translate(np.array([0], dtype=np.uint16), np.array([1]), learns=True)
    before = state_of(translator)
    with pytest.raises(StoreError, match=r"21 more ids need 24 rows, and a group has at most 8.*Admit"):
        translator.translate(
            np.repeat(np.array([0, 1], dtype=np.uint16), [20, 2]), np.r_[np.arange(5, 25), 2, 3], learns=True
        )
    assert state_of(translator) == before
    translator.check_integrity()


def test_batches_that_cannot_be_gone_back_to():
    translator = Translator([TableRules()])
    learn(translator, [1])
    learn(translator, [2])
    with pytest.raises(StoreError, match="batch 1 is requested"):
        translator.roll_back(1)
    with pytest.raises(StoreError, match="batch 3 is requested"):
        translator.trained(3)
    with pytest.raises(StoreError), translator.rewound(0):
        pass
    with translator.rewound(2), pytest.raises(StoreError, match="can be read, not changed"):
        learn(translator, [3])
    with pytest.raises(StoreError, match="before the first batch"):
        translator.load_state([], translator.rest_state())


def test_ids_of_rows_on_their_way_stay_known():
    """Batch 1 may be moved after later ones have been translated, one of which lets its row go; or inside rewound."""
    translator = Translator([TableRules(), TableRules(None, Expire(unused_steps=1, every=3))])
    keys = translator.translate(np.ones(1, dtype=np.uint16), np.array([77]), learns=True).keys
    for _ in range(2):
        translator.translate(np.zeros(1, dtype=np.uint16), np.array([5]), learns=True)
    assert translator.counts(1).expired == 1
    assert not translator.is_live(keys).any()
    assert [column.tolist() for column in translator.id_of(keys)] == [[1], [77]]
    with translator.rewound(0):
        assert [column.tolist() for column in translator.id_of(keys)] == [[1], [77]]


def test_an_error_inside_rewound_leaves_the_state_whole():
    translator = Translator([TableRules(Admit(after=2), Expire(unused_steps=1, every=1))])
    for batch in ([1, 1, 2], [2, 3], [4, 4]):
        translator.translate(np.zeros(len(batch), dtype=np.uint16), np.array(batch), learns=True)
    before = state_of(translator)
    with suppress(KeyError), translator.rewound(0):
        raise KeyError
    assert state_of(translator) == before


def test_too_far_ahead_is_noticed():
    translator = Translator([TableRules(None, Expire(unused_steps=1, every=1))], quarantine=2)
    for id_ in range(4):
        translator.translate(np.zeros(1, dtype=np.uint16), np.array([id_]), learns=True)
    with pytest.raises(AssertionError, match="at most 2 batches ahead"):
        translator.translate(np.zeros(1, dtype=np.uint16), np.array([9]), learns=True)


def test_the_number_of_threads_changes_nothing(monkeypatch):
    rules = [TableRules(Admit(after=2), Expire(unused_steps=2, every=2)), TableRules()]
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 2, 40_000).astype(np.uint16), rng.zipf(1.3, 40_000)) for _ in range(6)]
    states = []
    for threads in (1, 2, 5):
        monkeypatch.setattr("hotbed.host.pool.num_threads", lambda threads=threads: threads)
        translator = Translator(rules)
        for tables, ids in batches:
            translator.translate(tables, ids, learns=True, now=5)
        states.append(state_of(translator))
    assert states[0] == states[1] == states[2]


def test_memory_does_not_grow_with_batches():
    """Ids come and go for ever: rows, index, waiting ids and journal stay as they are."""
    rules = [TableRules(Admit(after=2), Expire(unused_steps=4, every=2)), TableRules(Admit(after=3, sketch="4KiB"))]
    translator = Translator(rules, quarantine=8)
    sizes, ends = [], []
    for number in range(1, 400):
        ids = np.repeat(np.arange(50) + 50 * number, 2)
        translator.translate(np.zeros(100, dtype=np.uint16), ids, learns=True)
        translator.trained(max(0, number - 5))
        if number % 100 == 99:
            sizes.append(translator.num_bytes)
            ends.append(translator.end)
    assert len(set(ends)) == 1
    assert max(sizes) - min(sizes) < 10_000
    assert len(translator._journal) == 5


def test_counts_of_a_batch_that_others_came_after():
    translator = Translator([TableRules(Admit(after=2), Expire(unused_steps=1, every=1))])
    found = []
    for ids in ([1, 2], [1, 1], [3], [3], [3, 4]):
        translator.translate(np.zeros(len(ids), dtype=np.uint16), np.array(ids), learns=True)
        found.append(translator.counts(0))
    assert [translator.counts(0, number) for number in range(1, 6)] == found
    assert translator.counts(0, 0) == (0, 0, 0, 0)
    assert len(set(found)) == 5
    translator.trained(3)
    assert translator.counts(0, 3) == found[2]
    with pytest.raises(StoreError, match="cannot be undone"):
        translator.counts(0, 2)


def test_loading_into_changed_rules():
    rules = [TableRules(Admit(after=3), Expire(unused_steps=9)), TableRules(Admit(after=2, sketch=1024)), TableRules()]
    old = Translator(rules, first_row=5)
    tables = np.array([0, 0, 0, 0, 1, 1, 2, 2], dtype=np.uint16)
    old.translate(tables, np.array([1, 1, 1, 2, 7, 7, 8, 9]), learns=True)
    parts = [old.rows_state(keys) for keys in old.live_keys()]
    changed = Translator([TableRules(), TableRules(Admit(after=9), Expire(unused=60))], first_row=50)
    lost = changed.load_state(parts, old.rest_state(), table_of=[1, -1, 0], now=1_000)
    assert lost == [
        "table 1: expires by another rule, last uses or scores start again",
        "2 rows of tables that are gone",
        "sketch_1: its table has no sketch now",
    ]
    changed.check_integrity()
    find = changed.translate(np.array([0, 0, 1, 1], dtype=np.uint16), np.array([8, 9, 1, 2]), learns=False)
    saved = old.translate(np.array([2, 2, 0, 0], dtype=np.uint16), np.array([8, 9, 1, 2]), learns=False)
    assert (find.keys - 50).tolist() == (saved.keys - 5).tolist()
    assert changed.counts(1) == old.counts(0)
    assert [changed.counts(table).rows for table in (0, 1)] == [2, 1]
    without_history = {**old.rest_state(), "counters": np.zeros((3, 4), dtype=np.int64)}
    again = Translator(rules, first_row=5)
    again.load_state(parts, without_history)
    assert [again.counts(table) for table in range(3)] == [(0, 1, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0)]
    keys = changed.translate(np.array([1], dtype=np.uint16), np.array([2]), learns=True, now=1_000).keys
    assert keys.tolist() == [changed.shared_key(1)], "one of nine"
    assert changed.rest_state()["waiting_counts"].tolist() == [2], "its first occurrence carried over"
    with pytest.raises(StoreError, match="the saved state has 3 tables and this group 1"):
        Translator([TableRules()]).load_state(parts, old.rest_state(), table_of=[0, 0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Admit, "either after="),
        (lambda: Admit(after=2, probability=0.5), "either after="),
        (lambda: Admit(after=0), "after: must be 1 to"),
        (lambda: Admit(probability=0.0), "above 0 and at most 1, not 0.0"),
        (lambda: Admit(probability=1.5), "above 0 and at most 1, not 1.5"),
        (lambda: Admit(probability=0.5, sketch="1MiB"), "goes with after="),
        (lambda: Admit(after=2, sketch="10"), "1024 bytes or more"),
        (lambda: Admit(after=2, sketch="tiny"), "sketch: must be an amount of memory"),
        (Expire, "give one of"),
        (lambda: Expire(unused_steps=3, unused="7d"), "give one of"),
        (lambda: Expire(unused="soon"), "30m, 12h, 7d or 2w, not 'soon'"),
        (lambda: Expire(unused=0), "30m, 12h, 7d or 2w, not 0"),
        (lambda: Expire(unused_steps=0), "unused_steps: must be 1 to"),
        (lambda: Expire(unused_steps=5, every=0), "every: must be 1 to"),
        (lambda: Expire(score_below=1.0), "go together"),
        (lambda: Expire(score_below=0.001, half_life=5), "score_below: must be 1/256"),
        (lambda: Translator([]), "1 to 65,536 tables, not 0"),
        (lambda: learn(Translator([TableRules()]), [1], now=0), "must be 1 to 2"),
    ],
)
def test_wrong_settings(make, message):
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


def test_sweeps_by_default():
    assert Expire(unused_steps=100).sweep == 256
    assert Expire(unused_steps=100_000).sweep == 10_000
    assert Expire(unused="7d").sweep == 256
    assert Expire(unused="7d").span == 7 * 86_400
    assert Expire(score_below=1, half_life=5_000).sweep == 500


def test_lookups_without_a_row_mark_nothing_as_used():
    """Padding, and ids that wait for a row, have row -1; rows of a table without expiry and shared rows have no last use."""
    tables, rows = np.array([0, 0, 1, 0, 1], np.uint16), np.array([-1, 2, 3, 5, -1])
    last, scores = np.full((1, 8), 7, np.uint32), np.zeros(0, np.uint32)
    expire, span, shared = np.array([TIME, NEVER], np.uint8), np.array([3, 0]), np.array([5, -1])
    out = np.zeros(5, np.int64), np.zeros(5, np.uint32), np.zeros(0, np.uint32)
    assert touch(tables, rows, expire, span, shared, 0, 9, last, scores, *out) == 1
    assert last.tolist() == [[7, 7, 9, 7, 7, 7, 7, 7]]
    assert (out[0][0], out[1][0]) == (2, 7)


def test_a_sweep_looks_at_the_rows_there_are_and_no_others(monkeypatch):
    """Beyond them there may be no memory, and rows of batches that were taken back."""
    translator, asked = new([TableRules(None, Expire(unused_steps=1, every=1))]), []

    def looked(owners, start, *rest):
        asked.append((start, rest[-1].shape[0]))
        return unused(owners, start, *rest)

    monkeypatch.setattr("hotbed.ids.learn.batch.unused", looked)
    monkeypatch.setattr("hotbed.ids.learn._SWEEP_CHUNK", 10)
    zeros = np.zeros(25, np.uint16)
    for first in (0, 0, 100):
        translator.translate(zeros, np.arange(first, first + 25), learns=True)
        translator.trained(translator.batch)
    assert asked[-3:] == [(0, 10), (10, 10), (20, 5)]


@pytest.mark.parametrize(
    "rules", [TableRules(Admit(after=2)), TableRules(Admit(after=2), Expire(unused_steps=1, every=1))]
)
def test_batches_that_count_admit_or_lose_nothing_are_gone_back_to(rules):
    translator, batches = new([rules]), [[1], [1, 2], [1], []]
    states = [state_of(translator)]
    for ids in batches:
        translator.translate(np.zeros(len(ids), np.uint16), np.array(ids, np.int64), learns=True)
        states.append(state_of(translator))
    for number in (0, 2, 3, 1):
        with translator.rewound(number):
            assert state_of(translator) == states[number]
        assert state_of(translator) == states[-1]
