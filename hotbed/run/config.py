"""The settings of a run: each with its default, its limits and one line on what it does.

Nested mappings (a run file, see run_file.py) or dataclasses made in Python become a frozen RunConfig, or one ConfigError that
lists every mistake with its path, the value given and what is allowed. JSON represents it exactly. The packages that handle
whole runs read a RunConfig (train, forecast, scorer, export, report, cli); the packages below take plain arguments, and cannot
import this one. The model and the optimizer know what their `options` may hold, so train/build.py checks those.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from hotbed.errors import ConfigError
from hotbed.host.memory import parse_bytes, parse_share, percent_hint

DEVICES = r"auto|cpu|cuda(:\d+)?"
INIT = r"(normal|uniform|constant)\(\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\)"

ROW_RATES = {"sgd": 0.1, "adagrad": 0.02, "rowwise_adagrad": 0.02, "adam": 0.001, "ftrl": 0.05}
DENSE_RATES = {"adam": 0.001, "adagrad": 0.01, "sgd": 0.1}
POLICIES = ("oracle", "lfu", "lru", "static")
MOST_WINDOW, MOST_AHEAD = 30, 233  # batches; the limits of the cache
PRECISIONS = ("fp32", "fp16", "bf16")
MODES = ("sharded", "replicated", "auto")
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
    eval_batch_size: int = setting(0, "samples per evaluation step, of all ranks; 0 takes data.batch_size", least=0)
    shuffle: bool = setting(True, "a new order of the train split every epoch, from the seed")
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
    lr: float = setting(0.0, "learning rate of the rows; 0 takes the usual one of the optimizer", least=0)
    l2: float = setting(0.0, "adds l2 * w to the gradient of a row", least=0)
    weight_decay: float = setting(0.0, "shrinks rows by lr * weight_decay, apart from the gradient", least=0)
    decay_scope: str = setting(
        "touched",
        "rows that decay: those of the batch, or the whole table every step (slow)",
        one_of=("touched", "table"),
    )
    clip_norm: float = setting(0.0, "longest gradient of one row; 0 is off", least=0)
    init: str = setting(
        "normal(0.01)",
        "initial value of a row: normal(std), uniform(bound) or constant(value)",
        form=(INIT, "normal(std), uniform(bound) or constant(value)"),
    )
    pooling: str = setting("mean", "joins the ids of a multi-valued feature", one_of=("sum", "mean"))
    cache: float = setting(0.0, "share of the rows on the device, the rest in host memory; 0 is off", least=0, most=1)
    hbm: str = setting("", "device memory for rows and their index, e.g. 2GiB, instead of a share", amount=True)
    memory: str = setting("", "most host memory for the rows behind the cache, e.g. 64GiB", amount=True)
    ssd: str = setting("", "folder and bytes for the rows that memory does not hold, e.g. /fast/rows:500GiB")
    policy: str = setting("oracle", "which rows stay in the cache; no effect on the result", one_of=POLICIES)
    window: int = setting(0, "batches planned and fetched together; 0 is automatic", least=0, most=MOST_WINDOW)
    look_ahead: int = setting(
        0, "batches whose ids are known before they are planned; 0 is automatic", least=0, most=MOST_AHEAD
    )
    precision: str = setting("fp32", "number type of the rows; the 16-bit ones round stochastically", one_of=PRECISIONS)
    dynamic: bool | list[str] = setting(  # noqa: RUF009  frozen
        False, "tables without a vocabulary: any 64-bit id gets a row; true is all, [user, ad] those features"
    )
    admit: str = setting(
        "", "which ids of dynamic tables get a row: after 3; after 3, sketch 64MiB; probability 0.1; all if not given"
    )
    expire: str = setting(
        "", "when they lose it: unused 100000 steps; unused 7d; score below 0.5, half-life 10000; never if not given"
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
    lr: float = setting(0.0, "learning rate of the dense weights; 0 takes the usual one of the optimizer", least=0)
    weight_decay: float = setting(0.0, "adds weight_decay * w to the gradient", least=0)
    recorded: bool = setting(True, "on CUDA, replay the dense part of a step as one graph, where the model allows it")

    def __post_init__(self) -> None:
        _usual_rate(self, DENSE_RATES)


@dataclass(frozen=True)
class TrainConfig:
    """How long, how often, and when to stop."""

    epochs: int = setting(1, "passes over the train split", least=1)
    max_steps: int = setting(0, "stop after this many steps; 0 is off", least=0)
    seed: int = setting(0, "initial values, order of samples, dropout", least=0, most=2**63 - 1)
    device: str = setting("auto", "auto takes CUDA when there is one", form=(DEVICES, "auto, cpu, cuda or cuda:N"))
    log_every: int = setting(50, "steps between two lines of metrics.jsonl", least=1)
    eval_every: int = setting(0, "steps between evaluations of the valid split; 0 is after each epoch", least=0)
    patience: int = setting(0, "stop after this many evaluations without a better valid AUC; 0 is off", least=0)
    plateau_factor: float = setting(
        1.0, "multiplies both learning rates after an evaluation without a better valid AUC; 1 is off", above=0, most=1
    )
    keep_best: bool = setting(True, "the final model is that of the best valid AUC, else the last")
    base_rate: bool = setting(False, "start the output of the model at the share of positives of the train split")
    recalibrate: bool = setting(
        False, "at the end, shift the output so that its mean over the train split is the share of positives there"
    )
    schedule: str = setting(
        "constant", "course of both learning rates", one_of=("constant", "warmup", "cosine", "decay")
    )
    warmup_steps: int = setting(0, "for the schedules warmup and cosine", least=0)
    decay_every: int = setting(1000, "for the schedule decay: steps between two reductions", least=1)
    decay_factor: float = setting(0.5, "for the schedule decay: what each reduction multiplies by", above=0, most=1)
    task_weights: dict[str, Any] = field(
        default_factory=dict,
        metadata={"about": "by label, the weight of its loss, where there are several; 1 if not given"},
    )
    group: str = setting("", "an id feature, such as a user: the AUC within its groups is measured, too")
    slice: str = setting("", "id features, separated by commas: metrics are also given for each of their values")
    checkpoint_every: int = setting(0, "steps between checkpoints; 0 is at the end and when interrupted", least=0)
    checkpoint_full_every: int = setting(8, "every k-th checkpoint holds all rows, the others what changed", least=1)
    keep_checkpoints: int = setting(2, "how many checkpoints stay, with all that they need", least=1)


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of a run that torchrun starts; not used with one process."""

    k_step: int = setting(1, "steps between merges of the dense weights; 1 averages gradients at every step", least=1)
    merge: str = setting(
        "auto",
        "what is merged in addition to the dense weights, for k_step above 1; auto: frozen_v, for sgd params",
        one_of=MERGES,
    )
    scale_lr: bool = setting(True, "between merges, Adam's steps are longer by the root of the number of ranks")
    overlap: bool = setting(True, "a merge overlaps with the next steps instead of being waited for")
    delay: int = setting(0, "steps between the start of an overlapped merge and its use; 0: k_step / 4", least=0)
    across_only: bool = setting(False, "average gradients inside a machine at every step, merge across machines")
    mode: str = setting(
        "sharded", "how ranks get rows that others own; the same result, bags up to rounding", one_of=MODES
    )
    traffic: str = setting(
        "fp32", "number type of rows and gradients between ranks; 16 bits are an approximation", one_of=PRECISIONS
    )
    local_ranks: int = setting(0, "ranks on each machine; 0: as torchrun sets it", least=0)
    timeout: float = setting(300.0, "seconds to wait for another rank before all stop, and the error names it", above=0)


