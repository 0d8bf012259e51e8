"""Step times on wires whose every term can be added up by hand."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import scaling
from benchmarks.cluster import model
from benchmarks.cluster.points import points_of
from hotbed.forecast.network import Cluster, Exchanges, SentBytes
from hotbed.forecast.step_time import (
    NVLINK,
    DenseSum,
    Fabric,
    StepTime,
    Wire,
    Work,
    network,
    replicated_time,
    sharded_time,
    sum_time,
)

FABRIC = Fabric(Wire(1000.0, 0.1, 0.01), Wire(100.0, 0.2, 0.02))
WORK = Work(compute=2.0, dedup=0.5, copy_speed=6000.0)
SENT = Exchanges(SentBytes(4.0, 8.0), SentBytes(500.0, 50.0), SentBytes(500.0, 50.0))


NO_SUM = DenseSum(SentBytes())


def test_one_node():
    cluster, dense = Cluster(1, 8), DenseSum(SentBytes(10.0))
    sent = Exchanges(SentBytes(4.0), SentBytes(500.0), SentBytes(500.0))
    found = sharded_time(cluster, FABRIC, WORK, sent, dense)
    assert found.compute == pytest.approx(2.0 + 0.5 + 6 * 500 / 6000)
    assert found.exposed == pytest.approx(2 * (0.1 + 7 * 0.01 + 0.5))
    numbers, keys, summed = 0.1 + 7 * 0.01, 0.1 + 7 * 0.01 + 0.004, 2 * (0.1 + 3 * 0.01) + 0.01
    assert found.overlapped == pytest.approx(numbers + keys)
    assert found.merge == pytest.approx(summed)
    waiting = sharded_time(cluster, FABRIC, WORK, sent, dense, ahead=False)
    assert waiting.overlapped == 0
    assert waiting.exposed == pytest.approx(found.exposed + found.overlapped)
    assert waiting.exchanges == pytest.approx(found.exchanges)


def test_two_hops_take_their_time():
    found = sharded_time(Cluster(3, 2), FABRIC, WORK, SENT, NO_SUM)
    hops = 0.1 + 0.01 + 0.2 + 2 * 0.02
    assert found.exposed == pytest.approx(2 * (hops + 0.5 + 0.5))
    assert found.overlapped == pytest.approx(2 * hops + 0.004 + 0.08)
    assert found.merge == pytest.approx(2 * (0.1 + 0.01 + 0.2 + 2 * 0.02))


def test_sums_wait_for_trees():
    assert sum_time(Cluster(128, 1), FABRIC, SentBytes(0.0, 100.0)) == pytest.approx(2 * (0.2 + 7 * 0.02) + 1.0)


def test_replicated_waits_for_rows_gradients_and_weights():
    sent = Exchanges(SentBytes(4.0), SentBytes(500.0), SentBytes(600.0))
    found = replicated_time(Cluster(1, 8), FABRIC, WORK, sent, NO_SUM)
    hop = 0.1 + 7 * 0.01
    assert found.compute == pytest.approx(2.0 + 0.5 + 6 * 600 / 6000)
    assert found.exposed == pytest.approx(3 * hop + 0.5 + 0.6)
    assert found.overlapped == pytest.approx(5 * hop + 0.004)
    assert found.merge == pytest.approx(2 * (0.1 + 3 * 0.01))


def test_hidden_and_exposed():
    assert StepTime(compute=4.0, exposed=1.0, overlapped=2.0).step == 5.0
    assert StepTime(compute=4.0, exposed=1.0, overlapped=3.0).step == 6.0  # one more than half of the computation hides
    assert StepTime(compute=4.0, exposed=1.0, merge=3.0).step == 8.0  # a sum of gradients is waited for
    assert StepTime(compute=4.0, exposed=1.0, merge=8.0, k=4).step == 7.0  # so is a merge without a delay
    assert StepTime(compute=4.0, exposed=1.0, merge=12.0, k=4, delay=2).step == 5.5  # two steps of 5 hide 10 of 12
    assert StepTime(compute=4.0, exposed=1.0, merge=9.0, k=4, delay=2).step == 5.0
    assert StepTime(compute=4.0, exposed=1.0, overlapped=2.0, merge=8.0, k=4).exchanges == 5.0


def test_alone_nothing_is_added():
    alone = Cluster(1, 1)
    for time_of in (sharded_time, replicated_time):
        assert time_of(alone, FABRIC, WORK, SENT, NO_SUM) == StepTime(2.0, 0.0)


def test_a_card_is_shared():
    assert network(400, ranks=8).speed == pytest.approx(network(400).speed / 8) == pytest.approx(5e9)
    assert network(400).speed < NVLINK.speed


def test_the_page_shows_what_its_command_makes():
    docs = Path(__file__).parents[2] / "docs"
    page, projection, found = (docs / "scaling.md").read_text(), scaling.Projection(), scaling.ClusterModel()
    tables = [scaling.measured_table(), scaling.cluster_table(found), model.page(found.points, found.constants)]
    for table in (*tables, scaling.machines_table(found), scaling.network_table(projection)):
        assert table in page
    assert scaling.draw(projection, found) == (docs / "scaling.svg").read_text()


def test_the_fit_finds_the_constants_of_its_own_model():
    """Steps made by the model: the fit returns its constants, and predicts shapes that it has not seen."""
    constants = model.Constants(work=1.3, overhead=2e-3, per_rate=1.1, byte=2e-9, start=3e-4)
    made = [
        model.Measured(point.nodes, point.local, point.gigabits, point.way, 0.006 + 0.001 * point.ranks, 0.0)
        for shape in ((1, 2), (2, 1), (4, 1), (2, 2))
        for point in points_of(*shape)
    ]
    made = [point._replace(seconds=model.predict(point, constants).step) for point in made]
    found = model.fit([point for point in made if point.is_fitted])
    assert tuple(found) == pytest.approx(tuple(constants), rel=1e-6)
    assert max(abs(model.error_of(point, found)) for point in made) < 1e-6
    assert {point.shape for point in made if not point.is_fitted} == {"4x1"}


def test_a_constant_is_not_negative():
    """A column that only a negative weight would fit is left out."""
    matrix = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert model._non_negative(matrix, np.array([1.0, 4.0, 7.0])).tolist() == pytest.approx([30 / 14, 0.0])
