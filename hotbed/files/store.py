"""One object store: a URI in, bytes out and in, whatever the network does meanwhile.

Every request has a time limit and is made again after growing pauses (0.1 s, doubled up to 5 s, times a random half to one)
until it succeeds or `patience` seconds have passed since the first failure. A refusal (no such bucket, no access) is not
repeated. A body that is shorter than what was asked for counts as a failure. Errors never hold a secret.

An object appears whole or not at all when its upload ends. Uploads go out in parts of some 10 MB, one at a time for each file:
memory is bounded by the number of files in flight. The size in the store is compared with what was sent.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hotbed.errors import RemoteError, reason_of
from hotbed.files.connect import CREDENTIALS, NO_SUCH_BUCKET, connect
from hotbed.files.settings import PATIENCE_VARIABLE, patience, timeout
from hotbed.files.uri import HADOOP, Uri, hide

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds
_SLOWEST = 1 << 20  # bytes per second; an upload may take its size at this rate longer than the time limit
_PIECE = 4 << 20  # bytes of a file that are handed to an upload at a time
_TRIES_OF_SIZE = 3  # uploads of one object that arrive with another size
_CHECKSUM_HINT = (
    "The store may not know the checksums that the AWS SDK adds: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required."
)
_REFUSALS = {  # a part of the SDK's message -> what to do
    "NO_SUCH_BUCKET": NO_SUCH_BUCKET,
    "bucket does not exist": NO_SUCH_BUCKET,
    "ContainerNotFound": NO_SUCH_BUCKET,
    "ACCESS_DENIED": "Access was denied.",
    "INVALID_ACCESS_KEY_ID": "The store does not know the access key.",
    "SIGNATURE_DOES_NOT_MATCH": "The secret key is wrong.",
    "EXPIRED_TOKEN": "The session token has expired.",
    "AuthorizationFailure": "Access was denied.",
    "AuthenticationFailed": "Access was denied.",
    "AuthorizationPermissionMismatch": "Access was denied.",
    "AuthenticationException": "Access was denied.",
    "Base64 encoded": "The access key is not one of Azure's.",
    "PERMISSION_DENIED": "Access was denied.",
    "UNAUTHENTICATED": "Access was denied.",
    "HTTP status 400": "The store refuses the request.",
    "HTTP status 401": "Access was denied.",
    "HTTP status 403": "Access was denied.",
}
Result = TypeVar("Result")


class FileStat(NamedTuple):
    """What a store says of an object; the names are those of os.stat."""

    st_size: int
    st_mtime_ns: int
    st_ino: int = 0

    @property
    def st_mtime(self) -> float:
        return self.st_mtime_ns / 1e9


class ReplacedError(RemoteError):
    """An object or a folder is no longer the one that was opened or listed."""


class Listed(NamedTuple):
    """One entry of a folder."""

    key: str
    stat: FileStat | None  # None: a folder


class Store:
    """The objects of one bucket (or container, or host)."""

    def __init__(self, uri: Uri) -> None:
        self._uri = uri._replace(key="")
        self._files, self._base = connect(self._uri)
        self._bucket_seen = False

    def stat(self, key: str) -> FileStat | None:
        """Size and time of an object; None if there is none. A folder has no size: `is_folder`."""
        info = self._info(key)
        if not info.is_file:
            self._check_bucket()
        return _stat(info) if info.is_file else None

    def _check_bucket(self) -> None:
        """A RemoteError if the bucket itself is missing; asked once."""
        if self._bucket_seen or self._uri.scheme not in ("s3", "gs", "abfs", "abfss"):
            return
        if str(self._info("").type.name) == "NotFound":
            raise RemoteError(f"{self._uri}: {NO_SUCH_BUCKET}")
        self._bucket_seen = True

    def is_folder(self, key: str) -> bool:
        """Whether there are objects below this key."""
        if not key:
            return True
        return str(self._info(key).type.name) == "Directory"

    def _info(self, key: str) -> Any:
        return self._ask("looking at", key, lambda: self._files.get_file_info(self._at(key)))

    def listed(self, key: str, *, recursive: bool = False) -> list[Listed]:
        """What lies below a folder, sorted by key; nothing if it does not exist."""
        from pyarrow.fs import FileSelector

        whole = recursive or self._uri.scheme == "gs"  # which lists files alone
        selector = FileSelector(self._at(key), allow_not_found=True, recursive=whole)
        found = self._ask("listing", key, lambda: self._files.get_file_info(selector))
        entries = {name: _stat(info) if info.is_file else None for info in found if (name := self._key(info.path))}
        if self._uri.scheme == "gs":
            entries = _with_folders(entries, key, recursive=recursive)
        return [Listed(*one) for one in sorted(entries.items())]

    def read(self, key: str, begin: int, end: int, size: int | None = None) -> bytes:
        """Bytes begin .. end - 1 of an object, which must have `size` bytes, if given."""

        def read() -> bytes:
            with self._files.open_input_file(self._at(key)) as file:
                if size is not None and file.size() != size:
                    raise ReplacedError(
                        f"{self._name(key)} had {size:,} bytes when it was opened, and has {file.size():,} now. Read it again "
                        "when it is complete."
                    )
                found: bytes = file.read_at(end - begin, begin)
            if len(found) != end - begin:
                raise OSError(f"the body ends after {len(found):,} of {end - begin:,} bytes")
            return found

        return self._ask("reading", key, read)

    def write(self, key: str, content: bytes | Path) -> None:
        """Put an object in place: bytes, or a local file. It is there whole when this returns."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        wrong = 0

        def upload() -> None:
            nonlocal wrong
            with self._files.open_output_stream(self._at(key)) as stream:
                for piece in _pieces(content):
                    stream.write(piece)
            stored = self._files.get_file_info(self._at(key)).size
            if stored != size:
                wrong += 1
                if wrong == _TRIES_OF_SIZE:
                    raise RemoteError(
                        f"{self._name(key)} has {stored} bytes in the store after {size:,} were sent, {wrong} times. "
                        f"{_CHECKSUM_HINT}"
                    )
                raise OSError(f"the object has {stored} bytes after {size:,} were sent")

        # Five times the limit: an upload that was given up and ends late would replace what came after it.
        try:
            self._ask("writing", key, upload, 4 * timeout() + size / _SLOWEST)
        except FileNotFoundError:  # as gs:// says it
            self._check_bucket()
            raise

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""

        def delete() -> None:
            try:
                self._files.delete_file(self._at(key))
            except FileNotFoundError:
                return

        self._ask("removing", key, delete)

    def _at(self, key: str) -> str:
        if self._uri.scheme in HADOOP:
            return f"/{key}"
        return f"{self._base}/{key}" if self._base and key else self._base or key

    def _key(self, path: str) -> str:
        """The key of a path that the file system lists."""
        return (
            path.partition("://")[2].partition("/")[2]
            if "://" in path
            else path.strip("/")[len(self._base) :].strip("/")
        )

    def _name(self, key: str) -> str:
        return str(self._uri._replace(key=key))

    def _ask(self, doing: str, key: str, request: Callable[[], Result], extra: float = 0.0) -> Result:
        """Make a request until it succeeds, is refused, or patience ends."""
        from pyarrow import ArrowException, ArrowInvalid  # the first of Azure, where it has no other name for an error

        began: float | None = None
        pause = _FIRST_PAUSE
        while True:
            try:
                return _limited(request, timeout() + extra)
            except (RemoteError, FileNotFoundError):
                raise
            except (OSError, ArrowException) as error:
                said = hide(reason_of(error))
                self._refuse(doing, key, said)
                if isinstance(error, ArrowInvalid):
                    raise RemoteError(f"{doing} {self._name(key)}: {said}") from None
                now = time.monotonic()
                began = now if began is None else began
                if now - began + pause > patience():
                    raise RemoteError(
                        f"{doing} {self._name(key)} failed for {now - began:.0f} s ({said}). Is the store up, and its address "
                        f"right? {PATIENCE_VARIABLE} sets how many seconds to wait."
                    ) from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refuse(self, doing: str, key: str, said: str) -> None:
        """A RemoteError for an answer that will not change."""
        for sign, meaning in _REFUSALS.items():
            if sign in said:
                hint = CREDENTIALS.get(self._uri.scheme, "") if "bucket" not in meaning else ""
                raise RemoteError(f"{doing} {self._name(key)}: {meaning} {hint} ({said})".replace("  ", " ")) from None


@functools.lru_cache(maxsize=64)
def store_of(scheme: str, authority: str) -> Store:
    """The store of a bucket, connected once."""
    return Store(Uri(scheme, authority, ""))


def _with_folders(entries: dict[str, FileStat | None], above: str, *, recursive: bool) -> dict[str, FileStat | None]:
    """The entries below a folder, with the folders that their names imply; without `recursive` of one level."""
    start = above.count("/") + 1 if above else 0
    found: dict[str, FileStat | None] = {}
    for key, stat in entries.items():
        parts = key.split("/")
        folders = ["/".join(parts[:depth]) for depth in range(start + 1, len(parts))]
        found |= dict.fromkeys(folders if recursive else folders[:1])
        if recursive or not folders:
            found[key] = stat
    return found


def _stat(info: Any) -> FileStat:
    return FileStat(int(info.size or 0), int(info.mtime_ns or 0))


def _pieces(content: bytes | Path) -> Iterable[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _limited(request: Callable[[], Result], seconds: float) -> Result:
    """The result of a request; a TimeoutError if it takes too long. What it still does then goes unheard."""
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            results.append(request())
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="hotbed-store", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if errors:
        raise errors[0]
    return results[0]