@dataclass(frozen=True)
class FollowConfig:
    """A log that never ends, trained as it arrives instead of the train split; off without a source."""

    source: str = setting(
        "", "folder to which files are added, or kafka://HOST:PORT/TOPIC; rows are read as data.path says"
    )
    time: str = setting(
        "", "time column, COLUMN or COLUMN:UNIT; not given: that of the dataset, else the time of a file"
    )
    checkpoint_minutes: float = setting(10.0, "minutes between checkpoints while there is something to train", above=0)
    settle_seconds: float = setting(5.0, "a file is whole when it has not changed for so long; 0: at once", least=0)
    poll_seconds: float = setting(1.0, "seconds between two looks for something new", above=0)
    idle_seconds: float = setting(0.0, "end when nothing has arrived for so long; 0 is never", least=0)
    late: str = setting("train", "files that come after one whose name sorts behind theirs", one_of=("train", "skip"))
    skip: str = setting("", "files that are left out, by their paths below the folder, separated by commas")
    max_bad: str = setting("1%", "bad rows that a file may have, as a number or a percentage")


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
OPTIONED = {"model": "model", "tables": "row optimizer"}
TYPES: dict[str, Any] = {
    f"{section}.{name}": dict if isinstance(hint, types.GenericAlias) else hint
    for section, kind in SECTIONS.items()
    for name, hint in get_type_hints(kind).items()
}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping of names to values",
    bool | list[str]: "true, false or a list of features",
}


