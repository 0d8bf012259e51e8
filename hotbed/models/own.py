"""Models of users' own: a class in a file or package of theirs, trained, scored, served and exported like the others.

    class MyModel(nn.Module):
        def __init__(self, schema, *, hidden: int = 64): ...
        def forward(self, inputs): ...           # logits [B]

It is named `my_model.py:MyModel`, `my_package.models:MyModel`, or by an entry point of the group `hotbed.models`. The text of
its file is kept with the run, so that the run can be used where that file has changed or is gone.

A kept text is code from wherever the run came from. It is executed if the file it came from still says the same, if a
run with it was trained by this user on this machine, or if HOTBED_TRUST_CODE=1 says so.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotbed.errors import ConfigError, HotbedError, ModelError, ShapeError
from hotbed.models.base import Model

GROUP = "hotbed.models"  # of entry points
TRUST = "HOTBED_TRUST_CODE"
_EXAMPLE = "my_model.py:MyModel or my_package.models:MyModel"


class ModelSchema(NamedTuple):
    """What a model is told of its data before it is built."""

    features: tuple[str, ...]  # id features, one vector each
    dim: int  # of every vector
    dense: tuple[str, ...]  # number features


class ModelInputs(NamedTuple):
    """What a model reads of a batch of B samples."""

    vectors: dict[str, Tensor]  # feature -> [B, dim]; of several ids, pooled
    dense: Tensor  # [B, N], in the order of ModelSchema.dense


class KeptSource(NamedTuple):
    """The text of a file that defines a model."""

    name: str  # of the class; empty if it is the only one
    file: str  # its name, without folders
    package: str  # that relative imports in it start from; empty if there is none
    code: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.code.encode()).hexdigest()


def is_own(name: str) -> bool:
    """Whether a name stands for a class of the user's and not for one of ours."""
    return ":" in name or name.endswith(".py") or name in _entry_points()


def shown_name(name: str) -> str:
    """A name for headings: of a user's own model its class, or its file if it is not named."""
    return (name.rpartition(":")[2] if ":" in name else Path(name).name) if is_own(name) else name


def own_names() -> list[str]:
    """Models that installed packages offer."""
    return sorted(_entry_points())


def read_source(name: str) -> KeptSource:
    """The text behind a name, found where it says; nothing in it is executed."""
    return _read(name)[0]


def has_changed(name: str, kept: Mapping[str, Any]) -> bool:
    """Whether the name stands for another text now than the kept one."""
    try:
        return bool(read_source(name).code != kept["code"])
    except (ConfigError, OSError):
        return False


def find_own(name: str, kept: Mapping[str, Any] | None = None) -> type[nn.Module]:
    """The class: of the kept text if there is one, else of the text that the name stands for now."""
    if not kept:
        source, folder = _read(name)
        found = _class_of(name, source, folder)
        _trust(source.digest)
        return found
    source = KeptSource(**kept)
    with suppress(ConfigError, OSError):
        now, folder = _read(name)
        if now.code == source.code:
            return _class_of(name, source, folder)
    if not _is_trusted(source.digest):
        raise ModelError(
            f"the model {name} is code that came with this run ({source.file}, {len(source.code.splitlines())} lines), and no "
            f"file of that name here says the same. Read it in config.json or model.json (model.source); to run it, set "
            f"{TRUST}=1."
        )
    return _class_of(name, source, None)


def build_own(
    name: str, features: Sequence[str], dim: int, dense: Sequence[str], options: Mapping[str, Any], kept: Any = None
) -> OwnModel:
    """The user's model, as the rest of hotbed uses it."""
    kind = find_own(name, kept)
    with _blamed(kind):
        net = kind(ModelSchema(tuple(features), dim, tuple(dense)), **options)
    return OwnModel(net, tuple(features), dim, len(dense))


def check_own(name: str, options: Mapping[str, Any], kept: Any = None) -> dict[str, Any]:
    """The options, if the constructor takes all of them."""
    kind = find_own(name, kept)
    known = list(inspect.signature(kind).parameters.values())[1:]
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known):
        return dict(options)
    wrong = [option for option in options if option not in {one.name for one in known}]
    if wrong:
        listed = ", ".join(f"{one.name}={one.default!r}" for one in known) or "none"
        raise ConfigError(
            f"{kind.__name__} has no option {', '.join(wrong)}; its constructor takes, after the schema: {listed}."
        )
    missing = [one.name for one in known if one.default is one.empty and one.name not in options]
    if missing:
        raise ConfigError(
            f"{kind.__name__} needs the option {', '.join(missing)}; give --set model.options.{missing[0]}=..."
        )
    return dict(options)


