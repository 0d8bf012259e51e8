"""Law 6: W ranks give the rows of one on the same global batch, and W ranks behind caches those of W without."""

import functools

import pytest
import torch

import hotbed
from hotbed import Expire, Jagged, Table, optim
from hotbed.errors import ConfigError, HotbedError, IdError, RankError
from hotbed.parallel.sharded import ShardedTables
from tests.distributed.ranks import run_ranks

OPTIMIZERS = {
    "sgd": optim.SGD(lr=0.1),
    "adagrad": optim.Adagrad(lr=0.1),
    "rowwise_adagrad": optim.RowwiseAdagrad(lr=0.1, l2=0.01),
    "adam": optim.Adam(lr=0.1, clip_norm=4.0),
    "ftrl": optim.FTRL(lr=0.1, l1=0.01),
    "by_count": optim.Adagrad(lr=0.1, scale_by_count=True, clip_norm=1.0),
}
TABLES = {
    "a": Table(rows=2100, dim=4),
    "b": Table(rows=31, dim=4, padding_id=0),
    "c": Table(rows=1900, dim=8, features=("c1", "c2"), pooling="mean"),
}
FEATURES = ["a", "b", "c1", "c2"]
STEPS, BATCH = 9, 24


def global_batch(step):
    """Ids of every feature as bags; the weights of the loss are such that sums of gradients are exact in any order."""
    generator = torch.Generator().manual_seed(step)
    bags = {}
    for name, rows in zip(FEATURES, (2100, 31, 1900, 1900)):
        lengths = torch.ones(BATCH).long() if name == "a" else 2 ** torch.randint(0, 3, [BATCH], generator=generator)
        values = (torch.rand(int(lengths.sum()), generator=generator) ** 3 * rows).long()
        bags[name] = Jagged(values, torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]))
    dims = {"a": 4, "b": 4, "c1": 8, "c2": 8}
    weights = {name: torch.randint(-8, 9, [BATCH, dim], generator=generator) / 4 for name, dim in dims.items()}
    return bags, weights


def part_of(batch, first, stop):
    bags, weights = batch
    cut = {}
    for name, bag in bags.items():
        begin, end = int(bag.offsets[first]), int(bag.offsets[stop])
        cut[name] = Jagged(bag.values[begin:end], bag.offsets[first : stop + 1] - begin)
    return cut, {name: weight[first:stop] for name, weight in weights.items()}


