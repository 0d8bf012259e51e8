"""`hotbed plan --choose`: precision, placement, k and the cache from budgets and links, and what is kept."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from hotbed.data.dataset import Dataset
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import ConfigError
from hotbed.forecast.calibrate import Calibration
from hotbed.forecast.choose import K_STEP, PLACEMENT, choose, share_slots
from hotbed.forecast.curves import lru_curve
from hotbed.forecast.forecast import make_forecast
from hotbed.forecast.links import ASSUMED, read_links
from hotbed.forecast.network import Cluster, all_to_all
from hotbed.forecast.request import ForecastRequest
from hotbed.forecast.step_time import hops_time
from hotbed.forecast.trace import Trace
from hotbed.parallel.world import World
from hotbed.run.run_file import compose
from hotbed.train.build_ranks import rank_problems

BASE = {
    "data.batch_size": 32,
    "model.dim": 4,
    "model.options": {"hidden": [8]},
    "train.device": "cpu",
    "tables.cache": 0.5,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A log with two id columns and one of bags, whose ids are many."""
    place, rng = tmp_path_factory.mktemp("choose"), np.random.default_rng(0)
    lines = [
        f"{rng.integers(2)},{int(rng.random() ** 3 * 200)},{rng.integers(30)},{'|'.join(map(str, rng.integers(0, 40, 12)))}"
        for _ in range(600)
    ]
    (place / "log.csv").write_text("\n".join(["label,user,ad,tags", *lines]))
    prepare([place / "log.csv"], place / "log", ids=["user", "ad"], multi={"tags": "|"})
    return place / "log"


def request_of(folder, ranks=1, links=ASSUMED, **sets):
    flat = {**BASE, "data.path": str(folder), **{name.replace("__", "."): value for name, value in sets.items()}}
    config, problems = compose(None, flat)
    assert not problems
    return ForecastRequest(config, Dataset.open(folder), ranks, "no", links=links)


def topo(nodes, local, in_node, across, two=None):
    size = nodes * local
    rates = [
        [None if i == j else in_node if i // local == j // local else across for j in range(size)] for i in range(size)
    ]
    links = {"bytes_per_s": rates}
    if two is not None:
        links["exchange"] = {"num_bytes": 1 << 20, "one": two, "two": two}
    return {"machines": [], "mesh": {"nodes": nodes, "local_ranks": local, "hops": 2}, "links": links}


def written(tmp_path, found):
    (tmp_path / "links.json").write_text(json.dumps(found))
    return tmp_path / "links.json"


def test_links_are_those_that_topo_measured(tmp_path):
    found = read_links(written(tmp_path, topo(2, 4, 8e9, 1e9)))
    assert found.fabric.in_node.speed == 8e9
    assert found.fabric.across.speed == 1e9 / 4  # four ranks share a card
    assert found.cluster(8) == Cluster(2, 4)
    assert found.cluster(16) == Cluster(4, 4)
    assert found.cluster(2) == Cluster(1, 2)
    assert "2 x 4 ranks" in found.about
    exchange = hops_time(Cluster(2, 4), found.fabric, all_to_all(Cluster(2, 4), 1 << 20))
    slower = read_links(written(tmp_path, topo(2, 4, 8e9, 1e9, two=3 * exchange)))
    assert slower.fabric.across.speed == pytest.approx(1e9 / 4 / 3)
    faster = read_links(written(tmp_path, topo(2, 4, 8e9, 1e9, two=exchange / 3)))
    assert faster.fabric == found.fabric
    alone = read_links(written(tmp_path, topo(2, 1, None, 1e9)))
    assert alone.fabric.in_node == alone.fabric.across


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("not json", "not what `hotbed topo --json` prints"),
        ("[]", "not what `hotbed topo --json` prints"),
        ('{"mesh": {"nodes": 1, "local_ranks": 1}, "links": null}', "no links in it"),
        ('{"mesh": {"nodes": 1, "local_ranks": 2}, "links": {"bytes_per_s": [[null, 1.0]]}}', "no links in it"),
    ],
)
def test_files_without_links_are_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "links.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_links(tmp_path / "links.json")


