"""The settings of a run: each with its default, its limits and one line on what it does.

A frozen RunConfig holds them; it comes from nested mappings (config_check.py, a run file: run_file.py) or is made in Python.
JSON represents it exactly. The packages that handle
whole runs read a RunConfig (train, forecast, scorer, export, report, cli); the packages below take plain arguments, and cannot
import this one. The model and the optimizer know what their `options` may hold, so train/build.py checks those.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

DEVICES = r"auto|cpu|cuda(:\d+)?"
PLACES = r"(row|table|column)(\s*,\s*[^,=]+=(row|table|column))*"
INIT = r"(normal|uniform|constant)\(\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\)"

ROW_RATES = {"sgd": 0.1, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001, "ftrl": 0.05}
DENSE_RATES = {"adam": 0.001, "adagrad": 0.01, "sgd": 0.1}
POLICIES = ("oracle", "lfu", "lru", "static")
MOST_WINDOW, MOST_AHEAD = 30, 233  # batches; the limits of the cache
PRECISIONS = ("fp32", "fp16", "bf16")
STORE_PRECISIONS = ("same", "int8")
MODES = ("sharded", "replicated", "all-reduce", "auto")
MERGES = ("auto", "frozen_v", "shared_v", "moments", "params")


def setting(
    default: Any,
    about: str,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    one_of: tuple[str, ...] = (),
    form: tuple[str, str] = ("", ""),
    amount: bool = False,
) -> Any:
    """A field with its limits; `form` is a pattern and its description, `amount` is for bytes ("" is off)."""
    limits = {"about": about, "least": least, "most": most, "above": above, "one_of": one_of, "form": form}
    return field(default=default, metadata={**limits, "amount": amount})


def _usual_rate(section: Any, rates: Mapping[str, float]) -> None:
    """Replace a learning rate of 0, so that a saved config has the number that was used."""
    if section.lr == 0 and section.optimizer in rates:
        object.__setattr__(section, "lr", rates[section.optimizer])


@dataclass(frozen=True)
class DataConfig:
    """The data, and how it is read."""

    path: str = setting(
        "criteo-like", "dataset directory, or criteo-like, criteo-like:ROWS, adult", form=(r"\S.*", "a name")
    )
    batch_size: int = setting(4096, "samples per training step, of all ranks together", least=1)
    eval_batch_size: int = setting(0, "samples per evaluation step, of all ranks; 0: data.batch_size", least=0)
    shuffle: bool = setting(True, "shuffle the train split anew every epoch, by the seed")
    threads: int = setting(
        0, "reader threads; 0: half of the cores, 2 to 8; no effect on the result", least=0, most=256
    )

    def __post_init__(self) -> None:
        if (
            self.eval_batch_size == 0 < self.batch_size
        ):  # a cache that holds a training batch then holds one of evaluation
            object.__setattr__(self, "eval_batch_size", self.batch_size)


@dataclass(frozen=True)
class ModelConfig:
    """The model: looked-up vectors and dense features -> a logit."""

    name: str = setting("deepfm", "see `hotbed models`; your own: my_model.py:MyModel", form=(r"\S.*", "a name"))
    dim: int = setting(16, "width of an embedding vector", least=1, most=4096)
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"about": "the model's own settings, e.g. hidden, dropout; see `hotbed models`"}
    )
    source: dict[str, Any] = field(
        default_factory=dict, metadata={"about": "text of the file of your own model, stored when a run starts"}
    )


@dataclass(frozen=True)
class TablesConfig:
    """The embedding tables and the optimizer of their rows."""

    optimizer: str = setting(
        "adagrad",
        "row optimizer, fused into the backward pass",
        one_of=tuple(ROW_RATES),
    )
    lr: float = setting(0.0, "learning rate of the rows; 0: the optimizer's default", least=0)
    l2: float = setting(0.0, "adds l2 * w to the gradient of a row", least=0)
    weight_decay: float = setting(0.0, "shrinks rows by lr * weight_decay, decoupled from the gradient", least=0)
    decay_scope: str = setting(
        "touched",
        "which rows decay: those of the batch (touched), or all rows at every step (table, slow)",
        one_of=("touched", "table"),
    )
    clip_norm: float = setting(0.0, "clips the gradient of each row to this norm; 0: off", least=0)
    init: str = setting(
        "normal(0.01)",
        "initial value of a row: normal(std), uniform(bound) or constant(value)",
        form=(INIT, "normal(std), uniform(bound) or constant(value)"),
    )
    pooling: str = setting("mean", "how the ids of a multi-valued feature are combined", one_of=("sum", "mean"))
    cache: float = setting(
        0.0, "share of the rows on the device; the rest is in host memory; 0: no cache", least=0, most=1
    )
    hbm: str = setting("", "device memory for rows and their index, e.g. 2GiB, instead of a share", amount=True)
    memory: str = setting("", "maximum host memory for the rows behind the cache, e.g. 64GiB", amount=True)
    ssd: str = setting("", "folder and size limit for rows that do not fit in memory, e.g. /fast/rows:500GiB")
    staging: str = setting(
        "",
        "maximum host memory for rows on their way to the cache and back, e.g. 256MiB; CUDA uses as much again on the device; "
        "default: what the largest window needs",
        amount=True,
    )
    policy: str = setting("oracle", "which rows stay in the cache; no effect on the result", one_of=POLICIES)
    warmup: float = setting(
        0.0,
        "share of the cache filled with the most frequent rows of train before the first step; static keeps them (0: 0.9)",
        least=0,
        most=1,
    )
    window: int = setting(0, "batches planned and fetched together; 0: automatic", least=0, most=MOST_WINDOW)
    look_ahead: int = setting(
        0, "batches whose ids are known before they are planned; 0: automatic", least=0, most=MOST_AHEAD
    )
    precision: str = setting("fp32", "data type of the rows; 16-bit types round stochastically", one_of=PRECISIONS)
    store_precision: str = setting(
        "same",
        "data type of rows that leave the cache for host memory: same as in the cache, or int8, rounded stochastically",
        one_of=STORE_PRECISIONS,
    )
    dynamic: bool | list[str] = setting(  # noqa: RUF009  frozen
        False,
        "tables without a vocabulary: any 64-bit id gets a row; true: all tables; [user, ad]: the tables of those features",
    )
    admit: str = setting(
        "", "which ids of dynamic tables get a row: after 3; after 3, sketch 64MiB; probability 0.1; default: all"
    )
    expire: str = setting(
        "",
        "when dynamic ids lose their row: unused 100000 steps; unused 7d; score below 0.5, half-life 10000; default: never",
    )
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"about": "the optimizer's own settings, e.g. eps, beta1, l1"}
    )

    def __post_init__(self) -> None:
        _usual_rate(self, ROW_RATES)


@dataclass(frozen=True)
class DenseConfig:
    """The optimizer of the model's dense weights."""

    optimizer: str = setting("adam", "dense optimizer", one_of=tuple(DENSE_RATES))
    lr: float = setting(0.0, "learning rate of the dense weights; 0: the optimizer's default", least=0)
    weight_decay: float = setting(0.0, "adds weight_decay * w to the gradient", least=0)
    recorded: bool = setting(True, "on CUDA, replay the dense part of a step as one graph, where the model allows it")

    def __post_init__(self) -> None:
        _usual_rate(self, DENSE_RATES)


