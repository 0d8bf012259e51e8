"""A topic as a source: against a stand-in for the client's consumer, and over the wire against librdkafka's mock cluster.

The mock cluster is a broker in this process that speaks Kafka's protocol over TCP; a broker of its own needs Java.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from hotbed.data.follow.kafka import SETTINGS, KafkaSource, Topic, connect_consumer
from hotbed.data.follow.loader import FollowLoader
from hotbed.data.follow.source import Journal
from hotbed.data.raw_reader import RawReader
from hotbed.data.times import TimeColumn
from hotbed.errors import ConfigError, DataError, FormatError
from tests.train.followed import START, prepare_clicks

confluent_kafka = pytest.importorskip("confluent_kafka")
END_OF_PARTITION = confluent_kafka.KafkaError._PARTITION_EOF


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_clicks(tmp_path_factory.mktemp("data"))


def clicks(seed, rows):
    rng = np.random.default_rng(seed)
    users, labels = rng.integers(9, size=rows).tolist(), rng.integers(2, size=rows).tolist()
    found = [
        {"ts": START + n, "click": click, "user": f"u{user}", "ad": f"a{n % 8}", "price": 0.5}
        for n, (user, click) in enumerate(zip(users, labels))
    ]
    return [json.dumps(row).encode() for row in found]


class FakeConsumer:
    """The consumer's methods over lists; `low` messages of a partition are deleted."""

    def __init__(self, partitions):
        self.partitions, self.low = partitions, dict.fromkeys(partitions, 0)
        self.assigned, self.closed = None, False

    def list_topics(self, topic, timeout):
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=self.partitions)})

    def get_watermark_offsets(self, partition, timeout):
        number = partition[1]
        return self.low[number], len(self.partitions[number])

    def assign(self, partitions):
        self.assigned = list(partitions[0]) if partitions else None

    def consume(self, num_messages, timeout):
        _, number, at = self.assigned
        found = self.partitions[number][at : at + num_messages]
        self.assigned[2] += len(found)
        if not found:
            return [FakeMessage(at, None, confluent_kafka.KafkaError(END_OF_PARTITION))]
        return [FakeMessage(at + n, value) for n, value in enumerate(found) if value is not None]

    def close(self):
        self.closed = True


class FakeMessage(SimpleNamespace):
    def __init__(self, offset, value, error=None):
        super().__init__(offset=lambda: offset, value=lambda: value, error=lambda: error)


def source_of(consumer, **options):
    place = lambda topic, partition, offset=-1: (topic, partition, offset)  # noqa: E731
    options = {"settle": 0, "block": 40, **options}
    return KafkaSource(Topic("here:9092", "clicks"), connect=lambda _: consumer, place=place, **options)


def loader_of(dataset, source, journal):
    reader = RawReader(dataset.path, [], time=TimeColumn("ts"), needs_labels=True)
    return FollowLoader(dataset, source, journal, reader, 32)


def read_all(loader, steps=0):
    return [(batch.labels.tolist(), batch.ids.tolist(), loader.trained().size) for batch in loader.epoch(0, steps)]


def test_blocks_of_partitions_take_turns_and_every_message_comes_once(dataset, tmp_path):
    topic = {0: clicks(0, 100), 1: clicks(1, 50)}
    loader = loader_of(dataset, source_of(FakeConsumer(topic)), Journal(tmp_path / "a.jsonl"))
    assert loader.look()
    found = [one.name for one in loader.journal.entries]
    assert found == [
        "clicks/0/000000000000-000000000040",
        "clicks/1/000000000000-000000000040",
        "clicks/0/000000000040-000000000080",
    ]
    loader.look()  # what is no whole block, when nothing else is there
    assert [one.size for one in loader.journal.entries] == [40, 40, 40, 20, 10]
    sizes = [size for _, _, size in read_all(loader)]
    assert sizes == [32, 8, 32, 8, 32, 8, 20, 10]
    assert not loader.look()
    topic[1] += clicks(2, 5)
    assert loader.look()
    assert [size for _, _, size in read_all(loader, 8)] == [5]


def test_a_range_that_is_given_up_is_left_out(dataset, tmp_path):
    left_out = "clicks/0/000000000040-000000000080"
    source = source_of(FakeConsumer({0: clicks(0, 120)}), skip=[left_out])
    loader = loader_of(dataset, source, Journal(tmp_path / "a.jsonl"))
    loader.look()
    assert left_out in [one.name for one in loader.journal.entries]
    assert [size for _, _, size in read_all(loader)] == [32, 8, 32, 8]
    assert not loader.look()


class LaggingConsumer(FakeConsumer):
    """Reads from a replica that is behind the leader: its partition ends early, and more comes later."""

    def __init__(self, partitions, has):
        super().__init__(partitions)
        self._has = has

    def consume(self, num_messages, timeout):
        _, number, at = self.assigned
        if at < self._has:
            return super().consume(min(num_messages, self._has - at), timeout)
        self._has = len(self.partitions[number])
        return [FakeMessage(at, None, confluent_kafka.KafkaError(END_OF_PARTITION))]


def test_the_end_of_a_replica_that_lags_is_not_the_end_of_a_range(dataset, tmp_path):
    topic = {0: clicks(0, 40)}
    loader = loader_of(dataset, source_of(LaggingConsumer(topic, 25)), Journal(tmp_path / "a.jsonl"))
    loader.look()
    assert [size for _, _, size in read_all(loader)] == [32, 8]


