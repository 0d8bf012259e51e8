"""Config in, objects out: what a run trains with is made here and nowhere else.

What can be known before anything is built is checked before anything is built: options of the model and of the row
optimizer, the device, splits, and whether the tables fit in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from hotbed.data.dataset import Dataset, hot_rows, hottest, num_warm
from hotbed.data.loader.loader import ALL, Loader, Share
from hotbed.data.schema import Schema
from hotbed.errors import ConfigError, ExitCode
from hotbed.host.devices import pick_device, use_device
from hotbed.ids.rules import parse_admit, parse_expire
from hotbed.models import build_model, check_model, is_own, shown_name, vector_width
from hotbed.models.base_rate import set_base_rate
from hotbed.ops.init_rows import parse_init
from hotbed.ops.records import Precision
from hotbed.optim import Cosine, Decay, Fixed, RowOptimizer, Schedule, Warmup, row_optimizer
from hotbed.parallel.sharded import replica_share
from hotbed.parallel.world import ALONE, World
from hotbed.run.config import RunConfig, TrainConfig
from hotbed.run.config_check import check, raise_problems
from hotbed.run.model_card import card_of, id_problems, ids_of_train, model_settings, rows_of_unseen, table_specs
from hotbed.tables.module import EmbeddingTables
from hotbed.tables.sizing.budget import Budgets
from hotbed.tables.sizing.fit import Amounts, amounts_of, budgets_of, model_problems, table_problems
from hotbed.tables.sizing.placement import check_columns, with_placements
from hotbed.tables.spec import Table
from hotbed.telemetry.observer import Observer, Observers
from hotbed.train.build_ranks import (
    compare,
    dense_weights,
    merged_optimizer,
    own_folder,
    own_ids,
    own_rows,
    rank_problems,
    seed_apart,
    tables_of,
)
from hotbed.train.compiled_step import CompiledStep, binary_loss
from hotbed.train.follow import follow_loader, follow_problems, make_follower
from hotbed.train.largest_batch import check_batches_fit, check_unions_fit
from hotbed.train.loop import Training
from hotbed.train.metrics import Breakdown
from hotbed.train.run import Subject, cache_sizes
from hotbed.train.settings import LearningCourse, Loaders, StepIntervals
from hotbed.train.step import Learner, positive_problems, positive_weights, sampled_shift, task_loss
from hotbed.train.step_recording import Loss

__all__ = [
    "BuiltTraining",
    "Sketch",
    "build",
    "changed_settings",
    "compare",
    "dense_optimizer",
    "model_of",
    "option_problems",
    "sketch",
]
_OPTIMIZERS: dict[str, Any] = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}


class BuiltTraining(NamedTuple):
    """A run that is ready to start."""

    training: Training
    subject: Subject


def option_problems(config: RunConfig) -> list[str]:
    """What the model and the row optimizer do not understand of their options."""
    problems = []
    for path, attempt in (
        ("model", lambda: check_model(config.model.name, config.model.options, config.model.source)),
        ("tables", lambda: _row_optimizer(config)),
        ("tables.init", lambda: parse_init(config.tables.init)),
        ("tables.admit", lambda: parse_admit(config.tables.admit)),
        ("tables.expire", lambda: parse_expire(config.tables.expire)),
        ("train.device", lambda: pick_device(config.train.device)),
    ):
        try:
            attempt()
        except ConfigError as error:
            problems.append(f"{path}: {error}")
    return problems


def build(
    config: RunConfig, dataset: Dataset, run: Path, observers: Iterable[Observer] = (), world: World = ALONE
) -> BuiltTraining:
    """Everything a run needs, from its config and its dataset; on every rank of `world`, with the same of both."""
    raise_problems(check(config) or option_problems(config))
    problems = _data_problems(config, dataset.schema) + rank_problems(config, world)
    raise_problems(problems + follow_problems(config, dataset, world))
    device = use_device(config.train.device)
    learner = _learner(config, dataset, device, world)
    loaders = _loaders(config, dataset, device, Share(world.rank, world.size))
    check_batches_fit(learner, loaders)
    check_unions_fit(learner, partial(_loaders, config, dataset, torch.device("cpu"), ALL))
    follower = None
    if config.follow.source:
        log = follow_loader(config, dataset, run)
        loaders, follower = loaders._replace(train=log), make_follower(config.follow, log, learner)
    train = config.train
    pace = StepIntervals(
        train.epochs,
        train.max_steps,
        train.log_every,
        train.eval_every,
        train.checkpoint_every,
        train.checkpoint_full_every,
        train.keep_checkpoints,
    )
    steps = train.epochs * len(loaders.train)
    course = LearningCourse(
        _schedule(train, min(steps, train.max_steps or steps)),
        train.plateau_factor,
        train.patience,
        train.keep_best,
        train.recalibrate,
    )
    training = Training(run, learner, loaders, pace, course, Observers(observers), follower, breakdown_of(config))
    card = card_of(config, dataset.schema)
    notes = _label_notes(config, dataset.schema)
    return BuiltTraining(training, Subject(shown_name(config.model.name), config.data.path, dataset, card, notes))


class Sketch(NamedTuple):
    """What a run will have, before anything is allocated."""

    tables: dict[str, Table]
    optimizer: RowOptimizer
    budgets: Budgets
    precision: Precision
    amounts: Amounts  # of a rank
    most_used: int  # rows that are ever used


def sketch(config: RunConfig, dataset: Dataset, world: World = ALONE) -> Sketch:
    """Tables, the optimizer of their rows, and what they take on a rank."""
    schema = dataset.schema
    optimizer = _row_optimizer(config)
    tables = with_placements(table_specs(config, schema), "row", world.size)
    given = config.tables
    precision = cast(Precision, given.precision)
    check_columns(tables, optimizer, precision, world.size)
    ssd = own_folder(given.ssd, world) or None
    replicas = replica_share(config.parallel.mode, config.parallel.replicas, world.size)
    in_bytes = (given.hbm or None, given.memory or None, ssd)
    budgets = Budgets(given.cache or None, *in_bytes, given.store_precision, given.staging or None, replicas)
    known = own_ids(ids_of_train(schema), world)
    own = own_rows(tables, optimizer, precision, world)
    amounts = amounts_of(own, optimizer, precision, known, given.store_precision)
    budgets = budgets_of(budgets, amounts, rows_of_unseen(schema, config.data.eval_batch_size), world.size)
    return Sketch(tables, optimizer, budgets, precision, amounts, _most_used(schema, tables))


def model_of(config: RunConfig, schema: Schema) -> nn.Module:
    """The model, its first weights drawn from torch's generator."""
    return build_model(**model_settings(config, schema))


