"""Where compiled Numba kernels are kept, on machines where neither the package nor the home directory can be written.

Numba keeps them next to the sources, else in the user's cache, else it refuses to import them. A container with a read-only
file system and a user without a home has neither: there they go to a temporary directory and are compiled in each process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

VARIABLE = "NUMBA_CACHE_DIR"


def find_kernel_cache(package: Path) -> None:
    """Name a directory for Numba, before it is imported, if it would find none by itself."""
    if os.environ.get(VARIABLE) or "numba" in sys.modules:
        return
    if _is_writable(package / "__pycache__") or _is_writable(_user_cache()):
        return
    directory = tempfile.mkdtemp(prefix="hotbed-kernels-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ[VARIABLE] = directory


def _user_cache() -> Path:
    """The directory that Numba takes (it follows appdirs)."""
    if sys.platform == "darwin":
        return Path(os.path.expanduser("~/Library/Caches/numba"))
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "numba"


def _is_writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False
