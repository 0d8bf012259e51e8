"""A log that is followed in a bucket: the files, lines and bits of a local folder, whatever the server does meanwhile."""

import pytest

from hotbed.checkpoint.chain import find
from hotbed.data.follow.folder import FolderSource
from hotbed.data.follow.source import DUPLICATE, TRAIN, Journal
from hotbed.data.raw_reader import RawReader
from hotbed.data.times import TimeColumn
from hotbed.errors import FormatError, RemoteError
from hotbed.files import path_of
from hotbed.run.run_file import compose
from hotbed.train.build import build
from tests.train.followed import SETTINGS, prepare_clicks, write_hour
from tests.train.small import lines

HOURS = 3


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_clicks(tmp_path_factory.mktemp("data"))


@pytest.fixture
def put(bucket, tmp_path):
    """Writes an hour to the log in the bucket; its local copy."""

    def write(name, hour):
        local = write_hour(tmp_path / "sent" / name, hour)
        (bucket / "logs" / name).put(local)
        return local

    return write


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "arrivals.jsonl")


def take(bucket, journal):
    found = FolderSource(bucket / "logs", settle=0).arrived(journal)
    journal.append(found)
    return [(one.name, one.status) for one in found]


def rows_of(dataset, bucket, arrival):
    reader = RawReader(dataset.path, [], time=TimeColumn("ts"), needs_labels=True)
    return sum(len(chunk.lines) for chunk in FolderSource(bucket / "logs", settle=0).chunks(arrival, reader))


def test_objects_are_taken_as_files_are(bucket, put, journal):
    assert take(bucket, journal) == []
    for name, hour in (("b.csv", 1), ("day=1/a.csv", 2), ("c.csv", 1)):
        put(name, hour)
    for name in ("_SUCCESS", ".a.csv", "a.csv.tmp", "_tmp/a.csv", "day=1/.a.csv"):
        put(name, 5)
    assert take(bucket, journal) == [("b.csv", TRAIN), ("c.csv", DUPLICATE), ("day=1/a.csv", TRAIN)]
    assert take(bucket, journal) == []


def test_a_bucket_that_does_not_exist(bucket, journal):
    with pytest.raises(RemoteError, match="no such bucket"):
        FolderSource(path_of("s3://no-such-bucket/logs")).arrived(journal)


def test_an_object_that_changed_after_it_was_taken(dataset, bucket, put, journal):
    local = put("a.csv", 1)
    take(bucket, journal)
    assert rows_of(dataset, bucket, journal.entries[0]) == 100
    text = local.read_bytes()
    (bucket / "logs" / "a.csv").put(text.replace(b"u1,", b"u2,"))  # of the same size
    with pytest.raises(FormatError, match="has changed since"):
        rows_of(dataset, bucket, journal.entries[0])
    (bucket / "logs" / "a.csv").unlink()
    with pytest.raises(FormatError, match="cannot be read now"):
        rows_of(dataset, bucket, journal.entries[0])
    (bucket / "logs" / "a.csv").put(text)
    assert rows_of(dataset, bucket, journal.entries[0]) == 100


def follow(dataset, run, logs, hours, put_hour, stop_at=10**9):
    """Train until all hours have come, or up to a step; an hour comes whenever the run waits."""
    run.mkdir(exist_ok=True)
    sets = [*SETTINGS, f"follow.source={logs}"]
    config, problems = compose(None, {"data.path": str(dataset.path)}, sets)
    assert problems == []
    (run / "config.json").write_text(config.to_json())
    training = build(config, dataset, run).training
    if (run / "arrivals.jsonl").exists():
        training.resume()
    follower = training.follower
    look = follower.loader.look

    def look_again():
        if look():
            return True
        if hours:
            put_hour(hours.pop(0))
            return look()
        follower.is_idle = True
        return True

    follower.loader.look = look_again
    training.train(lambda: training.progress.step >= stop_at)
    training.close()


def test_a_follower_of_a_bucket_has_the_bits_of_a_local_one(dataset, bucket, put, s3_server, tmp_path):
    here = tmp_path / "logs"
    here.mkdir()
    follow(dataset, tmp_path / "here", here, [1, 2, 3], lambda hour: write_hour(here / f"{hour}.csv", hour))
    left, logs = [1, 2, 3], str(bucket / "logs")
    secret = logs.replace("s3://", "s3://follower:secret-of-follower@")

    def put_hour(hour):
        s3_server.kill()
        s3_server.start()
        put(f"{hour}.csv", hour)

    follow(dataset, tmp_path / "there", logs, left, put_hour, stop_at=6)
    follow(dataset, tmp_path / "there", logs, left, put_hour)
    assert lines(tmp_path / "there") == lines(tmp_path / "here")
    newest = [find(tmp_path / one).folder for one in ("here", "there")]
    for name in ("dense.safetensors", "dense_optimizer.safetensors"):
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes()
    config, _ = compose(None, {}, [f"follow.source={secret}"])
    assert config.follow.source == logs