def borders(world, step):
    """Uneven parts; one rank in turn has none."""
    if world == 1:
        return [0, BATCH]
    sizes = torch.tensor([r + 1 for r in range(world)]).roll(step)
    sizes[step % world] = 0
    stops = (sizes.cumsum(0) * BATCH // int(sizes.sum())).tolist()
    return [0, *stops]


def train(tables, rank, world, ahead=False):
    batches = []
    for step in range(STEPS):
        cut = borders(world, step)
        batches.append(part_of(global_batch(step), cut[rank], cut[rank + 1]))
    losses = []
    for bags, weights in hotbed.prefetch(batches, tables) if ahead else batches:
        vectors = tables(bags)
        loss = sum((vectors[name] * weights[name].to(vectors[name].dtype)).sum() for name in FEATURES)
        loss.backward()
        losses.append({name: vector.detach() for name, vector in vectors.items()})
    return losses, {name: tables.rows(name) for name in TABLES}


def in_ranks(optimizer, rank_options, ahead=False, double=False):
    import torch.distributed as dist

    options = {"pooled": "never", **rank_options}  # so that vectors too are those of one process
    tables = ShardedTables(TABLES, OPTIMIZERS[optimizer], seed=5, gradients="sum", output="dict", **options)
    if double:
        tables.double()
    result = train(tables, dist.get_rank(), dist.get_world_size(), ahead)
    return *result, tables.counters(), (tables.mesh.traffic.in_node, tables.mesh.traffic.across)


@functools.cache
def alone(optimizer, double=False):
    """What one process gives; shared tables of one rank give the same, and have the kernels compiled for others."""
    results = []
    shared = functools.partial(ShardedTables, gradients="sum")
    kinds = [hotbed.EmbeddingTables, shared, functools.partial(shared, cache=0.1)]
    for kind in kinds[:2] if double else kinds:
        tables = kind(TABLES, OPTIMIZERS[optimizer], seed=5, output="dict")
        if double:
            tables.double()
        results.append(train(tables, 0, 1))
        assert_as_one(results[-1:], results[0])
    return results[0]


def assert_as_one(results, expected, steps=STEPS):
    losses, rows = expected
    for step in range(steps):
        for name in FEATURES:
            assert torch.equal(torch.cat([result[0][step][name] for result in results]), losses[step][name])
    for name in TABLES:
        ids = torch.cat([result[1][name][0] for result in results])
        assert torch.equal(ids.sort().values, rows[name][0])
        for column, value in rows[name][1].items():
            found = torch.cat([result[1][name][1][column] for result in results])
            assert torch.equal(found[ids.argsort()], value), (name, column)


def with_all_optimizers(options, ahead=False):
    return [in_ranks(optimizer, options, ahead) for optimizer in OPTIMIZERS]


def assert_each_as_one(results):
    for n, optimizer in enumerate(OPTIMIZERS):
        assert_as_one([result[n] for result in results], alone(optimizer))


@pytest.mark.parametrize("world", [2, 4])  # three: behind caches, below
def test_ranks_give_the_rows_of_one(world):
    assert_each_as_one(run_ranks(with_all_optimizers, world, {}))


def test_in_float64():
    expected = alone("adam", True)
    assert_as_one(run_ranks(in_ranks, 3, "adam", {}, False, True), expected)


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_caches_that_evict(ahead):
    results = run_ranks(with_all_optimizers, 3, {"cache": 0.1}, ahead)
    assert_each_as_one(results)
    assert all(one[2].written_back > 20 for result in results for one in result)


def test_tiers(tmp_path):
    expected = alone("adagrad")
    assert_as_one(run_ranks(in_tiers, 2, str(tmp_path)), expected)


def in_tiers(folder):
    import torch.distributed as dist

    options = {"cache": 0.1, "memory": "256KiB", "ssd": f"{folder}/{dist.get_rank()}:16MiB"}
    return in_ranks("adagrad", options, True)


def test_gradients_are_averaged_as_ddp_does():
    for rows, expected in run_ranks(mean_of_two, 2):
        assert torch.equal(rows, expected)


def mean_of_two():
    """Every rank's loss is the mean over its half."""
    import torch.distributed as dist

    rank, one = dist.get_rank(), hotbed.EmbeddingTables({"a": Table(40, 4)}, optim.SGD(lr=1.0), independent=True)
    both = ShardedTables({"a": Table(40, 4)}, optim.SGD(lr=1.0))
    ids = torch.arange(32)[:, None] % 9
    one(ids).mean().backward()
    both(ids[rank * 16 : rank * 16 + 16]).mean().backward()
    mine, columns = both.rows("a")
    return columns["weight"], one.weight("a")[mine]


def test_traffic_in_16_bits_is_close_and_half():
    exact, narrow = (run_ranks(in_ranks, 2, "adagrad", {"traffic": kind}) for kind in ("fp32", "bf16"))
    for a, b in zip(exact, narrow):
        vectors = a[0][3]["c1"], b[0][3]["c1"]
        assert vectors[0].numel() == 0 or not torch.equal(*vectors)
        assert torch.allclose(*vectors, atol=0.02)
        assert b[3][0] < 0.75 * a[3][0]


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_a_bad_id_on_one_rank_stops_all(ahead):
    first, second = run_ranks(with_a_bad_id, 2, ahead)
    assert first == (
        "RankError",
        "this rank stops because of another. rank 1: IdError: id 40 of feature 'a' in sample 1",
    )
    assert second == ("IdError", "id 40 of feature 'a' in sample 1")


def with_a_bad_id(ahead):
    import torch.distributed as dist

    tables = ShardedTables({"a": Table(40, 4)}, cache=0.5 if ahead else None)
    batches = [torch.zeros(2, 1).long(), torch.tensor([[1], [40 if dist.get_rank() else 2]])]
    try:
        for ids in hotbed.prefetch(batches, tables) if ahead else batches:
            tables(ids).sum().backward()
    except HotbedError as error:
        return type(error).__name__, str(error).split(" is outside")[0]
    raise AssertionError("nothing was wrong")


def test_ranks_with_different_numbers_of_batches_say_so():
    first, second = run_ranks(uneven, 2)
    assert "rank 0 has none" in second
    assert "no more batches" in first


def uneven():
    import torch.distributed as dist

    tables = ShardedTables({"a": Table(40, 4)}, cache=0.5)
    with pytest.raises(RankError) as caught:
        for _ in hotbed.prefetch([torch.zeros(2, 1).long()] * (3 + dist.get_rank()), tables):
            pass
    return str(caught.value)


def test_a_loop_may_be_left_and_begun_anew():
    assert run_ranks(left_early, 2) == [12, 12]


def left_early():
    tables = ShardedTables({"a": Table(40, 4)}, cache=0.5)
    batches = [torch.arange(6)[:, None] + i for i in range(30)]
    for _ in range(3):
        for number, ids in enumerate(hotbed.prefetch(batches, tables)):
            tables(ids).sum().backward()
            if number == 3:
                break
    return tables.num_updates


def test_settings_that_cannot_be():
    wrong = (
        r"gradients must be 'mean' or 'sum', not 'max'; traffic must be .*'fp8'; pooled must be .* 'never', not True"
    )
    with pytest.raises(ConfigError, match=wrong):
        ShardedTables({"a": Table(40, 4)}, gradients="max", traffic="fp8", pooled=True)


def test_ids_of_one_process_are_refused_at_once():
    tables = ShardedTables({"a": Table(40, 4)})
    with pytest.raises(IdError, match="id 40"):
        tables(torch.tensor([[40]]))


def test_rows_saved_by_three_ranks_go_into_two_and_one():
    expected = alone("adam")
    parts = run_ranks(saved_parts, 3)
    for result in (run_ranks(restored, 2, parts), [restored(parts)]):
        assert_as_one([([], rows) for rows in result], ([], expected[1]), steps=0)


def saved_parts():
    import torch.distributed as dist

    tables = ShardedTables(TABLES, OPTIMIZERS["adam"], seed=5, gradients="sum", output="dict", cache=0.1)
    train(tables, dist.get_rank(), dist.get_world_size(), True)
    with tables.snapshot() as snapshot:
        return [part._replace(columns={k: v.clone() for k, v in part.columns.items()}) for part in snapshot.parts()]


def restored(parts):
    tables = ShardedTables(TABLES, OPTIMIZERS["adam"], seed=5, cache=0.1)
    sink = tables.restore()
    sink.begin()
    for part in (part for rank in parts for part in rank):
        sink.add(part)
    sink.end()
    return {name: tables.rows(name) for name in TABLES}


DYNAMIC = {"u": Table(None, 4, padding_id=7), "v": Table(None, 4, expire=Expire(unused_steps=3, every=2))}


def dynamic_batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    ids = (torch.rand(BATCH, 2, generator=generator) ** 2 * 90).long() * torch.tensor([-7046029254386353131, 1])
    ids[::5, 0] = 7
    return ids, torch.randint(-8, 9, [BATCH, 2, 4], generator=generator) / 4


def train_dynamic(tables, rank, world, ahead):
    batches = []
    for step in range(STEPS + 6):
        cut = borders(world, step)
        batches.append(tuple(part[cut[rank] : cut[rank + 1]] for part in dynamic_batch(step)))
    for number, (ids, weights) in enumerate(hotbed.prefetch(batches, tables) if ahead else batches):
        (tables(ids) * weights).sum().backward()
        if number == 4:
            with torch.no_grad():
                tables.eval()
                tables(torch.tensor([[5, 6], [7, 8]]))  # one of them is no row yet
                tables.train()
    return {name: tables.rows(name) for name in DYNAMIC}, tables.id_counts()


def dynamic_ranks(hbm, ahead):
    import torch.distributed as dist

    tables = ShardedTables(DYNAMIC, OPTIMIZERS["adagrad"], hbm=hbm, memory="32MiB", gradients="sum")
    return train_dynamic(tables, dist.get_rank(), dist.get_world_size(), ahead)


@pytest.mark.parametrize("ahead", [False, True], ids=["as asked", "ahead"])
def test_dynamic_ids(ahead):
    one = hotbed.EmbeddingTables(DYNAMIC, OPTIMIZERS["adagrad"], hbm="1MiB", memory="32MiB")
    rows, counts = train_dynamic(one, 0, 1, False)
    results = run_ranks(dynamic_ranks, 3, "24KiB", ahead)
    for name in DYNAMIC:
        ids = torch.cat([result[0][name][0] for result in results])
        assert torch.equal(ids.sort().values, rows[name][0])
        for column, value in rows[name][1].items():
            assert torch.equal(torch.cat([result[0][name][1][column] for result in results])[ids.argsort()], value)
        assert counts[name].expired > 10 or name == "u"
        for part, count in counts[name]._asdict().items():
            assert sum(getattr(result[1][name], part) for result in results) == count, part


def test_two_loops_at_once():
    assert run_ranks(nested, 2) == [(5, 15), (5, 15)]


def nested():
    """An evaluation inside a training loop, both read ahead."""
    tables = ShardedTables({"a": Table(400, 4)}, cache=0.5)
    batches = [torch.arange(6)[:, None] + 9 * i for i in range(5)]
    looked_up = 0
    for ids in hotbed.prefetch(batches, tables):
        tables(ids).sum().backward()
        tables.eval()
        with torch.no_grad():
            for other in hotbed.prefetch(batches[:3], tables):
                looked_up += tables(other).shape[0] // 6
        tables.train()
    return tables.num_updates, looked_up


def accumulated(options):
    """Each rank's part of a batch in two halves, one of which may be empty, against the same part as one."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    ends = []
    for halves in (False, True):
        tables = ShardedTables(TABLES, OPTIMIZERS["adam"], seed=5, gradients="sum", output="dict", **options)
        if halves:
            tables.accumulate()
        for step in range(STEPS):
            first, stop = borders(world, step)[rank : rank + 2]
            middle = (first + stop) // 2
            for cut in ((first, middle), (middle, stop)) if halves else ((first, stop),):
                bags, weights = part_of(global_batch(step), *cut)
                vectors = tables(bags)
                sum((vectors[name] * weights[name]).sum() for name in FEATURES).backward()
            if halves:
                tables.step()
        ends.append({name: tables.rows(name) for name in TABLES})
    return ends


@pytest.mark.parametrize("options", [{}, {"cache": 0.1}, {"mode": "replicated"}])
def test_accumulated_gradients_move_rows_as_one_batch(options):
    for whole, halves in run_ranks(accumulated, 2, options):
        for name in TABLES:
            assert torch.equal(whole[name][0], halves[name][0])
            for column, values in whole[name][1].items():
                assert torch.equal(values, halves[name][1][column]), (name, column)
