"""Settings in the words of `hotbed train` (--set path=value) -> options of `hotbed simulate`, with their values."""

from __future__ import annotations

from typing import Any

from hotbed.run.config import raise_problems

_SETTINGS = {
    "data.batch_size": "batch_size",
    "data.shuffle": "shuffle",
    "train.seed": "seed",
    "tables.cache": "cache",
    "tables.policy": "policy",
    "tables.window": "window",
    "tables.look_ahead": "look_ahead",
}  # of `hotbed train`: the option here


def from_sets(sets: list[str]) -> dict[str, Any]:
    """{option: value} of settings in the words of `hotbed train`; those that no simulation asks for are mistakes."""
    if not sets:
        return {}
    from hotbed.run.run_file import compose

    config, problems = compose(None, {}, sets)
    paths = [text.partition("=")[0].strip() for text in sets]
    if not problems:
        problems = [
            f"--set {path}: changes nothing in a simulation; those that do are {', '.join(_SETTINGS)}"
            for path in paths
            if path not in _SETTINGS
        ]
    raise_problems(problems)
    found = {}
    for path in paths:
        section, name = path.split(".")
        value = getattr(getattr(config, section), name)
        found[_SETTINGS[path]] = str(value) if path == "tables.cache" else value
    return {name: value or None if name in ("window", "look_ahead") else value for name, value in found.items()}
