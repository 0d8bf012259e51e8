"""Runs that follow a log: every row once, the bits of a run that was left alone, hours, checkpoints by the clock, expiry."""

import random
import signal

import pytest

from benchmarks.crash.processes import Command
from benchmarks.crash.runs import differences_of, end_of
from hotbed.checkpoint import saver
from hotbed.checkpoint.chain import find, folders_in
from hotbed.errors import ConfigError, RunError
from hotbed.report import write_report
from hotbed.run.run_file import compose
from hotbed.train.build import build
from hotbed.train.follow import Follower, FollowPace
from tests.train.followed import SETTINGS, prepare_clicks, write_hour
from tests.train.small import lines, saved_step

HOURS = 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_clicks(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return prepare_clicks(tmp_path_factory.mktemp("raw"), "raw")


def start(dataset, folder, logs, *sets):
    folder.mkdir(parents=True, exist_ok=True)
    config, problems = compose(None, {"data.path": str(dataset.path)}, [*SETTINGS, f"follow.source={logs}", *sets])
    assert problems == []
    (folder / "config.json").write_text(config.to_json())
    return build(config, dataset, folder).training


class Arriving:
    """Stops a run after so many questions; meanwhile an hour arrives whenever the run waits."""

    def __init__(self, training, logs, hours, stop_at=10**9):
        self.training, self.logs, self.left, self.stop_at = training, logs, list(hours), stop_at
        follower = training.follower
        self._look = follower.loader.look
        follower.loader.look = self.look

    def look(self):
        found = self._look()
        if not found and self.left:
            hour = self.left.pop(0)
            write_hour(self.logs / f"{hour:03}.csv", hour)
            return self._look()
        self.training.follower.is_idle = not found
        return found or True

    def __call__(self):
        return self.training.progress.step >= self.stop_at


def train(training, logs, hours, stop_at=10**9):
    stop = Arriving(training, logs, hours, stop_at)
    reason = training.train(stop)
    training.close()
    return reason


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    (root / "logs").mkdir()
    training = start(dataset, root / "run", root / "logs")
    assert "nothing new has arrived" in train(training, root / "logs", range(1, HOURS + 1))
    return root / "run"


def test_every_row_is_trained_once_and_every_hour_has_a_line(alone):
    found = lines(alone)
    by_hour = [one for one in found if one["kind"] == "hour"]
    assert [one["hour_samples"] for one in by_hour] == [100] * HOURS
    assert found[-1]["samples"] == 100 * HOURS
    assert all(0 < one["auc"] < 1 for one in by_hour)
    assert all(one["drift"]["ids"] > 0 for one in by_hour[1:])
    assert by_hour[-1]["new_ids"]["user"] > 0  # the dataset has none of the last users
    assert saved_step(alone) == 4 * HOURS


def test_the_report_page_shows_the_hours(alone):
    page = write_report(alone).read_text()
    assert "Hour by hour" in page
    assert f"{HOURS} hours were trained as they arrived" in page


@pytest.mark.parametrize("stops", [(1,), (4, 9), (6, 7, 14)])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(dataset, alone, tmp_path, stops):
    logs, run, hours = tmp_path / "logs", tmp_path / "run", list(range(1, HOURS + 1))
    logs.mkdir()
    training = start(dataset, run, logs)
    for stop in stops:
        arriving = Arriving(training, logs, hours, stop)
        assert training.train(arriving) == "interrupted"
        training.close()
        hours = arriving.left
        training = start(dataset, run, logs)
        training.resume()
    train(training, logs, hours)
    assert lines(run) == lines(alone)
    newest = [find(one).folder for one in (run, alone)]
    for name in ("dense", "dense_optimizer"):
        one, other = ((folder / f"{name}.safetensors").read_bytes() for folder in newest)
        assert one == other


def test_ids_expire_by_the_time_of_their_events(raw, tmp_path):
    """The log spans days, the test seconds: rows of the first hour expire when the events are three hours later."""
    logs = tmp_path / "logs"
    logs.mkdir()
    expire = "tables.expire=unused 2h, every 1"
    training = start(raw, tmp_path / "run", logs, "tables.dynamic=true", "tables.hbm=1MiB", expire)
    train(training, logs, [1, 2, 9])
    counts = training.learner.tables.id_counts()["user"]
    assert counts.expired > 0
    assert counts.rows < 41  # those of the last hour only
    patient = start(raw, tmp_path / "other", logs, "tables.dynamic=true", "tables.hbm=1MiB", "tables.expire=unused 2d")
    train(patient, logs, [])
    assert patient.learner.tables.id_counts()["user"].expired == 0


def test_a_run_that_was_stopped_expires_by_the_time_of_events_too(raw, tmp_path):
    expire = ("tables.dynamic=true", "tables.hbm=1MiB", "tables.expire=unused 2h, every 4")
    for name, stops in (("alone", ()), ("stopped", (7,))):
        logs, run, hours = tmp_path / name / "logs", tmp_path / name / "run", list(range(1, 5))
        logs.mkdir(parents=True)
        training = start(raw, run, logs, *expire)
        for stop in stops:
            arriving = Arriving(training, logs, hours, stop)
            training.train(arriving)
            training.close()
            hours = arriving.left
            training = start(raw, run, logs, *expire)
            training.resume()
        train(training, logs, hours)
    assert lines(tmp_path / "alone" / "run") == lines(tmp_path / "stopped" / "run")


class TestPace:
    """What the clock decides."""

    def follower(self, training, pace):
        self.now, self.slept = 0.0, []

        def sleep(seconds):
            self.now += seconds
            self.slept.append(seconds)

        return Follower(training.follower.loader, training.learner.tables, pace, lambda: self.now, sleep)

    @pytest.fixture
    def training(self, dataset, tmp_path):
        (tmp_path / "logs").mkdir()
        training = start(dataset, tmp_path / "run", tmp_path / "logs")
        yield training
        training.close()

    def test_checkpoints_are_due_by_the_minute(self, training):
        follower = self.follower(training, FollowPace(checkpoint=60.0))
        follower.begin(0)
        assert not follower.is_due()
        self.now = 60.0
        assert follower.is_due()
        follower.saved(5)
        assert not follower.is_due()

    def test_what_is_trained_is_saved_soon_after_the_last_of_it_and_then_no_more(self, training):
        follower = self.follower(training, FollowPace(checkpoint=600.0, poll=1.0, idle=30.0))
        self.now = 100.0
        follower.begin(0)
        saves = []

        def save():
            saves.append(self.now)
            follower.saved(7)

        follower.wait(7, lambda: False, save)
        assert len(saves) == 1
        assert 110 <= saves[0] < 112
        assert follower.is_idle
        assert self.now >= 130

    def test_a_checkpoint_that_was_skipped_is_taken_while_waiting_and_not_asked_for_at_every_step(self, training):
        follower = self.follower(training, FollowPace(checkpoint=600.0, poll=1.0, idle=30.0))
        follower.begin(0)
        self.now = 600.0
        assert follower.is_due()
        follower.skipped()
        assert not follower.is_due()
        saves = []

        def save():
            saves.append(self.now)
            follower.saved(7)

        follower.wait(7, lambda: False, save)
        assert len(saves) == 1
        assert 610 <= saves[0] < 612

    def test_a_checkpoint_that_failed_is_taken_again_after_the_interval(self, training):
        follower = self.follower(training, FollowPace(checkpoint=600.0, poll=1.0, idle=2000.0))
        follower.saved(7)  # as far as was known when writing began
        told, saves = [follower.failed], []

        def save():
            saves.append(self.now)
            follower.saved(7)

        follower.wait(7, lambda: False, save, lambda: told.pop()() if told else None)
        assert len(saves) == 1
        assert 600 <= saves[0] < 602

    def test_a_wish_to_stop_is_heard_while_waiting(self, training):
        follower = self.follower(training, FollowPace(poll=3600.0))
        follower.wait(0, lambda: self.now > 1, lambda: None)
        assert self.now < 2


class TestLastCheckpoint:
    """The one of the last step before a run waits, with a saver that does not take it."""

    @pytest.fixture
    def training(self, dataset, tmp_path):
        write_hour(tmp_path / "logs" / "001.csv", 1)
        training = start(dataset, tmp_path / "run", tmp_path / "logs")
        self.now, self.last, follower = 0.0, 4, training.follower
        follower._clock, follower._sleep = lambda: self.now, self.sleep
        follower.is_due = lambda: training.progress.step == self.last
        yield training
        training.close()

    def sleep(self, seconds):
        self.now += max(seconds, 1.0)

    def wait_for_an_hour(self, training):
        training._save_last = lambda reason: None
        training.train(lambda: self.now > 3600)
        assert training.progress.step == self.last

    def test_it_is_taken_later_when_the_saver_was_busy(self, training, tmp_path):
        save = training._saver.save
        training._saver.save = lambda state, *, wait: wait and save(state, wait=wait)
        self.wait_for_an_hour(training)
        assert saved_step(tmp_path / "run") == self.last

    @pytest.mark.parametrize("refusals", [1, 3])
    def test_it_is_taken_later_when_the_disk_refused_it(self, training, tmp_path, monkeypatch, refusals):
        write, left, said = saver.write_checkpoint, [None] * refusals, []

        def refuse(root, state, *rest):
            if state.step == self.last and left:
                left.pop()
                raise RunError("no space") from OSError(28, "No space left on device")
            return write(root, state, *rest)

        monkeypatch.setattr(saver, "write_checkpoint", refuse)
        training.observer.say = training._saver._saver._say = said.append
        training._saver.poll = training._saver.settle  # the clock of the test does not wait for the thread
        self.wait_for_an_hour(training)
        assert saved_step(tmp_path / "run") == self.last
        assert (
            len([one for one in said if "no checkpoint was written; the last one is kept: no space" in one]) == refusals
        )
        assert training.num_failed_checkpoints == refusals


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("train.schedule=cosine",), "train.schedule: must be constant, warmup or decay with follow.source"),
        (("follow.time=ts:fortnight",), "follow.time: --time ts:fortnight"),
        (("follow.max_bad=some",), "follow.max_bad"),
    ],
)
def test_what_cannot_be_together_is_said_before_anything_is_built(dataset, tmp_path, sets, said):
    with pytest.raises(ConfigError, match=said):
        start(dataset, tmp_path / "run", tmp_path, *sets)