def read_tree(tree: Mapping[str, Any]) -> RunConfig:
    """A RunConfig from nested mappings, or a ConfigError listing every mistake."""
    flat: dict[str, Any] = {}
    problems = flatten(tree, flat)
    config, wrong = from_flat(flat)
    raise_problems(problems + wrong)
    return config


def check(config: RunConfig) -> list[str]:
    """The mistakes of a RunConfig built in Python."""
    flat: dict[str, Any] = {}
    return flatten(dataclasses.asdict(config), flat) + from_flat(flat)[1]


def raise_problems(problems: list[str]) -> None:
    """One ConfigError for all of them."""
    if problems:
        count = "1 setting is wrong" if len(problems) == 1 else f"{len(problems)} settings are wrong"
        raise ConfigError("\n  - ".join([f"{count}:", *problems]))


def flatten(tree: Mapping[Any, Any], flat: dict[str, Any]) -> list[str]:
    """Nested mappings into {"section.name": value}; unknown names are mistakes."""
    problems = []
    for section, settings in tree.items():
        if section not in SECTIONS:
            problems.append(unknown(str(section), SECTIONS))
        elif settings is not None and not isinstance(settings, Mapping):
            problems.append(f"{section}: must be a mapping of settings, not {shown(settings)}")
        else:
            for name, value in (settings or {}).items():
                path = f"{section}.{name}"
                if path in FIELDS:
                    flat[path] = value
                else:
                    problems.append(unknown(path, FIELDS))
    return problems


