"""A Kafka topic as a Source: JSON objects, one a message, column names to values; needs `pip install 'hotbed[kafka]'`.

    kafka://broker:9092/clicks       several brokers: kafka://one:9092,two:9092/clicks

An arrival is a range of offsets of one partition: up to BLOCK messages, fewer when the first of them has
waited for `settle` seconds. The journal of the run has the ranges in the order in which they are trained, and the checkpoint a
place in it; the broker's own consumer offsets are neither read nor written. So every message is trained once, whatever is
killed, and a resumed run trains the ranges that were written down in the same order. Partitions take turns.

Messages that are not JSON objects are bad rows. Messages that the broker has deleted before they were read are an error.
Settings of the client (security, proxies) come from the file that $HOTBED_KAFKA_CONFIG names, with lines `name=value`: they
hold secrets, and nothing of them is written down.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from hotbed.data.follow.source import Arrival, Journal
from hotbed.data.formats.chunk import BadRow, Chunk, shorten
from hotbed.data.formats.parquet import read_columns, shown_row
from hotbed.data.raw_reader import RawReader
from hotbed.errors import ConfigError, DataError
from hotbed.host.extras import how_to_install

BLOCK = 16_384  # messages of an arrival, at most
SETTINGS = "HOTBED_KAFKA_CONFIG"
_PATIENCE = 30.0  # seconds for the broker to answer


class Message(Protocol):
    """One message of the client."""

    def error(self) -> Any: ...

    def offset(self) -> int | None: ...

    def value(self) -> bytes | None: ...


class Consumer(Protocol):
    """What is used of confluent_kafka.Consumer."""

    def list_topics(self, topic: str, timeout: float) -> Any: ...

    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int]: ...

    def assign(self, partitions: list[Any]) -> None: ...

    def consume(self, num_messages: int, timeout: float) -> list[Message]: ...

    def close(self) -> None: ...


class Topic(NamedTuple):
    """What a URI names."""

    brokers: str
    name: str

    @classmethod
    def parse(cls, uri: str) -> Topic:
        parts = urlsplit(uri)
        topic = parts.path.strip("/")
        if parts.scheme != "kafka" or not parts.netloc or not topic or "/" in topic or parts.query:
            raise ConfigError(f"{uri!r} is not a topic: write kafka://HOST:PORT/TOPIC.")
        if "@" in parts.netloc:
            raise ConfigError(f"a topic is given without user and password; put them into the file of ${SETTINGS}.")
        return cls(parts.netloc, topic)


class KafkaSource:
    """A topic; `connect` and `place` make a consumer, and a (topic, partition, offset) for it."""

    def __init__(
        self,
        topic: Topic,
        *,
        settle: float = 5.0,
        skip: Collection[str] = (),
        block: int = BLOCK,
        connect: Callable[[Topic], Consumer] | None = None,
        place: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = f"kafka://{topic.brokers}/{topic.name}"
        self._topic, self._settle, self._block, self._clock = topic, settle, block, clock
        self._skip = frozenset(skip)
        self._place = place or _client().TopicPartition
        self._consumer = (connect or connect_consumer)(topic)
        self._waiting: dict[int, float] = {}  # partition -> since when a part of a block is there

    def arrived(self, taken: Journal) -> list[Arrival]:
        now, turns = self._clock(), []
        for partition in self._partitions():
            low, high = self._watermarks(partition)
            begin = taken.end_of(self._group(partition))
            begin = low if begin < 0 else begin
            if begin < low:
                raise _deleted(self.name, partition, begin, low)
            if begin > high:
                raise DataError(
                    f"{self.name}: partition {partition} ends at offset {high}, and messages up to {begin} were taken. It is "
                    "no longer the same topic, or the broker has lost messages: start a new run with --warm-start."
                )
            blocks = [(at, at + self._block) for at in range(begin, high - self._block + 1, self._block)]
            rest = begin + len(blocks) * self._block
            if rest == high or blocks:
                self._waiting.pop(partition, None)
            elif now - self._waiting.setdefault(partition, now) >= self._settle:
                blocks.append((rest, high))
                del self._waiting[partition]
            turns.append([self._arrival(partition, *one, int(now)) for one in blocks])
        longest = max(map(len, turns), default=0)
        return [one[turn] for turn in range(longest) for one in turns if turn < len(one)]

    def chunks(self, arrival: Arrival, reader: RawReader) -> Iterator[Chunk]:
        """All messages of the range in one chunk; none of one that is left out."""
        if arrival.name in self._skip:
            return
        partition, begin = int(arrival.group.rpartition("/")[2]), arrival.end - arrival.size
        low, high = self._watermarks(partition)
        if begin < low or high < arrival.end:
            raise _deleted(self.name, partition, begin, low)
        yield chunk_of(self._messages(partition, begin, arrival.end), arrival.name, reader)

    def close(self) -> None:
        self._consumer.close()

    def _messages(self, partition: int, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """(offset, content) of a range; offsets of a compacted topic may have gaps."""
        self._consumer.assign([self._place(self._topic.name, partition, begin)])
        at, deadline = begin, time.monotonic() + _PATIENCE
        try:
            while at < end:
                found = self._consumer.consume(min(end - at, 1000), 1.0)
                for message in found:
                    if message.error() is not None:
                        at = self._after_error(message, at, end)
                    elif (offset := message.offset() or 0) < end:
                        yield offset, message.value() or b""
                        at = offset + 1
                    else:
                        at = end  # the range ended in a gap
                deadline = time.monotonic() + _PATIENCE if found else deadline
                if time.monotonic() > deadline:
                    raise DataError(
                        f"{self.name}: no message came for {_PATIENCE:.0f} s, though partition {partition} has offsets up to "
                        f"{end}. Is the broker alive? The run can be resumed."
                    )
        finally:
            self._consumer.assign([])

    def _after_error(self, message: Message, at: int, end: int) -> int:
        """The offset to continue from; a DataError for what does not pass by itself.

        The end of a partition is that of one replica, which may be behind the one that named the range: then the rest follows.
        """
        error, reached = message.error(), message.offset()
        if error.code() == _END_OF_PARTITION:
            return at if reached is not None and reached < end else end
        if error.retriable():
            return at
        raise DataError(f"{self.name} cannot be read at offset {at}: {error.str()}. The run can be resumed.")

    def _partitions(self) -> list[int]:
        try:
            found = self._consumer.list_topics(self._topic.name, _PATIENCE).topics[self._topic.name]
        except Exception as error:
            raise DataError(f"{self.name} cannot be reached: {error}. The run can be resumed.") from error
        if found.error is not None or not found.partitions:
            raise DataError(f"{self.name}: there is no topic {self._topic.name!r} ({found.error}).")
        return sorted(found.partitions)

    def _watermarks(self, partition: int) -> tuple[int, int]:
        try:
            return self._consumer.get_watermark_offsets(self._place(self._topic.name, partition), _PATIENCE)
        except Exception as error:
            raise DataError(f"{self.name} cannot be reached: {error}. The run can be resumed.") from error

    def _group(self, partition: int) -> str:
        return f"{self._topic.name}/{partition}"

    def _arrival(self, partition: int, begin: int, end: int, now: int) -> Arrival:
        name = f"{self._group(partition)}/{begin:012}-{end:012}"
        return Arrival(name, now, name, end - begin, group=self._group(partition), end=end)


_END_OF_PARTITION = -191  # KafkaError._PARTITION_EOF


def chunk_of(messages: Iterator[tuple[int, bytes]], name: str, reader: RawReader) -> Chunk:
    """Messages as a chunk of typed columns; the line of a row is its offset."""
    rows: list[dict[str, Any]] = []
    offsets: list[int] = []
    bad: list[BadRow] = []
    for offset, content in messages:
        try:
            row = json.loads(content)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
            offsets.append(offset)
        else:
            bad.append(BadRow(name, offset, "not a JSON object", shorten(content.decode(errors="replace"))))
    names = [one for one in dict.fromkeys(key for row in rows for key in row) if reader.is_wanted(one)]
    missing = [one for one in reader.columns if one not in names]
    arrays = [_array([row.get(one) for row in rows]) for one in [*names, *missing]]
    batch = pa.RecordBatch.from_arrays(arrays, names=[*names, *missing])
    reader.check_types({field.name: field.type for field in batch.schema}, Path(name))
    columns = read_columns(batch, Path(name), reader.time_name)
    return Chunk(name, columns, np.array(offsets, dtype=np.int64), lambda row: shown_row(batch, row), bad, 0)


def _array(values: list[Any]) -> pa.Array:
    """Values of one type, as JSON has it; mixed ones as text."""
    try:
        found = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        found = pa.array([None if one is None else one if isinstance(one, str) else json.dumps(one) for one in values])
    return found.cast(pa.string()) if pa.types.is_null(found.type) else found


def connect_consumer(topic: Topic) -> Consumer:
    """A consumer of its own: it joins no group and commits nothing."""
    settings = {
        "bootstrap.servers": topic.brokers,
        "group.id": "hotbed",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        **_own_settings(),
    }
    consumer: Consumer = _client().Consumer(settings)
    return consumer


def _own_settings() -> dict[str, str]:
    named = os.environ.get(SETTINGS)
    if not named:
        return {}
    try:
        lines = Path(named).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"${SETTINGS} names {named}, which cannot be read: {error.strerror}.") from error
    pairs = [line.partition("=") for line in lines if line.strip() and not line.startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _client() -> Any:
    try:
        import confluent_kafka
    except ImportError as error:
        raise ConfigError(f"a kafka:// source needs confluent-kafka: {how_to_install('kafka')}") from error
    return confluent_kafka


def _deleted(name: str, partition: int, begin: int, low: int) -> DataError:
    return DataError(
        f"{name}: messages of partition {partition} from offset {begin} on were not trained and are gone; the broker has those "
        f"from {low} on. Keep messages for longer than a follower may be away (retention.ms), or start a new run with "
        "--warm-start."
    )
