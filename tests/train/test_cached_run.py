"""Laws 1 and 7 for whole runs: a cache changes no loss, no metric and no weight, also when the run is stopped and goes on."""

import json

import pytest
import torch

from hotbed.telemetry.clock import PARTS
from hotbed.train.model_folder import load_learner
from hotbed.train.run import run
from hotbed.train.step import Learner
from tests.train.small import lines, model_bytes
from tests.train.test_resume import interrupt
from tests.train.test_run import Spy

# 110 rows; a batch of 16 needs up to 70 of them
SETS = ("data.batch_size=16", "train.epochs=2", "train.eval_every=25", "tables.optimizer=adam", "tables.lr=0.05")
CACHE = "tables.cache=0.7"


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """The run whose tables are held as a whole."""
    folder = tmp_path_factory.mktemp("whole")
    built = start(folder, *SETS)
    run(built.training, built.subject)
    return folder


def cache_lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["cache"] for line in found if "cache" in line]  # a short last interval may have nothing to plan


@pytest.mark.parametrize(
    ("policy", "ahead"),  # tests/laws has every two of them
    [("oracle", (0, 0)), ("lfu", (0, 0)), ("lfu", (1, 1)), ("static", (1, 1)), ("lru", (2, 5)), ("oracle", (2, 5))],
)
def test_a_cache_is_invisible(start, whole, tmp_path, policy, ahead):
    sets = (CACHE, f"tables.policy={policy}", f"tables.window={ahead[0]}", f"tables.look_ahead={ahead[1]}")
    built = start(tmp_path, *SETS, *sets)
    assert run(built.training, built.subject).summary["finished"]
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


def test_every_line_says_what_the_cache_did(start, tmp_path):
    built = start(tmp_path, *SETS, CACHE, "train.eval_every=0")
    run(built.training, built.subject)
    found = cache_lines(tmp_path)
    assert sum(one["batches"] for one in found) == 2 * 63
    assert sum(one["evictions"] for one in found) > 0
    total = {name: sum(one[name] * one["batches"] for one in found) for name in found[0]}
    assert 77 < total["created"] <= 110  # each row is made at most once, whatever comes back later
    assert total["created"] < total["misses"] < total["keys"] <= 110 * 2 * 63
    assert total["written_back"] <= total["evictions"] <= total["misses"]
    record = 64  # bytes: four weights, a first-order weight, two states of each and a count, in blocks of 16
    assert total["bytes_in"] == pytest.approx((total["misses"] - total["created"]) * record)
    assert total["bytes_out"] == pytest.approx(total["written_back"] * record)
    for one in found:
        assert one["hit_rate"] == pytest.approx(1 - one["misses"] / one["keys"])
        assert 0 <= one["lookup_hit_rate"] <= 1
        assert 0 <= one["stall_share"] <= 1
    assert found[0]["hit_rate"] < found[-1]["hit_rate"]


@pytest.mark.parametrize("sets", [[], [CACHE, "tables.window=2"]], ids=["plain", "cached"])
def test_the_parts_of_a_step_add_up_to_the_time_of_training(start, tmp_path, sets):
    built = start(tmp_path, *SETS, *sets)
    summary = run(built.training, built.subject).summary
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line["times"] for line in found if "times" in line]
    assert sum(one["steps"] for one in found) == summary["steps"]
    names = set(PARTS)
    assert all(one[name] > 0 for one in found for name in ("look_up", "model", "update", "dense"))
    for name in ("plan", "copy"):
        assert (sum(one[name] for one in found) > 0) == bool(sets)
    total = sum(one["steps"] * sum(one[name] for name in names) for one in found)
    assert total == pytest.approx(summary["train_seconds"], rel=0.25)
    assert total >= 0.9 * summary["train_seconds"]


def test_without_a_cache_lines_do_not_speak_of_one(whole):
    assert "cache" not in (whole / "metrics.jsonl").read_text()


@pytest.mark.parametrize("step", [1, 24, 25, 63, 100])
def test_stopped_and_resumed_behind_a_cache(start, whole, tmp_path, step):
    """Batches that were read ahead when the run stopped are read and trained again."""
    built = start(tmp_path, *SETS, CACHE, "tables.window=2", observers=[Spy(at=step, act=interrupt)])
    assert run(built.training, built.subject).exit_code == 130
    built = start(tmp_path, *SETS, CACHE, "tables.window=2")
    built.training.resume()
    assert built.training.progress.step == step
    assert run(built.training, built.subject).summary["finished"]
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


@pytest.mark.parametrize(
    ("before", "after"), [("tables.cache=0", CACHE), (CACHE, "tables.cache=0"), (CACHE, "tables.cache=1")]
)
def test_resumed_with_another_cache(start, whole, tmp_path, before, after):
    built = start(tmp_path, *SETS, before, observers=[Spy(at=40, act=interrupt)])
    run(built.training, built.subject)
    built = start(tmp_path, *SETS, after)
    built.training.resume()
    run(built.training, built.subject)
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


