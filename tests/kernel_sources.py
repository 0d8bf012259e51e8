"""The sources that compiled kernels are made of: files with kernels, and all that those import.

Numba rebuilds a cached kernel when its own file changes, not when a function it calls does. A cache that is keyed by these
files never holds a stale kernel, and stays when anything else is edited.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

_MARKS = ("njit", "intrinsic", "cfunc", "vectorize")


def kernel_digest(package: Path) -> str:
    """A key for the cache of a package's kernels."""
    sources = {_module(package, path): path for path in package.rglob("*.py")}
    wanted = [name for name, path in sources.items() if any(mark in path.read_text() for mark in _MARKS)]
    found = set(wanted)
    while wanted:
        for name in _imports(sources[wanted.pop()], sources) - found:
            found.add(name)
            wanted.append(name)
    parts = (name.encode() + b"\0" + sources[name].read_bytes() for name in sorted(found))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def importers_of(package: Path, path: Path, most: int | None = None) -> set[Path]:
    """The files whose kernels may be made of this one: itself, and all that import it, `most` steps away or however far."""
    sources = {_module(package, one): one for one in package.rglob("*.py")}
    imports = {name: _imports(one, sources) for name, one in sources.items()}
    found, wanted = set[str](), {_module(package, path)}
    while wanted and most != -1:
        found |= wanted
        most = None if most is None else most - 1
        wanted = {name for name, imported in imports.items() if imported & wanted} - found
    return {sources[name] for name in found}


def _module(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, sources: dict[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {_home(node.module, each.name, sources) for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return names & sources.keys()


def _home(module: str, name: str, sources: dict[str, Path]) -> str:
    """The module that a name comes from: a package hands on what its modules define."""
    if f"{module}.{name}" in sources:
        return f"{module}.{name}"
    path = sources.get(module)
    for node in ast.walk(ast.parse(path.read_text())) if path is not None and path.name == "__init__.py" else ():
        if isinstance(node, ast.ImportFrom) and node.module and any(each.name == name for each in node.names):
            return _home(node.module, name, sources)
    return module
