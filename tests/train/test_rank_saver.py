"""Checkpoints of ranks, where their number changes from one start of a run to the next."""

import torch

import hotbed
from hotbed import Table
from hotbed.checkpoint import Policy, State
from hotbed.checkpoint.layouts import newest_in
from hotbed.checkpoint.manifest import read_manifest
from hotbed.train.ranks import RankSaver


class World:
    """Ranks that all say the same."""

    def __init__(self, rank, size):
        self.rank, self.size, self.is_first = rank, size, rank == 0

    def any(self, flag):
        return flag

    def gather(self, value):
        return [value] * self.size


def saver(root, rank, size):
    tables = hotbed.EmbeddingTables({"a": Table(10, 4)})
    tables(torch.tensor([[1]])).sum().backward()
    return RankSaver(root, tables, Policy(), print, World(rank, size))


def write(root, rank, size, step, history="first"):
    saver(root, rank, size)._saver.save(State(step, {}, {"progress": {}, "history": history}), wait=True)


def test_a_newer_checkpoint_of_another_number_of_ranks_stays_until_there_is_a_newer_one(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, 2, 200)
    write(tmp_path, 0, 1, 300)
    found = newest_in(tmp_path)
    assert (found.step, found.world) == (300, 1)
    ranks = [saver(tmp_path, rank, 2) for rank in range(2)]
    for one in ranks:
        one.go_back_to(found)
        one.prune()  # what precedes the write of the next one
    assert newest_in(tmp_path) == found
    for one in ranks:
        one._saver.save(State(310, {}, {"progress": {}}), wait=True)
    for one in ranks:
        one.prune()
    assert (newest_in(tmp_path).step, newest_in(tmp_path).world) == (310, 2)
    assert not (tmp_path / "000000000300").exists()


def test_one_process_removes_those_of_ranks_once_it_is_ahead(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, 2, 200)
    one = saver(tmp_path, 0, 1)
    one._saver.save(State(100, {}, {"progress": {}}), wait=True)
    one.prune()
    assert newest_in(tmp_path).step == 200
    one._saver.save(State(300, {}, {"progress": {}}), wait=True)
    one.prune()
    assert not (tmp_path / "rank-0-of-2").exists()


def test_no_step_is_of_two_histories(tmp_path):
    for rank in range(2):
        write(tmp_path, rank, 2, 200)
    write(tmp_path, 0, 2, 400)  # the disk of rank 1 was full: it does not count
    write(tmp_path, 0, 1, 300, "second")  # one process went on from 200
    found = newest_in(tmp_path)
    assert found.step == 300
    for rank in range(2):
        saver(tmp_path, rank, 2).go_back_to(found)
    write(tmp_path, 1, 2, 400, "second")  # and rank 0 was killed before it had written
    found = newest_in(tmp_path)
    assert found.step == 300
    assert [read_manifest(folder).document["history"] for folder in found.folders] == ["second"]


def histories(saved):
    return [read_manifest(folder).document["history"] for folder in saved.folders]


def test_no_step_is_of_two_saves(tmp_path):
    """A run that resumes and is stopped at once saves its step again, maybe with tables placed otherwise."""
    for rank in range(2):
        write(tmp_path, rank, 2, 200)
    write(tmp_path, 0, 2, 200, "second")  # rank 1 was killed before it had written
    found = newest_in(tmp_path)
    assert histories(found) == ["first", "first"]
    for rank in range(2):
        saver(tmp_path, rank, 2).go_back_to(found)
        write(tmp_path, rank, 2, 200, "third")
    assert histories(newest_in(tmp_path)) == ["third", "third"]


def test_a_step_of_one_process_replaces_what_ranks_began(tmp_path):
    write(tmp_path, 1, 2, 300)  # rank 0 was killed
    write(tmp_path, 0, 1, 300, "second")
    found = newest_in(tmp_path)
    for rank in range(2):
        saver(tmp_path, rank, 2).go_back_to(found)
    write(tmp_path, 0, 2, 300, "third")  # and rank 1 was killed
    assert histories(newest_in(tmp_path)) == ["second"]