def test_the_first_precision_that_fits(folder):
    found = choose(request_of(folder), ())
    assert [(one.name, one.value, one.is_default) for one in found.settings] == [("tables.precision", "fp32", True)]
    assert found.options == ("" if found.cache.whole else found.cache.option)

    whole, rounded = (request_of(folder, tables__precision=one).sketch.amounts.below for one in ("fp32", "bf16"))
    assert rounded < whole
    rows = request_of(folder).sketch.amounts.rows
    tight = f"{int(rows * (whole - 1))}"  # bytes of memory: fp32 does not fit
    found = choose(request_of(folder, tables__memory=tight), ())
    assert not found.forecast.problems
    chosen = {one.name: one.value for one in found.settings}
    assert chosen == {"tables.store_precision": "int8"}
    assert "fp32 does not fit" in found.settings[0].why
    assert "no longer the result of fp32" in found.settings[0].why
    assert "--set tables.store_precision=int8" in found.options
    kept = choose(request_of(folder, tables__memory=tight), ("tables.precision",))
    assert kept.settings == []
    assert kept.forecast.problems
    nothing = choose(request_of(folder, tables__memory="100"), ())
    assert nothing.forecast.problems
    assert nothing.cache is None


def test_bags_go_where_they_are_one_vector(folder):
    """12 of 40 tags a sample: rows of tags on both ranks are sent in two parts a sample, on one rank in one."""
    request = request_of(folder, ranks=2)
    found = choose(request, ())
    chosen = {one.name: one for one in found.settings}
    seconds = {}
    for value in ("row", "table", "row, tags=table", "row, user=table"):
        varied = request_of(folder, ranks=2, parallel__placement=value)
        seconds[value] = make_forecast(varied).wires.seconds
    least = min(seconds["row"], seconds["table"], seconds["row, tags=table"])
    assert seconds[chosen[PLACEMENT].value] == least
    assert found.forecast.wires.seconds == pytest.approx(least)
    assert chosen[PLACEMENT].value in chosen[PLACEMENT].why
    replicated = choose(request_of(folder, ranks=2, parallel__mode="replicated"), ()).settings
    assert next(one.value for one in replicated if one.name == PLACEMENT) == "row"
    kept = choose(request_of(folder, ranks=2, parallel__placement="table"), (PLACEMENT,))
    assert PLACEMENT not in {one.name for one in kept.settings}
    assert kept.request.config.parallel.placement == "table"


def test_what_training_refuses_is_not_chosen(folder, tmp_path):
    slow = read_links(written(tmp_path, topo(1, 4, 1e4, None)))
    assert choose(request_of(folder, 4, slow), ()).request.config.parallel.placement == "table"
    found = choose(request_of(folder, 4, slow, parallel__once_per_node=True), ())
    assert found.request.config.parallel.placement == "row"
    assert rank_problems(found.request.config, World(0, 4)) == []
    assert "does not fit: table" in next(one.why for one in found.settings if one.name == PLACEMENT)


def test_rows_that_are_rounded_have_no_replicas(folder):
    """int8 would fit, and replicas are not what their owner has then."""
    rows = request_of(folder).sketch.amounts.rows
    whole = request_of(folder).sketch.amounts.below
    tight = f"{int(rows / 2 * (whole - 1))}"  # of each rank
    sharded, replicated = (
        choose(request_of(folder, 2, tables__memory=tight, parallel__mode=mode), ())
        for mode in ("sharded", "replicated")
    )
    assert sharded.request.config.tables.store_precision == "int8"
    assert replicated.request.config.tables.store_precision != "int8"


def test_all_wait_for_the_rank_that_sends_most(folder):
    """One table on one of two ranks: that rank sends what both would have sent."""
    spread, one_sided = (
        make_forecast(request_of(folder, ranks=2, parallel__placement=value)).wires.seconds
        for value in ("row", "row, user=table")
    )
    assert one_sided > spread


