"""The commands as data: names, groups, texts, examples, arguments and options, for the reference pages and for tests.

Read from the functions of the commands, so it needs no particular version of typer. Imports every command.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.models import ArgumentInfo, OptionInfo

from hotbed.cli import COMMANDS, with_voice

EXAMPLES = "[bold]For example:[/bold]"
_CALLS = ("hotbed ", "torchrun ")


class Parameter(NamedTuple):
    """An argument or option of a command."""

    name: str  # as it is typed: --batch-size; for an argument its metavar
    also: tuple[str, ...]  # short and negative forms
    is_option: bool
    type: str
    metavar: str
    default: Any
    required: bool
    help: str


class CommandText(NamedTuple):
    """What a command says about itself."""

    name: str  # "train", "data make"
    group: str
    paragraphs: list[str]
    examples: list[str]
    parameters: list[Parameter]

    @property
    def options(self) -> dict[str, Parameter]:
        return {one.name: one for one in self.parameters if one.is_option}


def describe_commands() -> Iterator[CommandText]:
    """Every command that can be called."""
    for name, entry in COMMANDS.items():
        command = getattr(import_module(entry.module), entry.attribute)
        if isinstance(command, typer.Typer):
            for one in command.registered_commands:
                assert one.callback is not None
                assert one.name is not None
                yield _describe(f"{name} {one.name}", entry.group, one.callback)
        else:
            yield _describe(name, entry.group, command)


def _describe(name: str, group: str, command: Callable[..., None]) -> CommandText:
    text = inspect.getdoc(command) or ""
    paragraphs = [" ".join(one.split()) for one in text.split("\n\n")]
    examples = [one for one in paragraphs if one.startswith(_CALLS)]
    texts = [_plain(one) for one in paragraphs if one != EXAMPLES and one not in examples]
    spoken = with_voice(command)
    hints = typing.get_type_hints(spoken, include_extras=True)
    parameters = [one for one in inspect.signature(spoken).parameters.values() if hints[one.name] is not typer.Context]
    return CommandText(name, group, texts, examples, [_parameter(one, hints[one.name]) for one in parameters])


def _parameter(given: inspect.Parameter, hint: Any) -> Parameter:
    info, default, names = given.default, given.default, list[str]()
    if typing.get_origin(hint) is typing.Annotated:
        hint, info = typing.get_args(hint)[:2]
        names = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    else:
        default, names = info.default, list(info.param_decls or ())
    assert isinstance(info, OptionInfo | ArgumentInfo), given.name
    required = default is ... or default is inspect.Parameter.empty
    is_option = isinstance(info, OptionInfo)
    if is_option and not names:
        option = "--" + given.name.replace("_", "-")
        names = [option, f"--no-{option[2:]}"] if _is_bool(hint) else [option]
    names = [part for one in names for part in one.split("/")]
    metavar = info.metavar or ("" if _is_bool(hint) else given.name.upper() if not is_option else _word(hint))
    name = names[0] if is_option else metavar
    shown = None if required else default
    return Parameter(name, tuple(names[1:]), is_option, _type(hint), metavar, shown, required, _plain(info.help or ""))


def _is_bool(hint: Any) -> bool:
    return hint is bool or bool in typing.get_args(hint)


def _type(hint: Any) -> str:
    """The type without `None`: an option that may be left out has the type of its values."""
    kinds = [one for one in typing.get_args(hint) if one is not type(None)]
    if typing.get_origin(hint) is list:
        return f"list of {getattr(kinds[0], '__name__', kinds[0])}"
    if kinds:
        return _type(kinds[0])
    return str(getattr(hint, "__name__", hint))


def _word(hint: Any) -> str:
    return {"int": "N", "float": "X", "Path": "PATH", "list of str": "TEXT", "list of int": "N"}.get(
        _type(hint), "TEXT"
    )


def _plain(text: str) -> str:
    """Without rich's markup."""
    return re.sub(r"(?<!\\)\[/?(bold|dim)\]", "", text).replace("\\[", "[")
