"""A dataset that is written to a store: it is made in a local folder, then copied, schema.json last.

A reader of the store sees the whole dataset or none: without schema.json there is none. A dataset that is replaced is gone from
the moment its schema.json is removed until the new one arrives. Temporary files stay on the local disk ($HOTBED_CACHE) and are
removed at the end; a killed job resumes there, as for a local dataset.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotbed.errors import ConfigError, RemoteError
from hotbed.files import RemotePath
from hotbed.files.copies import publish_folder
from hotbed.files.settings import cache_root
from hotbed.host.atomic import make_folder

SCHEMA = "schema.json"
_OURS = re.compile(r"schema\.json|quarantine\.jsonl|[^/]+/[^/]+\.(arrow|parquet)")


@contextmanager
def publishing(out: Path, *, overwrite: bool, shared: bool) -> Iterator[Path]:
    """Where to write a dataset; for a URI a local folder, which is copied there if all goes well.

    `shared`: several machines write it.
    """
    if not isinstance(out, RemotePath):
        yield out
        return
    if shared:
        raise ConfigError(
            f"{out}: machines of --ray need a folder that all of them see. Give a shared folder with --out."
        )
    _check(out, overwrite)
    digest = hashlib.sha256(str(out).encode()).hexdigest()[:16]
    local = cache_root() / "remote" / "datasets" / digest / (out.name or "dataset")
    make_folder(local.parent)
    shutil.rmtree(
        local, ignore_errors=True
    )  # complete, but its copy was cut short; its settings are not known any more
    yield local
    try:
        publish_folder(local, out, SCHEMA)
    except RemoteError as error:
        raise RemoteError(f"{error} The dataset is complete in {local}; the same command makes it again.") from None
    shutil.rmtree(local.parent, ignore_errors=True)


def _check(out: RemotePath, overwrite: bool) -> None:
    """A ConfigError unless a dataset may be written there."""
    start = len(out.key) + 1 if out.key else 0
    names = [path.key[start:] for path, stat in out.entries(recursive=True) if stat is not None]
    names = [name for name in names if name and not name.endswith("/")]
    if SCHEMA in names and not overwrite:
        raise ConfigError(f"{out} exists already. Choose another --out, or replace it with --overwrite.")
    strange = [name for name in names if not _OURS.fullmatch(name)]
    if strange:
        raise ConfigError(
            f"{out} holds more than a dataset ({', '.join(strange[:5])}), which would be deleted. Choose another --out."
        )
