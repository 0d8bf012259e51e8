"""Step times on wires whose every term can be added up by hand."""

from pathlib import Path

import pytest

from benchmarks import scaling
from hotbed.forecast.network import Cluster, Exchanges, SentBytes
from hotbed.forecast.step_time import (
    NVLINK,
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
WORK = Work(compute=2.0, deal=0.5, copy_speed=6000.0)
SENT = Exchanges(SentBytes(4.0, 8.0), SentBytes(500.0, 50.0), SentBytes(500.0, 50.0))


def test_one_node():
    cluster, dense = Cluster(1, 8), SentBytes(10.0)
    found = sharded_time(cluster, FABRIC, WORK, Exchanges(SentBytes(4.0), SentBytes(500.0), SentBytes(500.0)), dense)
    assert found.compute == pytest.approx(2.0 + 0.5 + 6 * 500 / 6000)
    assert found.exposed == pytest.approx(2 * (0.1 + 7 * 0.01 + 0.5))
    numbers, keys, summed = 0.1 + 7 * 0.01, 0.1 + 7 * 0.01 + 0.004, 2 * (0.1 + 3 * 0.01) + 0.01
    assert found.beside == pytest.approx(numbers + keys + summed)


def test_two_hops_take_their_time():
    found = sharded_time(Cluster(3, 2), FABRIC, WORK, SENT, SentBytes())
    hops = 0.1 + 0.01 + 0.2 + 2 * 0.02
    assert found.exposed == pytest.approx(2 * (hops + 0.5 + 0.5))
    assert found.beside == pytest.approx(2 * hops + 0.004 + 0.08 + 2 * (0.1 + 0.01 + 0.2 + 2 * 0.02))


def test_sums_wait_for_trees():
    assert sum_time(Cluster(128, 1), FABRIC, SentBytes(0.0, 100.0)) == pytest.approx(2 * (0.2 + 7 * 0.02) + 1.0)


def test_replicated_waits_for_rows_gradients_and_weights():
    found = replicated_time(
        Cluster(1, 8), FABRIC, WORK, Exchanges(SentBytes(4.0), SentBytes(500.0), SentBytes(600.0)), SentBytes()
    )
    hop = 0.1 + 7 * 0.01
    assert found.compute == pytest.approx(2.0 + 0.5 + 6 * 600 / 6000)
    assert found.exposed == pytest.approx(3 * hop + 0.5 + 0.6)
    assert found.beside == pytest.approx(5 * hop + 0.004 + 2 * (0.1 + 3 * 0.01))


def test_hidden_and_exposed():
    assert StepTime(compute=4.0, exposed=1.0, beside=2.0).step == 5.0
    assert StepTime(compute=4.0, exposed=1.0, beside=3.0).step == 6.0  # one more than half of the computation hides
    assert StepTime(compute=4.0, exposed=1.0, beside=2.0).floor == 4.0
    assert StepTime(compute=4.0, exposed=3.0, beside=2.0).floor == 5.0


def test_alone_nothing_is_added():
    alone = Cluster(1, 1)
    for time_of in (sharded_time, replicated_time):
        assert time_of(alone, FABRIC, WORK, SENT, SentBytes()) == StepTime(2.0, 0.0, 0.0)


def test_a_card_is_shared():
    assert network(400, ranks=8).speed == pytest.approx(network(400).speed / 8) == pytest.approx(5e9)
    assert network(400).speed < NVLINK.speed


def test_the_page_shows_what_its_command_makes():
    docs = Path(__file__).parents[2] / "docs"
    page, projection = (docs / "scaling.md").read_text(), scaling.Projection()
    for table in (scaling.measured_table(), scaling.node_table(projection), scaling.network_table(projection)):
        assert table in page
    assert scaling.draw(projection) == (docs / "scaling.svg").read_text()