def test_weights_of_16_bits_behind_a_cache(start, tmp_path):
    """They round at random, by key and update: the same in a cache, and after a stop."""
    sets = (*SETS, "tables.precision=bf16")
    built = start(tmp_path / "whole", *sets)
    run(built.training, built.subject)
    built = start(tmp_path / "cached", *sets, CACHE, observers=[Spy(at=40, act=interrupt)])
    run(built.training, built.subject)
    built = start(tmp_path / "cached", *sets, CACHE)
    built.training.resume()
    run(built.training, built.subject)
    assert lines(tmp_path / "cached") == lines(tmp_path / "whole")
    assert model_bytes(tmp_path / "cached") == model_bytes(tmp_path / "whole")
    scored = load_learner(tmp_path / "cached" / "model", "cpu")
    for batch in built.training.loaders.held_out["test"].epoch(0):
        assert torch.equal(scored.score(batch), built.training.learner.score(batch))


@pytest.mark.parametrize("settings", [("policy=static",), ("policy=lfu", "warmup=0.9")])
def test_a_cache_is_warm_from_the_start_and_after_a_stop(start, whole, tmp_path, monkeypatch, settings):
    found = []  # updates done, rows brought in

    def warm(learner):
        before = learner.tables.counters()
        real(learner)
        found.append((learner.tables.num_updates, learner.tables.counters().minus(before).misses))

    real = Learner.warm
    monkeypatch.setattr(Learner, "warm", warm)
    sets = (*SETS, CACHE, *(f"tables.{one}" for one in settings))
    built = start(tmp_path, *sets, observers=[Spy(at=40, act=interrupt)])
    run(built.training, built.subject)
    built = start(tmp_path, *sets)
    built.training.resume()
    run(built.training, built.subject)
    assert found == [(0, int(77 * 0.9)), (40, 0)]  # they came with the checkpoint
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


def test_a_static_cache_of_another_size_is_warm_after_a_stop(start, whole, tmp_path):
    built = start(tmp_path, *SETS, CACHE, "tables.policy=static", observers=[Spy(at=40, act=interrupt)])
    run(built.training, built.subject)
    spy = Spy()
    built = start(tmp_path, *SETS, "tables.cache=0.8", "tables.policy=static", observers=[spy])
    built.training.resume()
    assert spy.said == ["starting with an empty cache: the cache of dim-5 had 77 slots of static, now 88 of static"]
    built.training.learner.warm()
    assert built.training.learner.tables.caches[0].cache.resident()[0].shape[0] == int(88 * 0.9)
    run(built.training, built.subject)
    assert model_bytes(tmp_path) == model_bytes(whole)


@pytest.mark.parametrize("policy", ["oracle", "lfu", "lru", "static"])
def test_a_resumed_run_hits_as_one_that_never_stopped(start, tmp_path, policy):
    """With the look-ahead of a run: what is known of batches ahead when the checkpoint is taken is found out again."""
    sets = ("data.batch_size=8", "train.epochs=2", "train.log_every=20")
    sets += ("tables.cache=0.5", f"tables.policy={policy}")
    built = start(tmp_path / "one", *sets)
    run(built.training, built.subject)
    built = start(tmp_path / "two", *sets, observers=[Spy(at=40, act=interrupt)])
    run(built.training, built.subject)
    spy = Spy()
    built = start(tmp_path / "two", *sets, observers=[spy])
    built.training.resume()
    run(built.training, built.subject)
    assert spy.said == []
    hits = {}
    for name in ("one", "two"):
        found = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        after = [line["cache"] for line in found if line["step"] > 40 and "cache" in line]
        keys = sum(one["keys"] * one["batches"] for one in after)
        misses = sum(one["misses"] * one["batches"] for one in after)
        hits[name] = 1 - misses / keys
    assert hits["two"] == pytest.approx(hits["one"], rel=0.01)


def test_a_crash_behind_a_cache_goes_back_to_the_last_checkpoint(start, whole, tmp_path):
    def crash():
        raise ZeroDivisionError

    sets = (*SETS, CACHE, "train.checkpoint_every=10")
    built = start(tmp_path, *sets, observers=[Spy(at=38, act=crash)])
    with pytest.raises(ZeroDivisionError):
        run(built.training, built.subject)
    built = start(tmp_path, *sets)
    built.training.resume()
    assert built.training.progress.step in (10, 20, 30)  # one that comes too early is left out
    run(built.training, built.subject)
    assert lines(tmp_path) == lines(whole)
    assert model_bytes(tmp_path) == model_bytes(whole)


def test_the_page_tells_of_the_cache(start, tmp_path):
    from hotbed.report import write_report

    built = start(tmp_path, *SETS, CACHE)
    run(built.training, built.subject)
    (tmp_path / "config.json").write_text("{}")
    assert "The device held 77 of 110 rows" in write_report(tmp_path).read_text()
