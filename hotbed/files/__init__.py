"""One way to every file: a local path, or a URI of an object store.

    path_of        a text or a path in; a local Path, or a RemotePath, which answers the questions of a Path
    hide           a text in; the same text without a password, a key or a token

Local paths stay what they are: `pathlib` and the kernel, with the flushes of host/atomic.py. A RemotePath reads through retries
(store.py) and a cache of blocks on the local disk (block_cache.py). What must be local (a model to score with, the folder of a
run that trains) is copied (copies.py): a folder counts in a store once its manifest is there, which is written
last.
"""

from hotbed.files.path import RemotePath, copy_file, is_remote, path_of, pieces_now, readable, shown_path, stat_now
from hotbed.files.store import ReplacedError
from hotbed.files.uri import hide

__all__ = [
    "RemotePath",
    "ReplacedError",
    "copy_file",
    "hide",
    "is_remote",
    "path_of",
    "pieces_now",
    "readable",
    "shown_path",
    "stat_now",
]