def test_a_part_of_a_block_waits_for_more(dataset, tmp_path):
    now = [0.0]
    source = source_of(FakeConsumer({0: clicks(0, 10)}), settle=5, clock=lambda: now[0])
    journal = Journal(tmp_path / "a.jsonl")
    assert source.arrived(journal) == []
    now[0] = 4.9
    assert source.arrived(journal) == []
    now[0] = 5.0
    assert [one.size for one in source.arrived(journal)] == [10]


def test_a_killed_follower_reads_the_ranges_that_were_written_down(dataset, tmp_path):
    topic = {0: clicks(0, 70), 1: clicks(1, 33)}
    whole = loader_of(dataset, source_of(FakeConsumer(topic)), Journal(tmp_path / "a.jsonl"))
    whole.look()
    whole.look()
    expected = read_all(whole)
    first = loader_of(dataset, source_of(FakeConsumer(topic)), Journal(tmp_path / "a.jsonl"))
    batches = first.epoch(0)
    for _ in range(2):
        next(batches)
        first.trained()
    saved = json.loads(json.dumps(first.state()))
    topic[0] += clicks(3, 200)  # while nobody was there
    second = loader_of(dataset, source_of(FakeConsumer(topic)), Journal(tmp_path / "a.jsonl"))
    second.load_state(saved)
    assert read_all(second, 2) == expected[2:]
    assert second.look()


def test_bad_messages_are_bad_rows_and_gaps_are_not(dataset, tmp_path):
    messages = [*clicks(0, 396), b"not json", b"[1]", None, None]
    loader = loader_of(dataset, source_of(FakeConsumer({0: messages}), block=400), Journal(tmp_path / "a.jsonl"))
    loader.look()
    facts = [loader.trained() for _ in loader.epoch(0)]
    assert sum(one.size for one in facts) == 396
    assert facts[-1].bad_rows == 2


def test_a_column_that_no_message_has_is_missing_and_a_label_must_be_there(dataset, tmp_path):
    rows = [json.dumps({"ts": START, "user": "u1", "ad": "a1"}).encode()] * 3
    loader = loader_of(dataset, source_of(FakeConsumer({0: rows})), Journal(tmp_path / "a.jsonl"))
    loader.look()
    with pytest.raises(FormatError, match=r"3 of 3 rows are bad"):
        read_all(loader)


def test_ids_that_text_can_spell_in_several_ways_are_refused(dataset, tmp_path):
    rows = [json.dumps({"ts": START, "click": 1, "user": 1.5, "ad": "a1", "price": 1}).encode()] * 3
    loader = loader_of(dataset, source_of(FakeConsumer({0: rows})), Journal(tmp_path / "a.jsonl"))
    loader.look()
    with pytest.raises(FormatError, match=r"user \(double\)"):
        read_all(loader)


def test_a_topic_that_was_made_anew_is_an_error(dataset, tmp_path):
    """Its first messages have offsets that were trained already; they would never be."""
    topic, journal = {0: clicks(0, 100)}, Journal(tmp_path / "a.jsonl")
    loader_of(dataset, source_of(FakeConsumer(topic)), journal).look()
    with pytest.raises(DataError, match="ends at offset 30, and messages up to 80 were taken"):
        loader_of(dataset, source_of(FakeConsumer({0: clicks(1, 30)})), journal).look()
    assert len(journal) == 2


def test_messages_that_are_gone_are_an_error(dataset, tmp_path):
    consumer = FakeConsumer({0: clicks(0, 100)})
    loader = loader_of(dataset, source_of(consumer), Journal(tmp_path / "a.jsonl"))
    loader.look()
    consumer.low[0] = 50
    with pytest.raises(DataError, match=r"from offset 0 on were not trained and are gone"):
        read_all(loader)


@pytest.mark.parametrize("uri", ["kafka://", "kafka://here:1", "kafka://here:1/a/b", "http://here/a"])
def test_a_topic_has_a_host_and_a_name(uri):
    with pytest.raises(ConfigError, match="is not a topic"):
        Topic.parse(uri)


def test_secrets_are_in_a_file_that_the_environment_names(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="without user and password") as refused:
        Topic.parse("kafka://me:hush@here:1/a")
    assert "hush" not in str(refused.value)
    monkeypatch.setenv(SETTINGS, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="cannot be read"):
        connect_consumer(Topic("here:1", "a"))


def test_over_the_wire(dataset, tmp_path):
    producer = confluent_kafka.Producer({"bootstrap.servers": "unused", "test.mock.num.brokers": 1, "log_level": 0})
    broker = next(iter(producer.list_topics(timeout=10).brokers.values()))
    sent = clicks(0, 50)
    for content in sent:
        producer.produce("clicks", content, partition=0)
    producer.flush(10)
    source = KafkaSource(Topic.parse(f"kafka://{broker.host}:{broker.port}/clicks"), settle=0, block=20)
    try:
        loader = loader_of(dataset, source, Journal(tmp_path / "a.jsonl"))
        loader.look()
        loader.look()
        found = read_all(loader)
        expected = loader_of(dataset, source_of(FakeConsumer({0: sent}), block=20), Journal(tmp_path / "b.jsonl"))
        expected.look()
        expected.look()
        assert found == read_all(expected)
        assert [size for _, _, size in found] == [20, 20, 10]
    finally:
        source.close()
