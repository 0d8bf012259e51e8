import dataclasses
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed import cache, pipeline
from hotbed.data.dataset import Dataset, hot_rows
from hotbed.data.prepare.prepare import prepare
from hotbed.errors import BudgetError, ConfigError, SchemaError
from hotbed.host.devices import check_current, pick_device, use_device
from hotbed.ops import records
from hotbed.ops.shard import Shard
from hotbed.optim import ROW_OPTIMIZERS
from hotbed.parallel.sharded import ShardedTables
from hotbed.parallel.world import World
from hotbed.pipeline import feed
from hotbed.run import config
from hotbed.run.config import DENSE_RATES, FIELDS, MOST_AHEAD, MOST_WINDOW, POLICIES, ROW_RATES, RunConfig, TablesConfig
from hotbed.run.model_card import table_specs
from hotbed.run.run_file import compose
from hotbed.tables import lookup
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.spec import Table
from hotbed.train.build import _hot_rows, build, changed_settings, option_problems
from hotbed.train.build_ranks import compare, tables_of
from hotbed.train.model_folder import check_same_ids, load_learner
from hotbed.train.run import run
from tests.train.small import SMALL, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return Dataset.open(write_dataset(tmp_path_factory.mktemp("data") / "clicks"))


def configured(*sets):
    config, problems = compose(None, {"data.path": "clicks", "data.batch_size": 128}, [*SMALL, *sets])
    assert problems == []
    return config


def test_ranks_with_other_settings_are_named():
    def world(**theirs):
        return SimpleNamespace(stage=lambda stage: None, gather=lambda mine: [mine, {**mine, **theirs}])

    given, _ = compose(None, {"data.path": "clicks"}, SMALL)
    compare(given, "one", world())
    with pytest.raises(ConfigError, match=r"differ in:\n  - train.seed: \d+ on rank 0, -7 on rank 1$"):
        compare(given, "one", world(**{"train.seed": -7}))


def test_words_of_the_config_are_those_of_the_cache():
    assert set(POLICIES) == set(cache.POLICIES)
    assert TablesConfig().policy == cache.DEFAULT_POLICY
    assert (MOST_WINDOW, MOST_AHEAD) == (pipeline._MOST_WINDOW, cache.MOST_AHEAD)
    assert config.PRECISIONS == records.PRECISIONS


def test_names_of_the_config_are_those_of_the_optimizers():
    assert set(ROW_RATES) == set(ROW_OPTIMIZERS)
    for name in DENSE_RATES:
        assert option_problems(configured(f"dense.optimizer={name}")) == []


@pytest.mark.parametrize("name", ROW_RATES)
@pytest.mark.parametrize("dense", DENSE_RATES)
def test_every_pair_of_optimizers_trains(dataset, tmp_path, name, dense):
    sets = (f"tables.optimizer={name}", f"dense.optimizer={dense}", "train.max_steps=2", "tables.clip_norm=1.0")
    built = build(configured(*sets), dataset, tmp_path)
    assert run(built.training, built.subject).summary["finished"]


def test_tables_follow_the_schema(dataset, tmp_path):
    built = build(configured("tables.pooling=sum"), dataset, tmp_path)
    tables = built.training.learner.tables.tables
    assert {name: table.rows for name, table in tables.items()} == {"user": 50, "tags": 9, "ad": 20, "site": 31}
    assert {name for name, table in tables.items() if table.hashing} == {"site"}
    assert {table.dim for table in tables.values()} == {5}
    assert tables["tags"].pooling == "sum"
    built = build(configured("model.name=lr", "model.options={}"), dataset, tmp_path)
    tables = built.training.learner.tables.tables
    assert {table.dim for table in tables.values()} == {1}
    assert tables["tags"].pooling == "mean"


