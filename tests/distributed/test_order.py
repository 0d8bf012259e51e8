"""Ranks that are not in step, or were given different tables: an error on all of them that names the cause, and no abort."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch

import hotbed
from hotbed import Table, optim
from hotbed.errors import HotbedError
from hotbed.ids import IdCounts
from hotbed.parallel.mesh import Mesh
from hotbed.parallel.routes import Route
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks

TABLES = {"a": Table(50, 4), "b": Table(50, 8)}
CACHED = {"hbm": "64KiB", "memory": "1MiB"}


def make(**options):
    return ShardedTables(TABLES, optim.SGD(lr=0.1), output="dict", **options)


def batches(rank, count=6, size=8):
    generator = torch.Generator().manual_seed(3 + rank)
    return [torch.randint(50, (size, 2), generator=generator) for _ in range(count)]


def error_of(call, *args):
    try:
        call(*args)
    except HotbedError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def given_different(pairs):
    """What making tables says, of which rank 1 is given the second of each pair."""
    import torch.distributed as dist

    usual = {"tables": TABLES, "optimizer": optim.SGD(lr=0.1)}
    return [error_of(lambda given: ShardedTables(**given), usual | pair[dist.get_rank()]) for pair in pairs]


def test_tables_that_differ_are_refused_on_all_ranks():
    usual, other = {}, {"a": Table(60, 4), "b": Table(50, 8)}
    pairs = {
        "seed: 1 on rank 0, 2 on rank 1": ({"seed": 1}, {"seed": 2}),
        "table 'a': Table(rows=50,": (usual, {"tables": other}),
        "optimizer: SGD(lr=0.1,": (usual, {"optimizer": optim.SGD(lr=0.2)}),
        "the tables: ['a', 'b'] on rank 0, ['b', 'a'] on rank 1": (usual, {"tables": dict(reversed(TABLES.items()))}),
        "gradients: 'mean' on rank 0, 'sum' on rank 1": (usual, {"gradients": "sum"}),
        "precision: None on rank 0, 'bf16' on rank 1": (usual, {"precision": "bf16"}),
        "tables behind a cache: [] on rank 0": (usual, CACHED),
    }
    same = [({"cache": 0.5}, {"cache": 0.9}), (usual, usual)]  # budgets are each rank's own
    wrong = [(usual, {"cache": 7.0})]
    first, second = run_ranks(given_different, 2, [*pairs.values(), *same, *wrong])
    assert first[: len(pairs)] == second[: len(pairs)]
    for text, message in zip(pairs, first):
        assert message.startswith("ConfigError: ShardedTables must be the same on all ranks"), text
        assert text in message
        assert message.count("\n") == 1, message
    assert first[len(pairs) : -1] == second[len(pairs) : -1] == ["no error"] * 2
    assert second[-1].startswith("ConfigError: ")
    assert first[-1] == f"RankError: this rank stops because of another. rank 1: {second[-1]}"


def train(tables, rank, ahead, skips=-1, evaluates=-1, prefetches=-1, slows=-1, leaves_out=-1):
    """One rank does something alone after some batch."""
    given = batches(rank)
    for number, ids in enumerate(hotbed.prefetch(given, tables) if ahead else given):
        vectors = tables(ids)
        if number == skips:
            continue
        if number == slows:
            tables.set_lr(0.05)
        (vectors["a"] if number == leaves_out else torch.cat([*vectors.values()], 1)).square().sum().backward()
        if number == evaluates:
            with torch.no_grad():
                tables(given[0])
        if number == prefetches:
            list(hotbed.prefetch(given, tables))


def out_of_step(scripts):
    import torch.distributed as dist

    rank, found = dist.get_rank(), []
    for options, ahead, alone in scripts:
        found.append(error_of(lambda: train(make(**options), rank, ahead, **(alone if rank == 1 else {}))))  # noqa: B023
    return found


def test_a_rank_that_does_something_alone_is_named_on_all():
    skips = "rank 0 is in a backward pass and updates rows (call 3); rank 1 looks up a training batch{} (call 4)"
    scripts = {
        skips.format(""): ({}, False, {"skips": 2}),
        skips.format(" of a prefetch"): (CACHED, True, {"skips": 2}),
        "rank 0 looks up a training batch (call 4); rank 1 looks up a batch without training (call 4)": (
            CACHED,
            False,
            {"evaluates": 2},
        ),
        "rank 0 looks up a training batch (call 4); rank 1 begins to prefetch": (CACHED, False, {"prefetches": 2}),
        "updates rows (call 3); rank 1 is in a backward pass and updates rows (call 3, group 0 of its tables)": (
            {},
            False,
            {"leaves_out": 2},
        ),
        "rank 0 makes update 3 with lr_factor=1; rank 1 makes update 3 with lr_factor=0.5": ({}, False, {"slows": 2}),
    }
    results = run_ranks(out_of_step, 2, [*scripts.values()])
    for text, *messages in zip(scripts, *results):
        for message in messages:
            assert text in message
            if "lr_factor" in text:
                assert message.startswith("RankError: ranks would update their rows differently: "), message
                assert "All ranks set lr_factor (set_lr, rates) alike" in message
            else:
                assert message.startswith("RankError: ranks are out of step: "), message
                assert "Every rank must call the tables and run backward equally often" in message


def no_answer(path):
    """Rank 1 does not take part."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=6))
    tables = make()
    if rank == 1:
        store.wait(["done"], timedelta(seconds=60))
        return "", 0.0
    began = time.monotonic()
    said = error_of(tables, batches(0)[0])
    store.set("done", "")
    return said, time.monotonic() - began