@dataclass(frozen=True)
class TrainConfig:
    """How long, how often, and when to stop."""

    epochs: int = setting(1, "passes over the train split", least=1)
    max_steps: int = setting(0, "stop after this many steps; 0: off", least=0)
    seed: int = setting(0, "initial values, order of samples, dropout", least=0, most=2**63 - 1)
    device: str = setting("auto", "auto uses CUDA if there is a device", form=(DEVICES, "auto, cpu, cuda or cuda:N"))
    log_every: int = setting(50, "steps between two lines of metrics.jsonl", least=1)
    eval_every: int = setting(0, "steps between evaluations of the valid split; 0: after each epoch", least=0)
    patience: int = setting(0, "stop after this many evaluations without a better valid AUC; 0: off", least=0)
    plateau_factor: float = setting(
        1.0, "multiplies both learning rates after an evaluation without a better valid AUC; 1: off", above=0, most=1
    )
    keep_best: bool = setting(True, "whether the final model has the weights with the best valid AUC, or the last ones")
    base_rate: bool = setting(False, "start the output of the model at the share of positives in the train split")
    recalibrate: bool = setting(
        False,
        "at the end, shift the output so that its mean over the valid split (train if there is none) equals "
        "the share of positives",
    )
    schedule: str = setting(
        "constant", "schedule of both learning rates", one_of=("constant", "warmup", "cosine", "decay")
    )
    warmup_steps: int = setting(0, "steps of warmup, for the schedules warmup and cosine", least=0)
    decay_every: int = setting(1000, "for the schedule decay: steps between two reductions", least=1)
    decay_factor: float = setting(0.5, "for the schedule decay: what each reduction multiplies by", above=0, most=1)
    task_weights: dict[str, Any] = field(
        default_factory=dict,
        metadata={"about": "the weight of the loss of each label, if there are several; default: 1"},
    )
    positive_weight: float | dict[str, Any] = setting(  # noqa: RUF009  frozen
        1.0,
        "how many times a sample with the label 1 counts in the loss: a number for the label, or by label {click: 10, like: 3};"
        " predicted probabilities are corrected for it",
    )
    group: str = setting("", "an id feature, such as a user: also measure the AUC within its groups")
    slice: str = setting("", "id features, separated by commas: also give metrics for each of their values")
    checkpoint_every: int = setting(0, "steps between checkpoints; 0: only at the end and when interrupted", least=0)
    checkpoint_full_every: int = setting(
        8, "every k-th checkpoint holds all rows, the others only what changed", least=1
    )
    keep_checkpoints: int = setting(2, "how many checkpoints to keep, with those they depend on", least=1)


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of a run that torchrun starts; not used with one process."""

    k_step: int = setting(1, "steps between merges of the dense weights; 1 averages gradients at every step", least=1)
    merge: str = setting(
        "auto",
        "what is merged in addition to the dense weights, for k_step above 1; auto: frozen_v, or params for sgd",
        one_of=MERGES,
    )
    scale_lr: bool = setting(True, "between merges, multiply Adam's steps by the square root of the number of ranks")
    overlap: bool = setting(True, "overlap a merge with the next steps instead of waiting for it")
    delay: int = setting(0, "steps between the start of an overlapped merge and its use; 0: k_step / 4", least=0)
    across_only: bool = setting(False, "average gradients inside a machine at every step, merge across machines")
    mode: str = setting(
        "sharded",
        "how ranks get rows that others own; the same result, bags and all-reduce up to rounding",
        one_of=MODES,
    )
    placement: str = setting(
        "row",
        "what a rank has of a table: some rows, all or nothing (table), or some columns; exceptions by name: row, ad=table",
        form=(PLACES, "row, table or column, and those of single tables by name: row, ad=table, user=column"),
    )
    replicas: float = setting(
        0.5, "the share of tables.hbm for replicas of rows, in all modes but sharded", above=0, most=0.95
    )
    traffic: str = setting(
        "fp32", "data type of rows and gradients sent between ranks; 16 bits are an approximation", one_of=PRECISIONS
    )
    once_per_node: bool = setting(
        False,
        "for mode sharded: a row that several ranks of a machine request crosses to it once; sums of gradients round "
        "differently",
    )
    local_ranks: int = setting(0, "ranks on each machine; 0: as torchrun sets it", least=0)
    bind: bool | str = setting(
        "auto",
        "bind ranks to the cores and the memory of the NUMA node of their GPU, or to shares of the cores; auto: where there "
        "are several NUMA nodes",
        form=("auto", "true, false or auto"),
    )
    timeout: float = setting(
        300.0, "seconds to wait for another rank before all ranks stop with an error that names it", above=0
    )


@dataclass(frozen=True)
class FollowConfig:
    """A log that never ends, trained as it arrives instead of the train split; off without a source."""

    source: str = setting(
        "",
        "folder to which files are added, local or s3://..., or kafka://HOST:PORT/TOPIC; rows are read as data.path says",
    )
    time: str = setting("", "time column, COLUMN or COLUMN:UNIT; default: that of the dataset, else the time of a file")
    checkpoint_minutes: float = setting(10.0, "minutes between checkpoints while there is something to train", above=0)
    settle_seconds: float = setting(
        5.0, "a file is complete after this many seconds without a change; 0: at once", least=0
    )
    poll_seconds: float = setting(1.0, "seconds between checks for something new", above=0)
    idle_seconds: float = setting(0.0, "end when nothing has arrived for this many seconds; 0: never", least=0)
    late: str = setting("train", "files that arrive after one that sorts behind them", one_of=("train", "skip"))
    skip: str = setting("", "files to leave out, by their paths below the folder, separated by commas")
    max_bad: str = setting("1%", "maximum of bad rows in a file: a number or a percentage")


@dataclass(frozen=True)
class RunConfig:
    """The whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    follow: FollowConfig = field(default_factory=FollowConfig)

    def to_json(self) -> str:
        """Every setting, readable; `read_tree(json.loads(text))` gives back an equal config."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "model": ModelConfig,
    "tables": TablesConfig,
    "dense": DenseConfig,
    "train": TrainConfig,
    "parallel": ParallelConfig,
    "follow": FollowConfig,
}
FIELDS: dict[str, dataclasses.Field[Any]] = {
    f"{section}.{one.name}": one for section, kind in SECTIONS.items() for one in dataclasses.fields(kind)
}
TYPES: dict[str, Any] = {
    f"{section}.{name}": dict if isinstance(hint, types.GenericAlias) else hint
    for section, kind in SECTIONS.items()
    for name, hint in get_type_hints(kind).items()
}
