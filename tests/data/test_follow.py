"""A folder to which files are added: which are taken, in which order, once; and batches that depend on nothing else."""

import json
import os

import numpy as np
import pytest

from hotbed.data.follow import folder
from hotbed.data.follow.folder import FolderSource
from hotbed.data.follow.loader import FollowLoader, Place
from hotbed.data.follow.source import DUPLICATE, LATE, SKIPPED, TRAIN, Arrival, Journal
from hotbed.data.raw_reader import RawReader
from hotbed.data.times import TimeColumn
from hotbed.errors import DataError, FormatError, RunError
from hotbed.run.config import FollowConfig
from hotbed.train.follow import open_source
from tests.train.followed import START, prepare_clicks, write_hour


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_clicks(tmp_path_factory.mktemp("data"))


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "arrivals.jsonl")


def loader_of(dataset, logs, journal, batch_size=32, **options):
    reader = RawReader(dataset.path, [], time=TimeColumn("ts"), needs_labels=True)
    return FollowLoader(dataset, FolderSource(logs, settle=0, **options), journal, reader, batch_size)


def take(source, journal):
    found = source.arrived(journal)
    journal.append(found)
    return [(one.name, one.status) for one in found]


class TestFolder:
    def test_names_give_the_order_of_files_that_are_there_together(self, logs, journal):
        for hour, name in ((1, "b.csv"), (0, "a.csv"), (2, "day=2/a.csv")):
            write_hour(logs / name, hour)
        assert take(FolderSource(logs, settle=0), journal) == [
            ("a.csv", TRAIN),
            ("b.csv", TRAIN),
            ("day=2/a.csv", TRAIN),
        ]
        assert take(FolderSource(logs, settle=0), journal) == []

    @pytest.mark.parametrize(
        "name", [".hidden.csv", "_SUCCESS", "a.csv.tmp", "a.csv.part", "a.csv._COPYING_", "_tmp/a.csv"]
    )
    def test_a_file_that_is_being_written_is_not_taken(self, logs, journal, name):
        write_hour(logs / name, 0)
        assert take(FolderSource(logs, settle=0), journal) == []

    def test_a_file_is_taken_when_it_has_come_to_rest_and_those_behind_it_wait(self, logs, journal):
        write_hour(logs / "a.csv", 0)
        write_hour(logs / "b.csv", 1)
        os.utime(logs / "a.csv", (1000, 1000))
        os.utime(logs / "b.csv", (900, 900))
        assert take(FolderSource(logs, settle=5, clock=lambda: 1004.0), journal) == []
        assert len(take(FolderSource(logs, settle=5, clock=lambda: 1005.0), journal)) == 2

    def test_a_time_in_the_future_holds_up_nobody_for_longer_than_it_takes_to_settle(self, logs, journal):
        for name, changed in (("a.csv", 99_000), ("b.csv", 900)):
            write_hour(logs / name, changed)
            os.utime(logs / name, (changed, changed))
        seconds = [0.0]
        source = FolderSource(logs, settle=5, clock=lambda: 1000.0, watch=lambda: seconds[0])
        assert take(source, journal) == []
        seconds[0] = 4.0
        with (logs / "a.csv").open("a") as file:
            file.write("\n")
        os.utime(logs / "a.csv", (99_000, 99_000))
        assert take(source, journal) == []
        seconds[0] = 8.9  # it was still written at 4
        assert take(source, journal) == []
        seconds[0] = 9.0
        assert take(source, journal) == [("a.csv", TRAIN), ("b.csv", TRAIN)]
        assert [one.time for one in journal.entries] == [1000, 900]

    def test_an_empty_file_is_not_there_yet(self, logs, journal):
        (logs / "a.csv").touch()
        assert take(FolderSource(logs, settle=0), journal) == []

    def test_files_wait_for_an_empty_one_before_them_until_it_has_come_to_rest(self, logs, journal):
        """Its writer may have it open: it was taken later as a late file, or left out."""
        write_hour(logs / "b.csv", 1)
        (logs / "a.csv").touch()
        os.utime(logs / "a.csv", (1000, 1000))
        os.utime(logs / "b.csv", (900, 900))
        assert take(FolderSource(logs, settle=5, clock=lambda: 1004.0), journal) == []
        assert take(FolderSource(logs, settle=5, clock=lambda: 1005.0), journal) == [("b.csv", TRAIN)]

    def test_files_wait_for_one_that_grows_while_it_is_looked_at(self, logs, journal, monkeypatch):
        for number, name in enumerate(("a.csv", "b.csv", "c.csv")):
            write_hour(logs / name, number)
        real = folder.digest

        def grows(path):
            mark = real(path)
            if path.name == "b.csv":
                with path.open("a") as file:
                    file.write("\n")
            return mark

        monkeypatch.setattr(folder, "digest", grows)
        source = FolderSource(logs, settle=0, train_late=False)
        assert take(source, journal) == [("a.csv", TRAIN)]
        monkeypatch.undo()
        assert take(source, journal) == [("b.csv", TRAIN), ("c.csv", TRAIN)]

    def test_nobody_waits_for_a_file_that_is_removed_while_it_is_looked_at(self, logs, journal, monkeypatch):
        for number, name in enumerate(("a.csv", "b.csv")):
            write_hour(logs / name, number)
        real = folder.digest

        def goes(path):
            if path.name == "a.csv":
                path.unlink()
            return real(path)

        monkeypatch.setattr(folder, "digest", goes)
        assert take(FolderSource(logs, settle=0), journal) == [("b.csv", TRAIN)]

    def test_a_late_file_is_trained_or_left_out_as_asked(self, logs, journal):
        write_hour(logs / "b.csv", 1)
        take(FolderSource(logs, settle=0), journal)
        write_hour(logs / "a.csv", 0)
        write_hour(logs / "aa.csv", 2)
        assert FolderSource(logs, settle=0).arrived(journal)[0].status == LATE
        assert take(FolderSource(logs, settle=0, train_late=False), journal) == [
            ("a.csv", SKIPPED),
            ("aa.csv", SKIPPED),
        ]

    def test_the_same_content_under_another_name_is_not_trained_again(self, logs, journal):
        text = write_hour(logs / "a.csv", 0).read_text()
        (logs / "b.csv").write_text(text)
        assert take(FolderSource(logs, settle=0), journal) == [("a.csv", TRAIN), ("b.csv", DUPLICATE)]
        (logs / "c.csv").write_text(text)
        assert take(FolderSource(logs, settle=0), journal) == [("c.csv", DUPLICATE)]

    def test_files_that_are_to_be_skipped(self, logs, journal):
        write_hour(logs / "a.csv", 0)
        assert take(FolderSource(logs, settle=0, skip=["a.csv"]), journal) == [("a.csv", SKIPPED)]

    def test_there_must_be_a_folder(self, tmp_path, journal):
        with pytest.raises(DataError, match=r"nowhere is not a folder"):
            FolderSource(tmp_path / "nowhere").arrived(journal)