KNOWN = Calibration(0.0, 0.0, 2, 1e-4, 1e-4, 1e-3, 1e-3, 1e-3, 1e-8, 0.0, 0.0, 0.0)


def test_merges_are_rarer_where_links_are_slow(folder, tmp_path, monkeypatch):
    unknown = choose(request_of(folder, ranks=2), ()).settings[-1]
    assert (unknown.name, unknown.value) == (K_STEP, "1")
    assert "nothing is known of the speed" in unknown.why
    monkeypatch.setattr("hotbed.forecast.forecast._calibration", lambda _: KNOWN)
    slow = read_links(written(tmp_path, topo(2, 1, None, 1e5)))
    rare = choose(request_of(folder, ranks=2, links=slow), ())
    chosen = {one.name: one for one in rare.settings}
    assert int(chosen[K_STEP].value) > 1
    assert "An approximation" in chosen[K_STEP].why
    assert f"--set parallel.k_step={chosen[K_STEP].value}" in rare.options
    every = make_forecast(request_of(folder, ranks=2, links=slow)).wires
    fewer = make_forecast(request_of(folder, ranks=2, links=slow, parallel__k_step=16)).wires
    assert fewer.merge < every.merge
    assert fewer.across < every.across
    kept = choose(request_of(folder, ranks=2, links=slow, parallel__k_step=4), (K_STEP,))
    assert kept.request.config.parallel.k_step == 4
    instant = read_links(written(tmp_path, topo(2, 1, None, 1e30)))
    instant = instant._replace(
        fabric=instant.fabric._replace(across=instant.fabric.across._replace(start=0.0, message=0.0))
    )
    fast = choose(request_of(folder, ranks=2, links=instant), ()).settings
    assert next(one.value for one in fast if one.name == K_STEP) == "1"


def small_trace(draw, rows=(6, 9), batches=40):
    """Two tables with rows of different popularity; keys of the second follow those of the first."""
    offsets, keys = [0], []
    for _ in range(batches):
        batch = set()
        first = 0
        for number, count in enumerate(rows):
            chosen = draw.choice(count, 2, p=(weights := np.arange(1, count + 1.0) ** -(number * 1.2)) / weights.sum())
            batch |= {first + int(one) for one in chosen}
            first += count
        keys += sorted(batch)
        offsets.append(len(keys))
    return Trace(np.array(keys), np.ones(len(keys), dtype=np.int32), np.array(offsets), sum(rows))


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_divided_so_that_fewest_rows_are_missed(seed):
    trace = small_trace(np.random.default_rng(seed))
    given = SimpleNamespace(trace=trace, names=["a", "b"], ends=[6, 15])
    request = SimpleNamespace(given=given)
    assert share_slots(request, 3) is None  # a batch has two rows of each
    for num_slots in range(4, 16):
        found = share_slots(request, num_slots)
        slots = {one.name: one.slots for one in found.tables}
        assert sum(slots.values()) <= num_slots
        parts = {}
        for name, (first, end) in {"a": (0, 6), "b": (6, 15)}.items():
            mine = (trace.keys >= first) & (trace.keys < end)
            ends = np.concatenate([[0], np.cumsum(mine)])
            parts[name] = Trace(trace.keys[mine], trace.counts[mine], ends[trace.offsets], 15)
        curves = {name: lru_curve(part) for name, part in parts.items()}

        def missed(sizes, parts=parts, curves=curves):
            return sum(curves[name].at(sizes[name]) * parts[name].keys.shape[0] for name in parts)

        best = min(
            missed({"a": a, "b": b})
            for a, b in itertools.product(range(2, 7), range(2, 10))
            if a + b <= max(num_slots, sum(slots.values()))
        )
        most = trace.keys.shape[0]
        assert found.apart == pytest.approx(missed(slots) / most)
        assert found.apart <= best / most + 0.06  # the hull of a curve is below it by less than that
        assert found.together == pytest.approx(lru_curve(trace).at(num_slots))
