"""Lines of whole runs over an ssd and with dynamic ids: what is told, and what a run that goes on must tell again."""

import json
from itertools import pairwise

import pytest

from hotbed.report import write_report
from hotbed.train.run import run
from tests.train.small import lines
from tests.train.test_resume import interrupt
from tests.train.test_run import Spy

SETS = ("data.batch_size=16", "train.epochs=2", "train.eval_every=25", "tables.optimizer=adam", "train.keep_best=false")
# 110 rows; a batch of 16 needs up to 70 of them
TIERS = ("tables.cache=0.7", "tables.memory=4KiB")
DYNAMIC = ("tables.dynamic=true", "tables.admit=after 3", "tables.expire=unused 4 steps, every 3")


def told(folder, what):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[what] for line in found if what in line]


def stopped_and_resumed(start, folder, sets, step):
    built = start(folder, *sets, observers=[Spy(at=step, act=interrupt)])
    assert run(built.training, built.subject).exit_code == 130
    built.training.learner.tables.caches[0].store.close()
    built = start(folder, *sets)
    built.training.resume()
    return run(built.training, built.subject).summary


@pytest.fixture
def over_ssd(tmp_path):
    return (*SETS, *TIERS, f"tables.ssd={tmp_path / 'ssd'}:8MiB")


def test_lines_and_summary_tell_of_the_tiers(start, tmp_path, over_ssd):
    built = start(tmp_path / "run", *over_ssd)
    summary = run(built.training, built.subject).summary
    found, cache = told(tmp_path / "run", "tiers"), told(tmp_path / "run", "cache")
    assert len(found) == len(cache) > 10
    counts, sizes = built.training.learner.tables.tiers()
    total = {
        name: sum(round(one[name] * batches["batches"]) for one, batches in zip(found, cache))
        for name in ("from_memory", "from_ssd", "to_ssd", "bytes_from_memory", "bytes_read")
    }
    misses = sum(round((one["misses"] - one["created"]) * one["batches"]) for one in cache)
    assert total["from_memory"] > 0
    assert total["from_ssd"] > 0
    # a window may be on its way when an evaluation begins: half of it is then told
    assert total["from_memory"] + total["from_ssd"] == pytest.approx(misses, rel=0.1)
    assert total["bytes_from_memory"] == 64 * total["from_memory"]
    for one in found:
        asked = one["from_memory"] + one["from_ssd"]
        assert one["memory_hit_rate"] == (pytest.approx(one["from_memory"] / asked) if asked else None)
        assert one["ssd_bytes"] <= one["ssd_cap"] == 8 << 20
        assert one["memory_bytes"] <= one["memory_budget"] == 4 << 10
    assert [one["wear"] for one in found] == sorted(one["wear"] for one in found)
    assert summary["ids"] is None
    tiers = summary["tiers"]
    assert tiers["wear"] == counts.bytes_written >= found[-1]["wear"] > 0
    assert total["from_ssd"] <= tiers["from_ssd"] < counts.from_ssd  # evaluation read, too
    assert tiers["memory_hit_rate"] == pytest.approx(total["from_memory"] / misses, rel=0.1)
    assert tiers["ssd_live_bytes"] == sizes.ssd_live_bytes
    (tmp_path / "run" / "config.json").write_text("{}")
    assert "What the tiers did" in write_report(tmp_path / "run").read_text()


def test_tiers_of_a_process_that_resumes_begin_anew(start, tmp_path, over_ssd):
    folder = tmp_path / "run"
    stopped_and_resumed(start, folder, over_ssd, 40)
    wear = [one["wear"] for one in told(folder, "tiers")]
    steps = [line["step"] for line in lines(folder) if line["kind"] == "train"]
    assert len(steps) == len(set(steps))
    assert any(after < before for before, after in pairwise(wear))


def dynamic_sets(below, ssd):
    sets = (*SETS, *DYNAMIC, "tables.hbm=16KiB", "tables.window=2")
    return (*sets, "tables.memory=1MiB", f"tables.ssd={ssd}:8MiB") if below == "ssd" else sets


@pytest.fixture(scope="module", params=["memory", "ssd"])
def whole(request, start, tmp_path_factory):
    """(what is below the device, the folder of a run that was left alone, its summary, its rows by table)."""
    folder = tmp_path_factory.mktemp("whole")
    built = start(folder / "run", *dynamic_sets(request.param, folder / "ssd"))
    summary = run(built.training, built.subject).summary
    tables = built.training.learner.tables
    return request.param, folder / "run", summary, {name: tables.rows(name)[0].shape[0] for name in tables.tables}


def test_ids_are_reported_to_the_digit(whole):
    _, folder, summary, num_rows = whole
    ids = told(folder, "ids")
    assert summary["ids"] == ids[-1]
    assert len(ids) == len([line for line in lines(folder) if line["kind"] == "train"])
    last = ids[-1]
    assert last.keys() == num_rows.keys()
    for name, one in last.items():
        assert one["rows"] == one["admitted"] - one["expired"] == num_rows[name]
    assert last["user"]["seen"] == 2000
    assert last["user"]["expired"] > 0
    assert (last["site"]["rejected"], last["site"]["rows"]) == (2000, 0)  # each of its ids comes twice


@pytest.mark.parametrize("step", [7, 25, 63, 100])
def test_ids_are_reported_to_the_digit_after_a_resume(start, whole, tmp_path, step):
    """Also while batches were translated ahead when the run stopped."""
    below, folder, summary, _ = whole
    resumed = stopped_and_resumed(start, tmp_path / "again", dynamic_sets(below, tmp_path / "ssd"), step)
    assert told(tmp_path / "again", "ids") == told(folder, "ids")
    assert lines(tmp_path / "again") == lines(folder)
    assert resumed["ids"] == summary["ids"]


def test_without_tiers_and_dynamic_ids_lines_do_not_speak_of_them(start, tmp_path):
    built = start(tmp_path, *SETS, "tables.cache=0.7", "train.max_steps=10")
    summary = run(built.training, built.subject).summary
    assert told(tmp_path, "tiers") == told(tmp_path, "ids") == []
    assert (summary["tiers"], summary["ids"]) == (None, None)