@pytest.mark.slow
def test_a_follower_that_is_killed_ends_with_the_bits_of_one_that_was_left_alone(raw, tmp_path):
    """In small form; `python -m benchmarks.follow` kills ten times, while hours arrive."""
    logs = tmp_path / "logs"
    for hour in range(1, 7):
        write_hour(logs / f"{hour:03}.csv", hour)
    settings = (
        *SETTINGS,
        "train.checkpoint_every=2",
        "tables.dynamic=true",
        "tables.hbm=1MiB",
        "tables.expire=unused 2h, every 2",
    )
    sets = [part for one in settings for part in ("--set", one)]

    def arguments(root):
        follow = ["--data", str(raw.path), "--follow", str(logs), "--stop-when-idle", "0.1"]
        return ["train", *follow, *sets, "--out", str(root / "run")]

    ends, draw, changes = {}, random.Random(5), 0
    for name, kills in (("alone", 0), ("killed", 3)):
        root = tmp_path / name
        root.mkdir()
        done = 0
        while True:
            again = ["train", "--resume", str(root / "run")] if folders_in(root / "run" / "checkpoints") else None
            first = [*arguments(root), *(["--overwrite"] if (root / "run" / "config.json").exists() else [])]
            # early: on a busy machine more checkpoints are left out, and a run makes half as many changes as the last one
            ended = Command(again or first, root, draw.randint(5, changes // 4) if done < kills else 0).ended()
            if ended.code != -signal.SIGKILL:
                assert ended.code == 0, ended.text
                break
            done += 1
        changes = changes or ended.num_changes
        assert done > 0 or not kills
        ends[name] = end_of(root / "run")
    assert differences_of(ends["alone"], ends["killed"]) == []