def _learner(config: RunConfig, dataset: Dataset, device: torch.device, world: World) -> Learner:
    given, schema = config.tables, dataset.schema
    tables, optimizer, budgets, precision, amounts, most_used = sketch(config, dataset, world)
    raise_problems(table_problems(budgets, amounts, device, most_used), ExitCode.DOES_NOT_FIT)
    if not is_own(config.model.name):  # constructors of users' own may compute
        with torch.device("meta"):  # shapes without memory
            raise_problems(model_problems(model_of(config, schema), device), ExitCode.DOES_NOT_FIT)
    torch.manual_seed(config.train.seed)
    model = model_of(config, schema).to(device)
    if config.train.base_rate:
        _start_at_base_rate(config, schema, model, device)
    rows = tables_of(config, world, budgets.replicas)(
        tables,
        optimizer,
        seed=config.train.seed,
        device=device,
        cache=budgets.cache,
        hbm=budgets.hbm,
        memory=budgets.memory,
        ssd=budgets.ssd,
        staging=budgets.staging,
        policy=given.policy,
        precision=precision,
        store_precision=budgets.store_precision,
    )
    dense = dense_optimizer(config, model) if world.size == 1 else merged_optimizer(config, model)
    seed_apart(config.train.seed, world)
    ahead = given.window or None, given.look_ahead or None
    loss = _loss_of(config, schema)
    compiled = compiled_step(config, model, dense, device, loss) if world.size == 1 else None
    hot = _hot_rows(config, dataset, rows)
    return Learner(
        rows,
        model,
        dense,
        config.dense.lr,
        device,
        *ahead,
        hot,
        world,
        compiled=compiled,
        loss=loss,
        sampled_shift=sampled_shift(_negatives_kept(config, schema)),
    )


