"""The code of users' own models: a name in, the class out, and the code of its file, which is saved with the run.

A model is named `my_model.py:MyModel`, `my_package.models:MyModel`, or by an entry point of the group `hotbed.models`.

Saved code may come from anybody. It is executed only if this user has run a file with the same code on this machine, or if
HOTBED_TRUST_CODE=1 is set. The paths in a run are not trusted, since its author chose them: imports are searched in the folder
from which this user ran the code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from hotbed.errors import ConfigError, HotbedError, ModelError

GROUP = "hotbed.models"  # of entry points
TRUST = "HOTBED_TRUST_CODE"
_EXAMPLE = "my_model.py:MyModel or my_package.models:MyModel"


class KeptSource(NamedTuple):
    """The code of a file that defines a model."""

    name: str  # of the class; empty if the file has only one
    file: str  # its name, without folders
    package: str  # for relative imports; empty if there is none
    code: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.package}\n{self.code}".encode()).hexdigest()


def is_own(name: str) -> bool:
    """Whether a name is a user's own class and not a built-in model."""
    return ":" in name or name.endswith(".py") or name in _entry_points()


def shown_name(name: str) -> str:
    """A name for headings: for a user's own model its class, or its file if no class is named."""
    return (name.rpartition(":")[2] if ":" in name else Path(name).name) if is_own(name) else name


def own_names() -> list[str]:
    """Models that installed packages offer."""
    return sorted(_entry_points())


def read_source(name: str) -> KeptSource:
    """The code behind a name; nothing is executed."""
    return _read(name)[0]


def has_changed(name: str, kept: Mapping[str, Any]) -> bool:
    """Whether the code behind the name differs from the saved code."""
    try:
        return bool(read_source(name).code != kept["code"])
    except (ConfigError, OSError):
        return False


def find_own(name: str, kept: Mapping[str, Any] | None = None) -> type[nn.Module]:
    """The class, from the saved code if there is any, else from the current file."""
    if not kept:
        source, root = _read(name)
        found = _class_of(name, source, root)
        _trust(source.digest, root)
        return found
    try:
        source = KeptSource(**kept)
        digest = source.digest
    except (TypeError, AttributeError) as error:
        raise ModelError(f"the code of the model {name} that came with this run is damaged ({error}).") from error
    known, named = _known_roots(digest), None
    if not known and os.environ.get(TRUST) != "1":
        raise ModelError(
            f"the model {name} is code that came with this run ({source.file}, {len(source.code.splitlines())} lines), and you "
            f"have not run it on this machine. Read it in config.json or model.json (model.source); to run it, set "
            f"{TRUST}=1."
        )
    with suppress(ConfigError):
        named = _read(name)[1]
    return _class_of(name, source, named if not known or named in known else known[-1])


