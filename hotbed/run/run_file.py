"""Run files and `--set path=value` texts -> one RunConfig and a list of all mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hotbed.errors import ConfigError
from hotbed.files import path_of
from hotbed.files.uri import clean_uri
from hotbed.run.config import FIELDS, SECTIONS, TYPES, RunConfig
from hotbed.run.config_check import flatten, from_flat, shown, unknown

RUN_FILES = (".yaml", ".yml", ".toml", ".json")


def compose(
    run_file: Path | None = None, overrides: Mapping[str, Any] | None = None, sets: Iterable[str] = ()
) -> tuple[RunConfig, list[str]]:
    """Defaults, run file, overrides {"section.name": value}, `path=value` texts; later ones win. And all mistakes."""
    flat, problems = flat_settings(run_file, overrides, sets)
    config, wrong = from_flat(flat)
    return config, problems + wrong


def given_settings(
    run_file: Path | None = None, overrides: Mapping[str, Any] | None = None, sets: Iterable[str] = ()
) -> frozenset[str]:
    """The paths of all settings that `compose` does not take from the defaults."""
    return frozenset(flat_settings(run_file, overrides, sets)[0])


def flat_settings(
    run_file: Path | None, overrides: Mapping[str, Any] | None, sets: Iterable[str]
) -> tuple[dict[str, Any], list[str]]:
    """{path: value} of all settings that are not defaults, and the mistakes in their texts."""
    flat: dict[str, Any] = {}
    problems: list[str] = []
    if run_file is not None:
        problems += flatten(read_run_file(run_file), flat)
    named = flat.get("model.name")
    flat.update(overrides or {})
    for text in sets:
        problems += _set(text, flat)
    for name in ("data.path", "follow.source"):
        place = flat.get(name)
        if isinstance(place, str) and not place.startswith("kafka://"):
            flat[name] = clean_uri(place)  # what a run writes down has no secrets
    if named is not None and flat["model.name"] != named:  # the source in the run file is that of its own model
        flat.pop("model.source", None)
    return flat, problems


def read_run_file(path: Path) -> dict[str, Any]:
    """The nested mapping of a .yaml, .yml, .toml or .json file, local or in a store."""
    path = path_of(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a run file. To train on a dataset: `hotbed train --data {path}`.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        is_data = path.suffix not in RUN_FILES
        hint = f". To train on a dataset: `hotbed train --data {path}`." if is_data else ""
        raise ConfigError(f"cannot read the run file {path}: {error}{hint}") from error
    try:
        tree = _parse(path, text)
    except ValueError as error:
        raise ConfigError(f"the run file {path} cannot be parsed: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"the run file {path} must hold a mapping with {', '.join(SECTIONS)}, not {shown(tree)}.")
    return tree


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
    raise ConfigError(f"the run file {path} must end in .yaml, .yml, .toml or .json, not {path.suffix or 'nothing'!r}.")


def _set(text: str, flat: dict[str, Any]) -> list[str]:
    """Apply one `path=value`; `model.options.dropout=0.2` reaches into a mapping."""
    path, equals, value_text = (part.strip() for part in text.partition("="))
    if not equals:
        return [f"--set {text}: must have the form path=value, e.g. --set model.dim=32"]
    head, _, option = path.partition(".options.")
    if option and f"{head}.options" in FIELDS:
        options = flat.get(f"{head}.options", {})
        flat[f"{head}.options"] = {**(options if isinstance(options, dict) else {}), option: parse_value(value_text)}
        return []
    if path not in FIELDS:
        return [unknown(path, FIELDS)]
    value = parse_value(value_text)
    # 2024 may be the name of a directory: text stays as typed unless it was quoted
    flat[path] = value_text if TYPES[path] is str and not isinstance(value, str) else value
    return []


def parse_value(text: str) -> Any:
    """JSON where it is JSON (1e-3, true, [400, 400]), else a YAML scalar or list ([relu, prelu]), else the text."""
    try:
        return json.loads(text)
    except ValueError:
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
