"""Values as a user gives them in, a RunConfig out, or one ConfigError that lists every mistake.

A mistake names its path, the value given and what is allowed. Values that contradict each other are mistakes, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, get_args, get_origin

from hotbed.errors import ConfigError, ExitCode
from hotbed.host.memory import parse_bytes, parse_share, percent_hint
from hotbed.run.config import FIELDS, SECTIONS, TYPES, RunConfig, TablesConfig, TrainConfig

OPTIONED = {"model": "model", "tables": "row optimizer"}
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping of names to values",
    list: "a list of names",
    bool | list[str]: "true, false or a list of features",
    bool | str: "true, false or auto",
    float | dict[str, Any]: "a number, or a mapping of labels to numbers",
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


def raise_problems(problems: list[str], exit_code: ExitCode = ExitCode.USAGE) -> None:
    """One ConfigError for all of them."""
    if problems:
        count = "1 setting is wrong" if len(problems) == 1 else f"{len(problems)} settings are wrong"
        error = ConfigError("\n  - ".join([f"{count}:", *problems]))
        error.exit_code = exit_code
        raise error


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
    return config, problems + wrong + _merge_contradictions(config) + _follow_contradictions(config)


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
    if tables.staging and not (tables.cache or tables.hbm or tables.ssd or tables.dynamic):
        problems.append(
            "tables.staging: is for rows on their way to a cache; give --cache, --hbm or --ssd (tables.cache, hbm or ssd) too"
        )
    if tables.warmup and not (tables.cache or tables.hbm or tables.dynamic):
        problems.append("tables.warmup: is the share of a cache; give --cache or --hbm (tables.cache or hbm) too")
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
    if tables.warmup:
        why = "the rows of dynamic ids are not known before training"
        problems.append(f"tables.warmup: must be 0 with tables.dynamic, not {tables.warmup}; {why}")
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


def _follow_contradictions(config: RunConfig) -> list[str]:
    """Settings of a log that is followed where none is, and settings that have no effect on one."""
    follow, train = config.follow, config.train
    if not follow.source:
        given = [one.name for one in dataclasses.fields(follow) if getattr(follow, one.name) != one.default]
        return [f"follow.{name}: is for a log that is followed; give --follow (follow.source) too" for name in given]
    problems = []
    if train.epochs != 1:
        problems.append(
            f"train.epochs: must be 1 with follow.source, not {train.epochs}: a log that never ends has no epochs"
        )
    if train.recalibrate:
        problems.append("train.recalibrate: must be false with follow.source: rows are read once, when they arrive")
    for name, off in (("patience", 0), ("plateau_factor", 1.0)):
        if getattr(train, name) != off and not train.eval_every:
            problems.append(f"train.{name}: needs train.eval_every with follow.source: there is no end of an epoch")
    if follow.source.startswith("kafka://") and follow.late != "train":
        problems.append(f"follow.late: is for files, not {follow.late!r} with {follow.source}")
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
        for arm in get_args(kind):
            with suppress(ValueError):
                return _typed(get_origin(arm) or arm, given)
    elif kind is list:
        if isinstance(given, list) and all(isinstance(one, str) and one for one in given):
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
    if pattern and isinstance(value, str) and not re.fullmatch(pattern, value):
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
