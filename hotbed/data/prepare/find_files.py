"""What a user names in; the raw files with their splits and partition columns out, in order.

    a file           itself
    a folder         the files in it, by name, and those in folders called NAME=VALUE, at any depth
    a glob           what it matches: *, ? and [] within a folder, ** for any number; a matched folder is read as a folder
    a Delta table    the files of its newest version, as its log lists them
    save_to_disk     the Arrow files of a Hugging Face dataset, of all splits

Names that begin with `.` or `_` are left out (_SUCCESS, _metadata). A folder called NAME=VALUE below the one that was given, or
in the part of a glob that has wildcards, makes a column NAME with that value for all rows of its files; it wins over a column
of the file. All of it works on local paths and on URIs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from hotbed.errors import FormatError
from hotbed.files import RemotePath

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_WILDCARD = re.compile(r"[*?\[]")
_VERSION = re.compile(r"(\d{20})\.json")
Partition = tuple[tuple[str, str | None], ...]
_DeltaFile = tuple[str, str]  # path, deletion vector


class FoundFile(NamedTuple):
    """One raw file; `split` only where the files themselves name it."""

    path: Path
    partition: Partition = ()
    split: str = ""


def find_files(path: Path, *, splits: bool = True) -> list[FoundFile]:
    """The files that a path, a folder or a glob means. `splits`: a Hugging Face folder may name its splits."""
    if has_wildcard(path) and not path.exists():
        return list(_globbed(path))
    if splits and (path / "dataset_dict.json").is_file():
        names = _hugging_face_splits(path)
        return [FoundFile(file, split=name) for name in names for file in _hugging_face_files(path / name)]
    return list(_in_place(path))


def has_wildcard(path: Path) -> bool:
    return bool(_WILDCARD.search(str(path)))


def _in_place(path: Path) -> Iterator[FoundFile]:
    if path.is_file():
        yield FoundFile(path)
        return
    if not path.is_dir():
        if not path.exists():
            raise FormatError(f"{path} does not exist.")
        raise FormatError(f"{path} is not a plain file; hotbed reads its input more than once. Write it to a file.")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        yield from (FoundFile(file) for file in _hugging_face_files(path))
        return
    if (path / "_delta_log").is_dir():
        yield from _delta_files(path)
        return
    if (path / "metadata").is_dir() and (path / "data").is_dir() and any((path / "metadata").glob("*.metadata.json")):
        raise FormatError(
            f"{path} is an Iceberg table. Which of its files count is in Avro files, which hotbed does not read: give "
            f"{path / 'data'} if rows were only ever added, else prepare(table.scan().to_arrow(), ...) with pyiceberg."
        )
    found = list(_walk(path, ()))
    if not found:
        raise FormatError(f"{path} is a directory without files.")
    yield from found


def _walk(folder: Path, partition: Partition) -> Iterator[FoundFile]:
    """Files by name, and below folders NAME=VALUE."""
    for path, is_file in _entries(folder):
        if path.name[0] in "._":
            continue
        if is_file:
            yield FoundFile(path, partition)
        elif "=" in path.name:
            yield from _walk(path, (*partition, _value_of(path.name)))


def _entries(folder: Path) -> list[tuple[Path, bool]]:
    """(path, whether it is a file), by name; one request for a folder of a store."""
    if isinstance(folder, RemotePath):
        return [(path, stat is not None) for path, stat in folder.entries() if path != folder]
    found = [(path, path.is_file()) for path in sorted(folder.iterdir())]
    return [(path, is_file) for path, is_file in found if is_file or path.is_dir()]


def _globbed(pattern: Path) -> Iterator[FoundFile]:
    """The files that a glob matches."""
    parts = list(pattern.parts)
    first = next(number for number, part in enumerate(parts) if _WILDCARD.search(part))
    root = pattern
    for _ in parts[first:]:
        root = root.parent
    matched = sorted(root.glob("/".join(parts[first:]))) if root.is_dir() else []
    found = []
    for path in matched:
        inside = path.relative_to(root).parts
        if any(part[0] in "._" for part in inside):
            continue
        folders = inside if path.is_dir() else inside[:-1]
        partition = tuple(_value_of(part) for part in folders if "=" in part)
        found += list(_walk(path, partition)) if path.is_dir() else [FoundFile(path, partition)]
    if not found:
        raise FormatError(f"no file matches {pattern}. Quote the pattern, so that the shell leaves it as it is.")
    yield from dict.fromkeys(found)


def _value_of(name: str) -> tuple[str, str | None]:
    column, _, value = name.partition("=")
    return unquote(column), None if value == NULL_PARTITION else unquote(value)


def _delta_files(table: Path) -> Iterator[FoundFile]:
    """The files of the newest version of a Delta table: what its log added and did not remove."""
    log = table / "_delta_log"
    live: dict[_DeltaFile, dict[str, Any]] = {}
    since = _delta_checkpoint(log, live)
    versions = sorted(path for path in log.iterdir() if _VERSION.fullmatch(path.name) and int(path.stem) > since)
    if not versions and since < 0:
        raise FormatError(f"{log} has no version of the table. Wait until it is written.")
    if [int(path.stem) for path in versions] != list(range(since + 1, since + 1 + len(versions))):
        found = ", ".join(str(int(path.stem)) for path in versions[:5])
        raise FormatError(
            f"{log} lacks versions: after {f'the checkpoint of version {since}' if since >= 0 else 'the beginning'} it has "
            f"{found}{', ...' if len(versions) > 5 else ''}. Which files count is not known without them. Copy the whole log, "
            "with _last_checkpoint and the checkpoint that it names."
        )
    try:
        for path in versions:
            for line in path.read_text().splitlines():
                action = json.loads(line) if line.strip() else {}
                _apply(action, live)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{log} cannot be read as the log of a Delta table ({error!r}).") from error
    if not live:
        raise FormatError(f"{table} is a Delta table without files.")
    for (name, _), add in sorted(live.items()):
        if add.get("deletionVector"):
            raise FormatError(
                f"{table / name} has a deletion vector: some of its rows are deleted. Write them out of the files first: "
                "REORG TABLE ... APPLY (PURGE)."
            )
        values = add.get("partitionValues") or {}
        pairs = values.items() if isinstance(values, dict) else values  # Parquet stores a map as pairs
        yield FoundFile(table / unquote(name), tuple((column, value or None) for column, value in pairs))


def _delta_checkpoint(log: Path, live: dict[_DeltaFile, dict[str, Any]]) -> int:
    """Take the files of the newest checkpoint; its version, or -1."""
    import pyarrow.parquet as pq

    if not (log / "_last_checkpoint").is_file():
        return -1
    try:
        last = json.loads((log / "_last_checkpoint").read_text())
        version = int(last["version"])
        count = int(last.get("parts") or 0)
        names = [f"{version:020}.checkpoint.parquet"]
        if count:
            names = [f"{version:020}.checkpoint.{part:010}.{count:010}.parquet" for part in range(1, count + 1)]
        for name in names:
            with (log / name).open("rb") as file:
                content = pq.ParquetFile(file)
                if "sidecar" in content.schema_arrow.names:
                    raise ValueError("it has sidecar files, which hotbed does not read")
                for add in content.read(columns=["add"])["add"].to_pylist():
                    if add is not None and add.get("path"):
                        live[_delta_file(add)] = add
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"the checkpoint of {log} cannot be read ({error!r}).") from error
    return version


def _apply(action: dict[str, Any], live: dict[_DeltaFile, dict[str, Any]]) -> None:
    if add := action.get("add"):
        live[_delta_file(add)] = add
    if remove := action.get("remove"):
        live.pop(_delta_file(remove), None)


def _delta_file(action: dict[str, Any]) -> _DeltaFile:
    """A file is named with its deletion vector: one that gets another is added and removed in one version, in any order."""
    vector = action.get("deletionVector") or {}
    return action["path"], "|".join(str(vector.get(part)) for part in ("storageType", "pathOrInlineDv", "offset"))


def _hugging_face_splits(directory: Path) -> list[str]:
    """The splits of a DatasetDict on disk."""
    try:
        names = json.loads((directory / "dataset_dict.json").read_text())["splits"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{directory / 'dataset_dict.json'} does not list splits ({error!r}).") from error
    return [str(name) for name in names]


def _hugging_face_files(directory: Path) -> list[Path]:
    """The Arrow files of a Dataset on disk, in order."""
    try:
        state = json.loads((directory / "state.json").read_text())
        files = [directory / one["filename"] for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{directory / 'state.json'} does not list data files ({error!r}).") from error
    if state.get("_indices_data_files"):
        raise FormatError(
            f"{directory} holds a selection of rows (indices). Write it again in full: dataset.flatten_indices()."
        )
    absent = [str(file) for file in files if not file.is_file()]
    if absent or not files:
        raise FormatError(f"{directory / 'state.json'} lists {', '.join(absent) or 'no files'}, which cannot be read.")
    return files