class TestJournal:
    def test_it_is_what_it_was_after_a_power_loss_in_the_last_line(self, tmp_path):
        path = tmp_path / "arrivals.jsonl"
        kept = Arrival("a.csv", 5, "00", 7)
        Journal(path).append([kept])
        with path.open("a") as file:
            file.write('{"name": "b.c')
        again = Journal(path)
        assert again.entries == [kept]
        again.append([Arrival("b.csv", 6, "01", 8, LATE)])
        assert [one.name for one in Journal(path).entries] == ["a.csv", "b.csv"]

    def test_damage_in_the_middle_is_an_error(self, tmp_path):
        path = tmp_path / "arrivals.jsonl"
        path.write_text('{"nam\n{}\n')
        with pytest.raises(RunError, match=r"damaged in line 1"):
            Journal(path)


def read_all(loader, steps=0):
    """(labels, ids, facts) of the batches that are there."""
    found = []
    for batch in loader.epoch(0, steps):
        found.append((batch.labels.tolist(), batch.ids.tolist(), loader.trained()))
    return found


class TestLoader:
    def test_rows_come_once_in_order_and_batches_end_with_their_file(self, dataset, logs, journal):
        write_hour(logs / "0.csv", 1, 70)
        write_hour(logs / "1.csv", 2, 32)
        loader = loader_of(dataset, logs, journal)
        assert loader.look()
        facts = [one for _, _, one in read_all(loader)]
        assert [one.size for one in facts] == [32, 32, 6, 32]
        assert [one.after[:2] for one in facts] == [(0, 1), (0, 2), (1, 0), (2, 0)]
        assert {part.hour for one in facts for part in one.parts} == {START // 3600 + 1, START // 3600 + 2}
        assert not loader.look()
        assert read_all(loader, 4) == []

    def test_the_time_of_a_batch_is_the_greatest_so_far(self, dataset, logs, journal):
        write_hour(logs / "0.csv", 5, 32)
        write_hour(logs / "1.csv", 1, 32)
        loader = loader_of(dataset, logs, journal)
        loader.look()
        seconds = []
        for _ in loader.epoch(0):
            seconds.append(loader.second_of(len(seconds) + 1))
            loader.trained()
        assert START + 5 * 3600 <= seconds[0] < START + 6 * 3600
        assert seconds[1] == seconds[0]

    def test_a_clock_that_is_ahead_makes_nothing_old(self, dataset, logs, journal):
        path = write_hour(logs / "0.csv", 24 * 365, 32)
        os.utime(path, (START, START))
        loader = loader_of(dataset, logs, journal)
        loader.look()
        next(loader.epoch(0))
        assert loader.second_of(1) == START + 86_400

    @pytest.mark.parametrize("at", [1, 2, 3, 4])
    def test_a_place_in_the_log_gives_the_rest_of_it(self, dataset, logs, journal, at):
        for hour in range(3):
            write_hour(logs / f"{hour}.csv", hour + 1, 60)
        whole = loader_of(dataset, logs, journal)
        whole.look()
        expected = read_all(whole)
        first = loader_of(dataset, logs, journal)
        with_state = first.epoch(0)
        for _ in range(at):
            next(with_state)
            first.trained()
        saved = json.loads(json.dumps(first.state()))
        write_hour(logs / "00.csv", 9, 40)  # late: it does not come between
        second = loader_of(dataset, logs, Journal(journal.path))
        second.load_state(saved)
        second.look()
        found = read_all(second, at)
        rest = expected[at:]
        assert [one[:2] for one in found[: len(rest)]] == [one[:2] for one in rest]
        assert [one[2].after for one in found[: len(rest)]] == [one[2].after for one in rest]
        assert [one[2].size for one in found[len(rest) :]] == [32, 8]

    def test_a_file_that_grows_between_its_check_and_its_reading_is_an_error(self, dataset, logs, journal, monkeypatch):
        """Else rows are trained that the list of arrivals does not have, and the run cannot be resumed."""
        write_hour(logs / "0.csv", 1, 32)
        loader, real = loader_of(dataset, logs, journal), folder.digest
        loader.look()

        def growing(path):
            found, lines = real(path), path.read_text().splitlines(keepends=True)
            path.write_text("".join(lines + lines[1:]))
            return found

        monkeypatch.setattr(folder, "digest", growing)
        with pytest.raises(FormatError, match=r"0\.csv was taken for training with [\d,]+ bytes and has changed"):
            read_all(loader)

    def test_a_file_that_was_trained_may_be_removed_and_one_that_was_not_may_not(self, dataset, logs, journal):
        write_hour(logs / "0.csv", 1, 32)
        write_hour(logs / "1.csv", 2, 32)
        loader = loader_of(dataset, logs, journal)
        loader.look()
        batches = loader.epoch(0)
        next(batches)
        loader.trained()
        (logs / "0.csv").unlink()
        again = loader_of(dataset, logs, Journal(journal.path))
        again.load_state(loader.state())
        assert len(read_all(again, 1)) == 1
        (logs / "1.csv").write_text("ts,click\n")
        other = loader_of(dataset, logs, Journal(journal.path))
        other.load_state(loader.state())
        with pytest.raises(FormatError, match=r"1\.csv was taken for training with [\d,]+ bytes and has changed"):
            read_all(other, 1)
        (logs / "1.csv").unlink()
        with pytest.raises(FormatError, match=r"cannot be read now.*follow\.skip=1\.csv"):
            read_all(other, 1)
        skipping = loader_of(dataset, logs, Journal(journal.path), skip=["1.csv"])
        skipping.load_state(loader.state())
        assert read_all(skipping, 1) == []
        assert not skipping.look()

    def test_too_many_bad_rows_are_an_error_and_a_row_needs_a_label(self, dataset, logs, journal):
        (logs / "0.csv").write_text("ts,click,user,ad,price\n" + f"{START},,u1,a1,0.5\n" * 3)
        loader = loader_of(dataset, logs, journal)
        loader.look()
        with pytest.raises(FormatError, match=r"3 of 3 rows are bad") as bad:
            read_all(loader)
        assert "`hotbed train --resume RUN --set follow.skip=0.csv`" in str(bad.value)
        assert "--set follow.max_bad=N%" in str(bad.value)

    @pytest.mark.parametrize("content", ["click,user\n1,u1\n", "x"])
    def test_a_file_that_cannot_be_read_is_left_out_on_request(self, dataset, logs, journal, content):
        (logs / "a, b.csv").write_text(content)
        loader = loader_of(dataset, logs, journal)
        loader.look()
        with pytest.raises(FormatError, match=r"--set 'follow\.skip=a, b\.csv'"):
            read_all(loader)
        skipped = open_source(FollowConfig(str(logs), skip="a, b.csv"), logs)._skip
        other = loader_of(dataset, logs, Journal(journal.path), skip=skipped)
        assert read_all(other) == []
        assert not other.look()

    def test_unknown_ids_are_counted(self, dataset, logs, journal):
        (logs / "0.csv").write_text("ts,click,user,ad,price\n" + f"{START},1,nobody,a1,0.5\n" * 3)
        loader = loader_of(dataset, logs, journal)
        loader.look()
        (part,) = read_all(loader)[0][2].parts
        names = [one.name for one in dataset.schema.features]
        assert dict(zip(names, part.unknown.tolist())) == {"user": 3, "ad": 0}
        assert np.all(part.buckets.sum(1) == 3)

    def test_another_list_of_arrivals_is_refused(self, dataset, logs, journal, tmp_path):
        write_hour(logs / "0.csv", 1, 32)
        loader = loader_of(dataset, logs, journal)
        loader.look()
        read_all(loader)
        other = loader_of(dataset, logs, Journal(tmp_path / "other.jsonl"))
        with pytest.raises(RunError, match=r"is not the list of arrivals of this checkpoint, which had read 1"):
            other.load_state(loader.state())
        assert other.next == Place()