def _start_at_base_rate(config: RunConfig, schema: Schema, model: nn.Module, device: torch.device) -> None:
    """Move the output of a fresh model to the share of positives of train."""
    train = schema.splits["train"]
    width = vector_width(config.model.name, config.model.dim)
    vectors = torch.zeros(2, len(schema.features), width, device=device, dtype=torch.float32)
    dense = torch.zeros(2, len(schema.dense), device=device, dtype=torch.float32)
    negatives = (train.rows - train.positives) / float(schema.notes.get("negatives_kept", 1.0))
    set_base_rate(model, vectors, dense, train.positives / max(train.positives + negatives, 1))


def _hot_rows(config: RunConfig, dataset: Dataset, rows: EmbeddingTables) -> tuple[Tensor, Tensor] | None:
    """Keys and uses of what a cache starts with. All tables of a run have one width: one group has them in schema order."""
    sizes = cache_sizes(rows)
    warm = 0 if sizes is None else num_warm(sizes["slots"], config.tables.policy, config.tables.warmup)
    if not warm:
        return None
    shard = rows.groups[0].shard
    found = hot_rows(dataset, warm if shard.world == 1 else sum(table.rows or 0 for table in rows.tables.values()))
    if shard.world > 1:
        mine = found.only((shard.owner_of(torch.from_numpy(found.keys)) == shard.rank).numpy())
        numbers = shard.local_of(torch.from_numpy(mine.keys)).numpy()  # in another order than keys
        found = hottest(numbers, mine.uses, warm)
    return torch.from_numpy(found.keys), torch.from_numpy(found.uses)


def _most_used(schema: Schema, tables: dict[str, Table]) -> int:
    """Rows that a run can ever use: features with one id per sample use no more of them than there are samples."""
    samples = sum(split.rows for split in schema.splits.values())
    rows = {name: table.rows or ids_of_train(schema)[name] for name, table in tables.items()}
    return sum(
        rows[name] if any(one.multi for one in features) else min(rows[name], samples * len(features))
        for name, features in schema.tables.items()
    )


def _row_optimizer(config: RunConfig) -> RowOptimizer:
    tables = config.tables
    common = ("lr", "l2", "weight_decay", "decay_scope", "clip_norm")
    doubled = sorted(set(common) & set(tables.options))
    if doubled:
        raise ConfigError(f"options must not repeat {', '.join(doubled)}; set tables.{doubled[0]} instead")
    return row_optimizer(tables.optimizer, **{name: getattr(tables, name) for name in common}, **tables.options)