class OwnModel(Model):
    """A user's model behind the seam of all models: vectors [B, F, D] in, by name; logits [B] out, checked."""

    def __init__(self, net: nn.Module, features: tuple[str, ...], dim: int, num_dense: int) -> None:
        super().__init__(len(features), dim, num_dense)
        self.net, self.features = net, features

    @staticmethod
    def vector_width(dim: int) -> int:
        return dim

    def logits(self, vectors: Tensor, dense: Tensor) -> Tensor:
        inputs = ModelInputs(dict(zip(self.features, vectors.unbind(1))), dense)
        with _blamed(type(self.net)):
            found = self.net(inputs)
        if torch.compiler.is_compiling():  # traced for an export: sizes have no numbers
            return torch.reshape(found, (-1,))
        if not isinstance(found, Tensor) or found.numel() != len(dense) or found.shape[:1] != dense.shape[:1]:
            given = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ShapeError(
                f"{type(self.net).__name__}.forward returned {given} for {len(dense)} samples; it must return one logit for "
                f"each: [{len(dense)}] or [{len(dense)}, 1]."
            )
        return found.reshape(-1)


@contextmanager
def _blamed(kind: type) -> Any:
    """What goes wrong in a user's code is told with the line of theirs that it went wrong in."""
    try:
        yield
    except (HotbedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "out of memory" in str(error):
            raise
        where = _frame_of(error, inspect.getfile(kind))
        raise ModelError(f"{where}: {type(error).__name__}: {error}") from error


def _frame_of(error: BaseException, file: str) -> str:
    """The last line of the user's file on the way to an error, with its text."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == file]
    if not frames:
        return Path(file).name
    last = frames[-1]
    return f"{Path(file).name}, line {last.lineno}, in {last.name} ({(last.line or '').strip()})"


def _read(name: str) -> tuple[KeptSource, Path]:
    """The text behind a name, and the folder it was found in."""
    place, class_name = _split(name)
    if place.endswith(".py"):
        path, package = Path(place).expanduser(), ""
        if not path.is_file():
            raise ConfigError(f"no model {name!r}: there is no file {place} in {Path.cwd()}.")
    else:
        path, package = _module_file(name, place)
    return KeptSource(class_name, path.name, package, path.read_text()), path.resolve().parent


def _split(name: str) -> tuple[str, str]:
    known = _entry_points()
    place, _, class_name = known.get(name, name).rpartition(":")
    if not place and name.endswith(".py"):
        place, class_name = name, ""
    if not place:
        raise ConfigError(f"no model {name!r}; a model of your own is named {_EXAMPLE}.")
    return place, class_name


def _entry_points() -> dict[str, str]:
    return {one.name: one.value for one in entry_points(group=GROUP)}


def _module_file(name: str, module: str) -> tuple[Path, str]:
    if str(Path.cwd()) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"no model {name!r}: {error}. It is named {_EXAMPLE}.") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"no model {name!r}: there is no module {module} on the path. It is named {_EXAMPLE}.")
    return Path(spec.origin), spec.parent or ""


def _class_of(name: str, source: KeptSource, folder: Path | None) -> type[nn.Module]:
    module = _execute(name, source, folder)
    if source.name:
        found = getattr(module, source.name, None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ConfigError(f"no model {name!r}: {source.file} has no torch module class {source.name}.")
        return found
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    models = [one for one in own if issubclass(one, nn.Module)]
    if len(models) != 1:
        listed = ", ".join(one.__name__ for one in models) or "none"
        raise ConfigError(f"no model {name!r}: say which class of the file, as in {name}:MyModel; it has {listed}.")
    return models[0]


def _execute(name: str, source: KeptSource, folder: Path | None) -> ModuleType:
    """The module of a text, executed once in a process."""
    module_name = f"hotbed_own_model_{source.digest[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module = ModuleType(module_name)
    module.__file__, module.__package__ = source.file, source.package
    linecache.cache[source.file] = (len(source.code), None, source.code.splitlines(keepends=True), source.file)
    sys.modules[module_name] = module
    if folder is not None and str(folder) not in sys.path:  # for what stands beside it
        sys.path.append(str(folder))
    try:
        exec(compile(source.code, source.file, "exec"), module.__dict__)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, ImportError):
            raise ModelError(
                f"{source.file}, the file of the model {name}, needs a module that is not here: {error}. Install it, or put "
                "its folder on PYTHONPATH."
            ) from error
        if isinstance(error, Exception):
            where = f"line {error.lineno}" if isinstance(error, SyntaxError) else _frame_of(error, source.file)
            raise ModelError(f"{source.file} does not load: {where}: {type(error).__name__}: {error}") from error
        raise
    return module


def _trusted_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hotbed" / "trusted_models"


def _trust(digest: str) -> None:
    """Note that this user runs this code; a machine where nothing can be noted will ask."""
    _trusted.add(digest)
    with suppress(OSError, RuntimeError):
        path = _trusted_file()
        if not path.exists() or digest not in path.read_text().split():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.write(digest + "\n")


def _is_trusted(digest: str) -> bool:
    if digest in _trusted or os.environ.get(TRUST) == "1":
        return True
    with suppress(OSError, RuntimeError):
        return digest in _trusted_file().read_text().split()
    return False


_trusted: set[str] = set()
