"""manifest.json: describes a checkpoint, with size and checksum of each of its files.

It is written last. It holds the checksum of its own body too, so that a flipped bit in it is found like one in a file.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hotbed.checkpoint.row_file import FileMark
from hotbed.errors import RunError
from hotbed.types import TableShape

FORMAT_VERSION = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """One checkpoint."""

    kind: Literal["full", "incremental"]
    step: int
    time: float  # seconds since 1970
    parent: str | None = None  # folder of the checkpoint that an incremental one adds to
    parent_crc32: int | None = None  # of that one's manifest
    tables: dict[str, TableShape] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)  # in its row files, by table
    gone: dict[str, int] = field(default_factory=dict)
    files: dict[str, FileMark] = field(default_factory=dict)
    linked: dict[str, int] = field(default_factory=dict)  # files of ssd segments: bytes; their records carry checksums
    document: dict[str, Any] = field(
        default_factory=dict
    )  # settings, position in the data, random states, the user's own
    crc32: int = 0  # of the body, once written or read

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, also linked ones, which take no new space."""
        return sum(mark.bytes for mark in self.files.values()) + sum(self.linked.values())

    @property
    def num_rows(self) -> int:
        return sum(self.rows.values())

    def save(self, folder: Path) -> Manifest:
        """Write the file; the result has its checksum."""
        body = dataclasses.asdict(self)
        del body["crc32"]
        body["files"] = {name: list(mark) for name, mark in self.files.items()}
        try:
            crc32 = zlib.crc32(_text(body))
        except (TypeError, ValueError) as error:
            raise RunError(f"what is saved in addition to the tensors must be plain JSON: {error}.") from error
        tree = {"format_version": FORMAT_VERSION, "crc32": crc32, "checkpoint": body}
        (folder / MANIFEST).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        return dataclasses.replace(self, crc32=crc32)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; a RunError says what is wrong with it."""
    path = folder / MANIFEST
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        version = tree["format_version"]
        if version > FORMAT_VERSION:
            raise RunError(
                f"{folder} has format version {version}; this hotbed reads up to {FORMAT_VERSION}. Use a newer hotbed."
            )
        body, crc32 = tree["checkpoint"], tree["crc32"]
        if zlib.crc32(_text(body)) != crc32:
            raise RunError(f"{path} is damaged: its content does not match its checksum.")
        tables = {name: TableShape(**_tuples(one)) for name, one in body.pop("tables").items()}
        files = {name: FileMark(*mark) for name, mark in body.pop("files").items()}
        return Manifest(**body, tables=tables, files=files, crc32=crc32)
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror or error}. {folder} is not a complete checkpoint."
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path} is damaged ({type(error).__name__}: {error}).") from error


def _tuples(shape: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in shape.items()}


def _text(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