def dense_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer of the dense weights of a single process; None if there are none."""
    parameters = dense_weights(model)
    if not parameters:
        return None
    dense = config.dense
    on_cuda = parameters[0].device.type == "cuda"
    is_fused = dense.optimizer == "adam" or (dense.optimizer == "sgd" and on_cuda)
    fused = (
        {"fused": True} if is_fused else {}
    )  # 0.13 instead of 0.36 ms a step for 143k weights; a step can be recorded
    kind = _OPTIMIZERS[dense.optimizer]
    optimizer: torch.optim.Optimizer = kind(parameters, lr=dense.lr, weight_decay=dense.weight_decay, **fused)
    return optimizer


def compiled_step(
    config: RunConfig,
    model: nn.Module,
    dense: torch.optim.Optimizer | None,
    device: torch.device,
    loss: Loss = binary_loss,
) -> CompiledStep | None:
    """The dense part of a step of a single process, recorded where it can be; None on a CPU."""
    return CompiledStep(model, dense, loss, records=config.dense.recorded) if device.type == "cuda" else None


def _loss_of(config: RunConfig, schema: Schema) -> Loss:
    """The loss of all labels, by the weights of tasks and of samples."""
    positives = list(positive_weights(config.train.positive_weight, schema.labels).values())
    kept = _negatives_kept(config, schema)
    if not schema.tasks and not schema.weight and positives == [1] and kept == 1:
        return binary_loss
    weights = [config.train.task_weights.get(task.name, 1.0) for task in schema.labels]
    kinds = [task.kind for task in schema.labels]
    return task_loss(kinds, weights, weighted=bool(schema.weight), positives=positives, kept=kept)


def _negatives_kept(config: RunConfig, schema: Schema) -> float:
    """The share of the negatives that is trained on; a log that is followed has all its rows."""
    return 1.0 if config.follow.source else float(schema.notes.get("negatives_kept", 1.0))


def _label_notes(config: RunConfig, schema: Schema) -> tuple[str, ...]:
    """How the counting of labels differs from the log."""
    corrected = "predicted probabilities are corrected for it"
    notes = []
    kept = _negatives_kept(config, schema)
    if kept < 1:
        notes.append(
            f"train holds {kept:.3g} of the rows whose {schema.label} is 0 (prepare --keep-negatives); {corrected}"
        )
    for name, times in positive_weights(config.train.positive_weight, schema.labels).items():
        if times != 1:
            notes.append(f"positives of {name} count {times:g} times in training (train.positive_weight); {corrected}")
    return tuple(notes)


def train_loader(config: RunConfig, dataset: Dataset, device: torch.device, share: Share = ALL) -> Loader:
    """The batches that a run trains on."""
    data = config.data
    return Loader(
        dataset,
        "train",
        batch_size=data.batch_size,
        shuffle=data.shuffle,
        seed=config.train.seed,
        threads=data.threads,
        pin_memory=device.type == "cuda",
        share=share,
    )


def _loaders(config: RunConfig, dataset: Dataset, device: torch.device, share: Share) -> Loaders:
    data, splits, pin = config.data, dataset.schema.splits, device.type == "cuda"
    train = train_loader(config, dataset, device, share)
    held_out: dict[str, Loader] = {}
    for name in ("valid", "test"):
        if name in splits and splits[name].rows:
            size = data.eval_batch_size
            held_out[name] = Loader(dataset, name, batch_size=size, threads=data.threads, pin_memory=pin, share=share)
    return Loaders(train, held_out)


def _schedule(train: TrainConfig, total_steps: int) -> Schedule:
    """The factor on both learning rates."""
    if train.schedule == "warmup":
        return Warmup(1.0, train.warmup_steps)
    if train.schedule == "cosine":
        return Cosine(1.0, total_steps, train.warmup_steps)
    if train.schedule == "decay":
        return Decay(1.0, train.decay_every, train.decay_factor)
    return Fixed(1.0)


def _data_problems(config: RunConfig, schema: Schema) -> list[str]:
    problems = []
    train, valid = schema.splits.get("train"), schema.splits.get("valid")
    if train is None or not train.rows:
        problems.append(f"data.path: {config.data.path} has no rows to train on; its splits are {list(schema.splits)}")
    if valid is None or not valid.rows:
        for name, off in (("patience", 0), ("plateau_factor", 1.0)):
            if getattr(config.train, name) != off:
                problems.append(f"train.{name}: needs a valid split, which {config.data.path} does not have")
    labels = [task.name for task in schema.labels]
    for name, weight in config.train.task_weights.items():
        if name not in labels:
            problems.append(
                f"train.task_weights: {config.data.path} has no label {name!r}; there are {', '.join(labels)}"
            )
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            problems.append(f"train.task_weights: the weight of {name} must be a number from 0, not {weight!r}")
    problems += positive_problems(config.train.positive_weight, schema.labels, config.data.path)
    problems += [f"train.{one}" for one in breakdown_of(config).problems(schema)]
    return problems + id_problems(config.tables.dynamic, config.data.path, schema)


def breakdown_of(config: RunConfig) -> Breakdown:
    """The features by which metrics are also given."""
    return Breakdown(config.train.group, tuple(one.strip() for one in config.train.slice.split(",") if one.strip()))


def changed_settings(before: RunConfig, after: RunConfig) -> list[str]:
    """The paths of the settings that differ."""
    one, other = dataclasses.asdict(before), dataclasses.asdict(after)
    return [
        f"{section}.{name}" for section in one for name in one[section] if one[section][name] != other[section][name]
    ]
