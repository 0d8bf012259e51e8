"""One object store: a URI in, bytes out and in, whatever the network does meanwhile.

Every request has a time limit and is made again after growing pauses (0.1 s, doubled up to 5 s, times a random half to one)
until it succeeds or `patience` seconds have passed since the first failure. A refusal (no such bucket, no access) is not
repeated. A body that is shorter than what was asked for counts as a failure. Errors never hold a secret.

An object appears whole or not at all when its upload ends. Uploads go out in parts of some 10 MB, one at a time for each file:
memory is bounded by the number of files in flight. The size in the store is compared with what was sent.
"""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hotbed.errors import ConfigError, RemoteError
from hotbed.files.settings import PATIENCE_VARIABLE, patience, timeout
from hotbed.files.uri import DEFAULT_HOST, HADOOP, SCHEMES, Uri, hide, options_of

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds
_SLOWEST = 1 << 20  # bytes per second; an upload may take its size at this rate longer than the time limit
_PIECE = 4 << 20  # bytes of a file that are handed to an upload at a time
_TRIES_OF_SIZE = 3  # uploads of one object that arrive with another size
_CHECKSUM_HINT = (
    "The store may not know the checksums that the AWS SDK adds: set AWS_REQUEST_CHECKSUM_CALCULATION=when_required."
)
_REFUSALS = {  # a part of the SDK's message -> what to do
    "NO_SUCH_BUCKET": "There is no such bucket: check its name, or make it first.",
    "bucket does not exist": "There is no such bucket: check its name, or make it first.",
    "ACCESS_DENIED": "Access was denied.",
    "INVALID_ACCESS_KEY_ID": "The store does not know the access key.",
    "SIGNATURE_DOES_NOT_MATCH": "The secret key is wrong.",
    "EXPIRED_TOKEN": "The session token has expired.",
    "HTTP status 400": "The store refuses the request.",
    "HTTP status 401": "Access was denied.",
    "HTTP status 403": "Access was denied.",
}
_CREDENTIALS = {
    "s3": "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or the machine's role; "
    "the endpoint of another store from AWS_ENDPOINT_URL_S3.",
    "gs": "Credentials come from GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`.",
    "abfs": "Credentials come from AZURE_STORAGE_KEY, or from AZURE_CLIENT_ID, AZURE_TENANT_ID and AZURE_CLIENT_SECRET.",
    "hdfs": "Hadoop's libraries are found by HADOOP_HOME, ARROW_LIBHDFS_DIR and CLASSPATH (hadoop classpath --glob).",
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
    """An object or a folder is not the one that was opened or listed any more."""


class Listed(NamedTuple):
    """One entry of a folder."""

    key: str
    stat: FileStat | None  # None: a folder


class Store:
    """The objects of one bucket (or container, or host)."""

    def __init__(self, uri: Uri) -> None:
        self._uri = uri._replace(key="")
        self._files, self._base = _connect(self._uri)
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
            raise RemoteError(f"{self._uri}: {_REFUSALS['NO_SUCH_BUCKET']}")
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

        selector = FileSelector(self._at(key), allow_not_found=True, recursive=recursive)
        found = self._ask("listing", key, lambda: self._files.get_file_info(selector))
        entries = [Listed(self._key(info.path), _stat(info) if info.is_file else None) for info in found]
        return sorted(entry for entry in entries if entry.key)

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
        self._ask("writing", key, upload, 4 * timeout() + size / _SLOWEST)

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
        began: float | None = None
        pause = _FIRST_PAUSE
        while True:
            try:
                return _limited(request, timeout() + extra)
            except (RemoteError, FileNotFoundError):
                raise
            except OSError as error:
                said = hide(str(error).strip().splitlines()[0]) if str(error) else type(error).__name__
                self._refuse(doing, key, said)
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
                hint = _CREDENTIALS.get(self._uri.scheme.removesuffix("s"), "") if "bucket" not in meaning else ""
                raise RemoteError(f"{doing} {self._name(key)}: {meaning} {hint} ({said})".replace("  ", " ")) from None


@functools.lru_cache(maxsize=64)
def store_of(scheme: str, authority: str) -> Store:
    """The store of a bucket, connected once."""
    return Store(Uri(scheme, authority, ""))


def _connect(uri: Uri) -> tuple[FileSystem, str]:
    """The file system of a URI, and the path of its bucket there."""
    if uri.scheme not in SCHEMES:
        return _from_fsspec(uri)
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, HadoopFileSystem

    try:
        if uri.scheme == "s3":
            return _s3(uri), uri.authority
        if uri.scheme in HADOOP:
            host = DEFAULT_HOST if uri.authority == DEFAULT_HOST else f"{uri.scheme}://{uri.authority}"
            return HadoopFileSystem(host), ""
        files, base = FileSystem.from_uri(f"{uri.scheme}://{uri.authority}/")
        return files, base.strip("/")
    except (ArrowException, OSError, ImportError) as error:
        if isinstance(error, RemoteError):
            raise
        hint = _CREDENTIALS.get(uri.scheme.removesuffix("s"), "")
        raise RemoteError(f"{uri} cannot be opened: {hide(str(error).splitlines()[0])}. {hint}") from None


def _s3(uri: Uri) -> FileSystem:
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    given = options_of(uri)
    variables = (os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    address = given.get("endpoint_override") or next((one for one in variables if one), "")
    protocol, separator, host = address.partition("://")
    return S3FileSystem(
        access_key=given.get("user"),
        secret_key=given.get("password"),
        region=given.get("region") or ("" if address else _region(uri)) or None,
        scheme=given.get("scheme") or (protocol if separator else None),
        endpoint_override=(host if separator else address).rstrip("/") or None,
        background_writes=False,  # else parts of an upload pile up in memory
        connect_timeout=min(timeout(), 10.0),
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=1),  # this module waits between its own
    )


def _region(uri: Uri) -> str:
    """The region of a bucket of AWS; empty where the environment says it, or nobody does."""
    from pyarrow.fs import resolve_s3_region

    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        return ""
    try:
        return str(resolve_s3_region(uri.authority))
    except OSError as error:
        if "not found" in str(error):
            raise RemoteError(f"{uri}: {_REFUSALS['NO_SUCH_BUCKET']}") from None
        return ""


def _from_fsspec(uri: Uri) -> tuple[FileSystem, str]:
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    known = ", ".join(f"{scheme}://" for scheme in (*SCHEMES, "file"))
    try:
        import fsspec

        found = fsspec.filesystem(uri.scheme)
    except ImportError as error:
        raise ConfigError(
            f"{uri} needs a package that is not installed ({error}). Without further packages hotbed reads {known}."
        ) from None
    except ValueError:
        raise ConfigError(
            f"{uri}: the scheme {uri.scheme}:// is unknown. hotbed reads {known}, and what installed fsspec packages read."
        ) from None
    return PyFileSystem(FSSpecHandler(found)), uri.authority


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