def test_the_seed_decides_all_first_values(dataset, tmp_path):
    def first(seed):
        torch.rand(3)
        learner = build(configured(f"train.seed={seed}"), dataset, tmp_path).training.learner
        dense = torch.cat([one.detach().reshape(-1) for one in learner.model.parameters()])
        return learner.tables.weight("user").clone(), dense

    one, same, other = first(4), first(4), first(5)
    assert all(torch.equal(a, b) for a, b in zip(one, same))
    assert not any(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize(("max_steps", "steps"), [(0, 16), (3, 3), (99, 16)])
def test_a_schedule_ends_with_the_run(dataset, tmp_path, max_steps, steps):
    sets = ("train.schedule=cosine", "train.epochs=2", f"train.max_steps={max_steps}")
    training = build(configured(*sets), dataset, tmp_path).training
    assert training.course.schedule.steps == training.total_steps == steps


def test_a_fresh_model_starts_at_the_share_of_positives(dataset, tmp_path):
    learner = build(configured("train.base_rate=true"), dataset, tmp_path).training.learner
    train = dataset.schema.splits["train"]
    with torch.no_grad():
        logits = learner.model.eval()(torch.zeros(2, 4, 5), torch.zeros(2, 2))
    torch.testing.assert_close(logits.sigmoid(), torch.full((2,), train.positives / train.rows))


def test_mistakes_of_options_come_together():
    config = configured("model.options={'hidden': 'wide', 'nope': 1}", "tables.options.beta3=1", "train.device=cuda:99")
    problems = option_problems(config)
    assert [problem.partition(":")[0] for problem in problems] == ["model", "tables", "train.device"]
    assert "nope" in problems[0]
    assert "hidden" in problems[0]


def test_a_device_number_beyond_all_devices():
    assert "there is no device cuda:9" in option_problems(configured(f"train.device=cuda:{'9' * 20}"))[0]


def test_a_model_that_does_not_fit_is_reported_before_it_is_built(dataset, tmp_path):
    config = configured("model.name=dnn", "model.options.hidden=[1000000000, 1000]")
    with pytest.raises(ConfigError, match=r"the model does not fit: its .* dense weights .* take .* TiB"):
        build(config, dataset, tmp_path)


def test_a_config_made_in_python_is_checked(dataset, tmp_path):
    config = dataclasses.replace(RunConfig(), data=dataclasses.replace(RunConfig().data, batch_size=-1))
    with pytest.raises(ConfigError, match=r"data\.batch_size: must be at least 1, not -1"):
        build(config, dataset, tmp_path)


def test_tables_that_do_not_fit_are_refused_with_the_ways_out(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("hotbed.tables.sizing.fit.available_memory", lambda device: 5000)
    with pytest.raises(
        ConfigError, match=r"110 rows with their optimizer state take 5\.2 KiB, and cpu has 4\.9 KiB"
    ) as caught:
        build(configured(), dataset, tmp_path)
    for way_out in ("model.dim", "rowwise_adagrad", "--min-count"):
        assert way_out in str(caught.value)
    build(configured("tables.optimizer=rowwise_adagrad"), dataset, tmp_path)
    monkeypatch.setattr("hotbed.tables.sizing.fit.available_memory", lambda device: None)
    build(configured(), dataset, tmp_path)


def test_splits_that_are_needed(dataset, tmp_path):
    data = Dataset.open(write_dataset(tmp_path / "data", {"train": 10, "test": 5}))
    config = configured("train.patience=2", "train.plateau_factor=0.5")
    with pytest.raises(
        ConfigError, match=r"(?s)2 settings.*train\.patience: needs a valid split.*train\.plateau_factor"
    ):
        build(config, data, tmp_path)
    data = Dataset.open(write_dataset(tmp_path / "other", {"test": 5}))
    with pytest.raises(ConfigError, match="has no rows to train on"):
        build(configured(), data, tmp_path)


def test_devices():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match=r"there is no device cuda:99: torch .* finds .* CUDA device"):
        pick_device("cuda:99")


def test_a_device_by_number_is_the_current_one_from_then_on(monkeypatch):
    """Kernels are launched on the current device, wherever their tensors are."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert use_device("cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]
    assert use_device("cpu") == torch.device("cpu")
    assert len(current) == 1


def test_tables_on_another_device_than_the_current_one_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    check_current(torch.device("cuda", 0))
    tables, ids = EmbeddingTables({"a": Table(4, 2)}, cache=0.5), torch.zeros(1, 1, dtype=torch.int64)
    for module in (lookup, feed):
        monkeypatch.setattr(module, "check_current", lambda _: check_current(torch.device("cuda", 1)))
    for use in (lambda: tables(ids), lambda: next(pipeline.prefetch([ids], tables))):
        with pytest.raises(ConfigError, match=r"the tables are on cuda:1.*set_device\(1\)"):
            use()


def test_changed_settings():
    assert changed_settings(configured(), configured()) == []
    assert changed_settings(configured(), configured("model.dim=9", "train.epochs=3")) == ["model.dim", "train.epochs"]
    assert set(changed_settings(RunConfig(), configured())) <= set(FIELDS)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    built = build(configured(), dataset, folder)
    run(built.training, built.subject)
    return folder, built.training


def test_a_saved_model_scores_as_the_trained_one(dataset, trained):
    folder, training = trained
    again = load_learner(folder / "model", "cpu")
    for batch in training.loaders.held_out["test"].epoch(0):
        assert torch.equal(again.score(batch), training.learner.score(batch))
    assert again.tables.num_bytes < training.learner.tables.num_bytes


def test_the_same_ids_are_asked_for(dataset, trained, tmp_path):
    model = trained[0] / "model"
    check_same_ids(model, dataset)
    copy = tmp_path / "copy"
    shutil.copytree(dataset.path, copy)
    counts = pq.read_table(copy / "counts" / "user.parquet")
    pq.write_table(
        counts.set_column(1, "count", pa.array(np.ones(len(counts), np.int64))), copy / "counts" / "user.parquet"
    )
    check_same_ids(model, Dataset.open(copy))
    pq.write_table(counts.take(np.arange(len(counts))[::-1]), copy / "counts" / "user.parquet")
    with pytest.raises(SchemaError, match="numbers the ids of user differently"):
        check_same_ids(model, Dataset.open(copy))


def test_other_columns_are_refused(dataset, trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(dataset.path, copy)
    schema = dataset.schema
    for change in (
        {"dense": schema.dense[:1]},
        {"features": (dataclasses.replace(schema.features[0], rows=51), *schema.features[1:])},
    ):
        dataclasses.replace(schema, **change).save(copy)
        with pytest.raises(SchemaError, match=f"has other {next(iter(change))} columns"):
            check_same_ids(trained[0] / "model", Dataset.open(copy))


def test_a_late_batch_that_does_not_fit_is_found_before_training(tmp_path):
    """Ids come in the order of the file: the first batches have few, the last one many, and the advice holds for all."""
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.integers(0, 40, 64 * 20), np.arange(64)])  # 21 batches of 64
    log = pa.table({"label": (ids % 2).astype(np.float32), "ad": ids})
    pq.write_table(log, tmp_path / "log.parquet")
    prepare([tmp_path / "log.parquet"], tmp_path / "clicks", label="label", ids=["ad"])
    dataset = Dataset.open(tmp_path / "clicks")
    sets = ("data.shuffle=false", "data.batch_size=64", "data.eval_batch_size=64", "tables.cache=0.8")
    with pytest.raises(BudgetError, match=r"the largest of all 21 batches of train .* needs 64 rows") as caught:
        build(configured(*sets), dataset, tmp_path)
    share = re.search(r"--cache (\S+) or --hbm", str(caught.value))[1]
    built = build(configured(*sets, f"tables.cache={share}", "train.epochs=1"), dataset, tmp_path)
    assert run(built.training, built.subject).summary["finished"]


def test_one_process_has_whole_tables_and_ranks_have_shards():
    config, _ = compose(None, {"data.path": "clicks"}, SMALL)
    assert tables_of(config, World(), 0) is EmbeddingTables
    sharded = tables_of(config, World(0, 2), 0)
    assert (sharded.func, "replicas" in sharded.keywords) == (ShardedTables, False)
    replicated = tables_of(config, World(2, 3), 0.25)
    assert (replicated.func, replicated.keywords["replicas"]) == (ShardedTables, 0.25)


@pytest.mark.parametrize("placement", ["row", "row, user=table, ad=table", "table"])
def test_the_cache_of_a_rank_starts_with_its_most_used_rows(dataset, placement):
    given = configured(f"parallel.placement={placement}", "tables.warmup=0.5", "tables.cache=0.1")
    specs, keys = table_specs(given, dataset.schema), hot_rows(dataset, 10**6)
    for rank in range(2):
        tables = EmbeddingTables(specs, shard=Shard(rank, 2), cache=0.1)
        numbers, uses = _hot_rows(given, dataset, tables)
        shard = tables.groups[0].shard
        assert (numbers.diff() > 0).all()
        assert numbers.shape[0] == tables.groups[0].num_slots // 2
        mine = keys.only((shard.owner_of(torch.from_numpy(keys.keys)) == rank).numpy())
        times = dict(zip(mine.keys, mine.uses))
        assert [times[key] for key in shard.keys_of(numbers).tolist()] == uses.tolist()
        assert uses.sort(descending=True).values.tolist() == sorted(mine.uses, reverse=True)[: len(uses)]
        tables.warm(numbers, uses)
        tables.groups[0].cache.check_integrity()