def test_a_rank_that_does_not_answer_is_waited_for_as_long_as_the_time_out_says(tmp_path):
    (said, seconds), _ = run_ranks(no_answer, 2, str(tmp_path / "store"), init=False)
    assert said.startswith("RankError: rank 0 looks up a training batch (call 1), and other ranks do not answer")
    assert 4 < seconds < 100


def too_many_rows_on_one():
    """Then all go on together."""
    import torch.distributed as dist

    rank = dist.get_rank()
    tables = ShardedTables({"a": Table(1000, 4)}, optim.SGD(lr=0.1), cache=0.05)
    whose = 2 * torch.arange(400)[:, None]
    shares = [tables.groups[0].shard.owner_of_any(whose[:, 0], None) == owner for owner in range(2)]
    said = [error_of(tables, whose[shares[1]])]  # all of them are rank 1's
    tables(batches(rank)[0][:, :1]).sum().backward()
    said.append(error_of(list, map(tables, hotbed.prefetch([whose[shares[1]]], tables))))
    tables(batches(rank)[1][:, :1]).sum().backward()
    return said, tables.num_updates, dynamic_ids_too(rank), wrong_shape_on_one()


def wrong_shape_on_one():
    """While gradients are accumulated."""
    import torch.distributed as dist

    tables = make().accumulate()
    return error_of(tables, batches(0)[0][:, : 2 - dist.get_rank()])


def dynamic_ids_too(rank):
    """No rank learns of the ids of a batch that one cannot take: what the error says, the counts, and the ids with a row."""
    tables = ShardedTables({"a": Table(None, 4, admit=hotbed.Admit(after=2))}, hbm="6KiB", memory="8MiB")
    ids = torch.arange(3000)
    owners = tables.groups[0].keyspace.owners_of("a", ids)
    few, many = ids[owners == 0][:20], ids[owners == 1][:1000]
    said = error_of(tables, torch.cat([few, many])[:, None])
    counts = tables.id_counts()["a"]
    tables(few[:, None] if rank == 0 else few[:0, None]).sum().backward()
    return said, counts, tables.ids("a").tolist()


def test_too_many_rows_on_one_rank_stop_all_at_once_and_no_rank_counts_ids_of_that_batch():
    results = run_ranks(too_many_rows_on_one, 2)
    errors = [[*said, of_ids, of_shape] for said, _, (of_ids, _, _), of_shape in results]
    for first, second in zip(*errors):
        assert first == f"RankError: this rank stops because of another. rank 1: {second}"
    assert [said.partition(": ")[0] for said in errors[1]] == ["BudgetError"] * 3 + ["ShapeError"]
    for _, num_updates, (_, counts, ids), _ in results:
        assert num_updates == 2
        assert (counts, ids) == (IdCounts(0, 0, 0, 0), [])


def unsharded():
    ids = batches(0)[0]
    kinds = {
        "plain": hotbed.EmbeddingTables(TABLES, output="concat"),
        "cached": hotbed.EmbeddingTables(TABLES, output="concat", cache=0.9),
        "independent": hotbed.EmbeddingTables(TABLES, output="concat", independent=True),
    }
    found = {}
    for name, tables in kinds.items():
        tables.requires_grad_(False)
        tables(ids)
        tables.requires_grad_(True)
        found[name] = error_of(lambda: tables(ids).sum().backward()), tables.num_updates  # noqa: B023
    bag = hotbed.EmbeddingBag(50, 4, independent=True)
    bag(ids).sum().backward()
    return found, bag.tables.num_updates


def test_unsharded_tables_do_not_train_in_ranks():
    for found, num_updates in run_ranks(unsharded, 2):
        for name in ("plain", "cached"):
            said, count = found[name]
            assert "hotbed.ShardedTables" in said
            assert "independent=True" in said
            assert count == 0
        assert found["independent"] == ("no error", 1)
        assert num_updates == 1


MODES = [{}, {"cache": 0.99}, {"mode": "replicated"}, {"mode": "all-reduce"}]


def interrupted():
    """By mode: Ctrl-C comes to rank 1 while gradients are on their way; all go on with the next step."""
    import torch.distributed as dist

    rank, found = dist.get_rank(), []
    for options in MODES:
        tables = make(gradients="sum", **options)
        for number, ids in enumerate(batches(rank, 3)):
            vectors = tables(ids)
            with pytest.MonkeyPatch.context() as patch:
                if rank == 1 and number == 1:
                    owner, name = (Mesh, "sum_") if options.get("mode") == "all-reduce" else (Route, "give")
                    patch.setattr(owner, name, with_interrupt(getattr(owner, name)))
                try:
                    (vectors["a"].sum() + vectors["b"].sum()).backward()
                except KeyboardInterrupt:
                    found.append(number)
        found.append({name: tables.rows(name) for name in TABLES})
    return found


def with_interrupt(send):
    calls = []

    def sent(*arguments):
        found = send(*arguments)
        calls.append(found)
        if len(calls) == 1:  # of the first of two groups
            signal.raise_signal(signal.SIGINT)
        return found

    return sent


def test_an_interrupt_on_one_rank_leaves_no_half_step():
    one = hotbed.EmbeddingTables(TABLES, optim.SGD(lr=0.1), output="dict")
    for parts in zip(batches(0, 3), batches(1, 3)):
        vectors = one(torch.cat(parts))
        (vectors["a"].sum() + vectors["b"].sum()).backward()
    first, second = run_ranks(interrupted, 2)
    assert second[::2] == [1] * len(MODES)
    for found in (first, second[1::2]):
        for rows in found:
            for name, (ids, columns) in rows.items():
                assert torch.equal(columns["weight"], one.weight(name)[ids])