def from_flat(flat: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """A config from checked values; a wrong value keeps its default and is reported."""
    problems: list[str] = []
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for path, given in flat.items():
        section, name = path.split(".")
        try:
            if FIELDS[path].metadata.get("amount"):
                value = _amount(path, given)
            else:
                value = _typed(TYPES[path], _share(given) if path == "tables.cache" else given)
                _limit(FIELDS[path].metadata, value)
        except ConfigError as error:
            problems.append(str(error))
        except ValueError as error:
            problems.append(
                f"{path}: {error}, not {shown(given)}{percent_hint(given) if path == 'tables.cache' else ''}"
            )
        else:
            sections[section][name] = value
    config = RunConfig(**{name: SECTIONS[name](**values) for name, values in sections.items()})
    wrong = _contradictions(config.train) + _cache_contradictions(config.tables) + _id_contradictions(config.tables)
    return config, problems + wrong + _merge_contradictions(config)


def _cache_contradictions(tables: TablesConfig) -> list[str]:
    problems = []
    if tables.cache and tables.hbm:
        given = f"not {tables.hbm!r} in addition to tables.cache={tables.cache:g}"
        problems.append(f"tables.hbm: is the other way to say how large the cache is, {given}; leave one of them out")
    if (tables.cache or tables.hbm) and tables.decay_scope == "table":
        size = "tables.cache" if tables.cache else "tables.hbm"
        why = "every row decays at every step, and a cache holds only some"
        problems.append(f"tables.decay_scope: must be touched with {size}, not 'table'; {why}")
    if tables.memory and not (tables.cache or tables.hbm or tables.ssd or tables.dynamic):
        problems.append(
            "tables.memory: is for the rows behind a cache; give --cache, --hbm or --ssd (tables.cache, hbm or ssd) too"
        )
    if tables.ssd and not tables.memory:
        problems.append(
            "tables.ssd: holds what memory does not; give --memory (tables.memory) too, e.g. --memory 16GiB"
        )
    return problems


def _id_contradictions(tables: TablesConfig) -> list[str]:
    """Contradictions of dynamic ids; hotbed.ids knows the form of their rules, so train/build.py checks it."""
    problems = []
    if not tables.dynamic:
        for name in ("admit", "expire"):
            if rule := getattr(tables, name):
                problems.append(
                    f"tables.{name}: is for ids of dynamic tables, not {rule!r} with tables.dynamic=false; "
                    "set tables.dynamic too (--dynamic)"
                )
        return problems
    if tables.policy == "static":
        why = "it keeps rows that are known before training, and dynamic ids get theirs on the way"
        problems.append(f"tables.policy: must be oracle, lfu or lru with tables.dynamic, not 'static'; {why}")
    if tables.decay_scope == "table" and not (tables.cache or tables.hbm):
        why = "dynamic ids are looked up in a cache, and it holds only some rows"
        problems.append(f"tables.decay_scope: must be touched with tables.dynamic, not 'table'; {why}")
    return problems


def _merge_contradictions(config: RunConfig) -> list[str]:
    problems, parallel = [], config.parallel
    if parallel.delay > parallel.k_step:
        problems.append(
            f"parallel.delay: must be at most parallel.k_step ({parallel.k_step}), not {parallel.delay}: a merge is used "
            "before the next one starts"
        )
    if config.dense.optimizer == "sgd" and parallel.merge in ("frozen_v", "shared_v"):
        problems.append(
            f"parallel.merge: must be auto, moments or params with dense.optimizer=sgd, not {parallel.merge!r}; SGD has no "
            "second moment to share"
        )
    return problems


def _share(given: Any) -> Any:
    """1.5% as a number; anything else is checked later."""
    if isinstance(given, str) and given.endswith("%"):
        with suppress(ValueError):
            return parse_share(given)
    return given


def _amount(path: str, given: Any) -> str:
    """Text for parse_bytes, as it was given; numbers need no quotes."""
    if given != "":
        parse_bytes(given, path)
    return str(given)


def _contradictions(train: TrainConfig) -> list[str]:
    if train.schedule == "warmup" and not train.warmup_steps:
        return ["train.warmup_steps: must be at least 1 with train.schedule=warmup, not 0"]
    if train.schedule in ("constant", "decay") and train.warmup_steps:
        given = f"not {train.warmup_steps}; the schedules warmup and cosine use it"
        return [f"train.warmup_steps: must be 0 with train.schedule={train.schedule}, {given}"]
    return []


def _typed(kind: Any, given: Any) -> Any:
    """The value in the type of its field; numbers may be text, because YAML reads 1e-3 as text."""
    if isinstance(kind, types.UnionType):
        if isinstance(given, bool) or (isinstance(given, list) and all(isinstance(one, str) and one for one in given)):
            return given
    elif kind in (int, float) and not isinstance(given, bool):
        try:
            number = float(given) if not isinstance(given, int) else given
        except (TypeError, ValueError):
            raise ValueError(f"must be {_WORDS[kind]}") from None
        if abs(number) < 1e300 and (kind is float or number == int(number)):
            return kind(number)
    elif isinstance(given, kind) and isinstance(given, bool) == (kind is bool):
        if kind is dict and not _is_plain(given):
            raise ValueError("must hold plain values (numbers, text, lists) under names that are text")
        return given
    raise ValueError(f"must be {_WORDS[kind]}")


def _is_plain(value: Any) -> bool:
    """True when JSON gives the value back as it was."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False


def _limit(limits: Mapping[str, Any], value: Any) -> None:
    if (least := limits.get("least")) is not None and value < least:
        raise ValueError(f"must be at least {least}")
    if (above := limits.get("above")) is not None and value <= above:
        raise ValueError(f"must be above {above}")
    if (most := limits.get("most")) is not None and value > most:
        raise ValueError(f"must be at most {most}")
    if (one_of := limits.get("one_of")) and value not in one_of:
        raise ValueError(f"must be one of {', '.join(one_of)}")
    pattern, words = limits.get("form", ("", ""))
    if pattern and not re.fullmatch(pattern, value):
        raise ValueError(f"must be {words}")


def unknown(path: str, known: Iterable[str]) -> str:
    """`no such setting`, with the same name elsewhere, else the closest name, else all names of the section."""
    known = list(known)
    section, _, name = path.partition(".")
    close = [one for one in known if name and one.partition(".")[2] == name]
    close = close or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    hint = f" (settings of one {OPTIONED[section]} alone go under {section}.options)" if section in OPTIONED else ""
    if close:
        return f"{path}: no such setting; did you mean {close[0]}?{hint}"
    names = [one for one in known if one.startswith(f"{section}.")] or known
    return f"{path}: no such setting; there are {', '.join(names)}{hint}"


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