def frame_of(error: BaseException, file: str) -> str:
    """The last line of the user's file in a traceback."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename == file]
    if not frames:
        return Path(file).name
    last = frames[-1]
    return f"{Path(file).name}, line {last.lineno}, in {last.name} ({(last.line or '').strip()})"


def _read(name: str) -> tuple[KeptSource, Path]:
    """The code behind a name, and the folder to search for its imports."""
    place, class_name = _split(name)
    if place.endswith(".py"):
        path, package = Path(place).expanduser(), ""
        if not path.is_file():
            raise ConfigError(f"no model {name!r}: there is no file {place} in {Path.cwd()}.")
    else:
        path, package = _module_file(name, place)
    try:
        code = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"no model {name!r}: {path} cannot be read ({error}).") from error
    depth = len(package.split(".")) if package else 0
    return KeptSource(class_name, path.name, package, code), path.resolve().parents[depth]


def place_of(name: str) -> str:
    """The location behind the name of an entry point; other names as they are."""
    return _entry_points().get(name, name)


def _split(name: str) -> tuple[str, str]:
    place, _, class_name = place_of(name).rpartition(":")
    if not place and name.endswith(".py"):
        place, class_name = name, ""
    if not place:
        raise ConfigError(f"no model {name!r}; a model of your own is named {_EXAMPLE}.")
    return place, class_name


@functools.cache  # 5 ms with 150 packages, and a run asks 18 times
def _entry_points() -> dict[str, str]:
    return {one.name: one.value for one in entry_points(group=GROUP)}


def _module_file(name: str, module: str) -> tuple[Path, str]:
    """The file and package of a module, found as Python would, the current folder first; nothing is imported."""
    spec, path = None, [str(Path.cwd()), *sys.path]
    parts = module.split(".")
    for number in range(len(parts)):
        full = ".".join(parts[: number + 1])
        spec = PathFinder.find_spec(full, path)
        if spec is None:  # e.g. an editable install
            others = (
                one.find_spec(full, path if number else None) for one in sys.meta_path if hasattr(one, "find_spec")
            )
            spec = next((one for one in others if one is not None), None)
        if spec is None:
            break
        path = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"no model {name!r}: there is no module {module} on the path. It is named {_EXAMPLE}.")
    return Path(spec.origin), spec.parent or ""


def _class_of(name: str, source: KeptSource, root: Path | None) -> type[nn.Module]:
    module = _execute(name, source, root)
    if source.name:
        found: Any = module
        for part in source.name.split("."):  # a class may be nested
            found = getattr(found, part, None)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ConfigError(f"no model {name!r}: {source.file} has no torch module class {source.name}.")
        return found
    own = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    models = [one for one in own if issubclass(one, nn.Module)]
    if len(models) != 1:
        listed = ", ".join(one.__name__ for one in models) or "none"
        raise ConfigError(
            f"no model {name!r}: say which class of the file, as in {name.rstrip(':')}:MyModel; it has {listed}."
        )
    return models[0]


def _execute(name: str, source: KeptSource, root: Path | None) -> ModuleType:
    """Execute the code, once per process and import folder; returns the module."""
    module_name = f"hotbed_own_model_{hashlib.sha256(f'{source.digest} {root}'.encode()).hexdigest()[:16]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    folder = root.joinpath(*filter(None, source.package.split("."))) if root is not None else Path(module_name)
    file = str(folder / source.file)
    module = ModuleType(module_name)
    module.__file__, module.__package__ = file, source.package
    linecache.cache[file] = (len(source.code), None, source.code.splitlines(keepends=True), file)
    sys.modules[module_name] = module
    try:
        code = compile(source.code, file, "exec")
        with _imports_from(root):
            _check_neighbours(source, root)
            exec(code, module.__dict__)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, HotbedError) or not isinstance(error, (Exception, SystemExit)):
            raise
        raise _not_loaded(name, source, file, error) from error
    return module


@contextmanager
def _imports_from(root: Path | None) -> Iterator[None]:
    """Search the folder of the model first while it is loaded, as for a script, and last afterwards."""
    if root is not None and str(root) not in sys.path:
        sys.path.append(str(root))
    if root is not None:
        sys.path.insert(0, str(root))
    try:
        yield
    finally:
        if root is not None and str(root) in sys.path[:-1]:
            sys.path.remove(str(root))


def _check_neighbours(source: KeptSource, root: Path | None) -> None:
    """Raise if an import of the model would find a module from elsewhere instead of the file next to it."""
    tree = ast.parse(source.code)
    names = {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
    for name in sorted({one.partition(".")[0] for one in names} & set(sys.modules)):
        neighbours = (
            [one for one in (root / f"{name}.py", root / name / "__init__.py") if one.is_file()] if root else []
        )
        loaded = getattr(sys.modules[name], "__file__", None)
        if neighbours and loaded and Path(loaded).resolve() != neighbours[0].resolve():
            raise ModelError(
                f"{source.file} imports {name} from its own folder, but this process has already loaded another {name}: "
                f"{loaded}. Rename one of them, or use one process per model."
            )


def _not_loaded(name: str, source: KeptSource, file: str, error: BaseException) -> ModelError:
    if isinstance(error, ImportError):
        way = "Install it, or put its folder on PYTHONPATH."
        if not source.package and "relative import" in str(error):
            way = "Name a file with relative imports by its package: my_package.models:MyModel."
        return ModelError(
            f"{source.file}, the file of the model {name}, needs a module that was not found: {error}. {way}"
        )
    where = f"line {error.lineno}" if isinstance(error, SyntaxError) else frame_of(error, file)
    return ModelError(f"{source.file} does not load: {where}: {type(error).__name__}: {error}")


def _state_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "hotbed" / "trusted_models"


def _trust(digest: str, root: Path) -> None:
    """Record that this user runs this code, and where; without a writable home, the user must confirm again."""
    if root in _known_roots(digest)[-1:]:
        return
    _trusted.append((digest, root))
    with suppress(OSError, RuntimeError):
        path = _state_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{digest} {root}\n")


def _known_roots(digest: str) -> list[Path]:
    """The folders from which this user has run the code, most recent last."""
    lines: list[str] = []
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        lines = _state_file().read_text(encoding="utf-8").splitlines()
    noted = [(one, Path(root)) for one, _, root in (line.partition(" ") for line in lines) if root]
    return [root for one, root in noted + _trusted if one == digest]


_trusted: list[tuple[str, Path]] = []  # of this process, in case nothing can be written
