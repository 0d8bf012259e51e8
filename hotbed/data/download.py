"""Downloads over HTTP: resumable and verified.

In: a RemoteFile and a directory. Out: the complete, verified file. Bytes go to NAME.part; an interrupted transfer continues
there with an HTTP range request, now or in the next run. Only a file of the right size and checksum gets its final name.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from hotbed.data.catalog import HubFolder, RemoteFile
from hotbed.errors import DataError
from hotbed.host.atomic import put

CHUNK = 1 << 20
TRIES = 5  # transfers in a row without a new byte, before giving up
TIMEOUT = 60.0  # seconds without an answer

Progress = Callable[[str, int, int | None], None]  # file name, bytes so far, bytes in all (None: not known)


def download(file: RemoteFile, directory: Path, progress: Progress | None = None) -> Path:
    """Fetch one file, or what is missing of it; a complete and correct file is left alone."""
    report = progress or (lambda name, done, total: None)
    target = directory / file.name
    part = directory / f"{file.name}.part"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file():
            check(file, target)
            return target
        with part.open("ab") as out:
            try:
                fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{part} is being written by another process. Wait for it.") from None
            try:
                _fetch(file, out, report)
            except DataError:
                if out.tell() == 0:
                    part.unlink()
                raise
        try:
            check(file, part)
        except DataError:
            part.unlink()
            raise
        put(part, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


def check(file: RemoteFile, path: Path) -> None:
    """Compare a local copy with what its publisher states."""
    size = path.stat().st_size
    if file.size is not None and size != file.size:
        raise DataError(
            f"{path} has {size:,} bytes; {file.address} is stated to have {file.size:,}. "
            "Delete it and run the command again."
        )
    if not file.checksum:
        return
    kind, _, expected = file.checksum.partition(":")
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()
    if found != expected:
        raise DataError(
            f"{path} has {kind} {found}; {file.address} is stated to have {expected}: "
            "it is damaged or was replaced. Delete it and run the command again."
        )


def list_folder(folder: HubFolder, suffixes: tuple[str, ...]) -> list[RemoteFile]:
    """The files of a Hugging Face folder that end in one of `suffixes`, with the sizes and sums of its listing."""
    try:
        with _open(folder.listing) as answer:
            entries: Any = json.load(answer)
        files = [
            RemoteFile(
                name=entry["path"].rpartition("/")[2],
                address=folder.address(entry["path"]),
                size=entry["size"],
                checksum=f"sha256:{entry['lfs']['oid']}" if "lfs" in entry else "",
            )
            for entry in entries
            if entry["type"] == "file" and entry["path"].endswith(suffixes)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder.listing} did not answer with a file listing ({error}). Try again later.") from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(folder.listing, folder.page, error) from error
    if not files:
        raise DataError(f"{folder.listing} lists no {' or '.join(suffixes)} file; the set has moved. Look at its page.")
    return sorted(files, key=lambda file: file.name)


def _fetch(file: RemoteFile, out: IO[bytes], report: Progress) -> None:
    """Append to `out` until the file is complete."""
    tries = 0
    while True:
        before = out.seek(0, os.SEEK_END)
        try:
            if _fetch_once(file, out, report):
                return
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            raise _refused(file, error) from error
        except (http.client.HTTPException, urllib.error.URLError, ConnectionError, TimeoutError) as error:
            if before == 0 and out.tell() == 0:
                raise _unreachable(file.address, file.address, error) from error
            reason = str(error) or type(error).__name__
        tries = tries + 1 if out.tell() <= before else 0
        if tries == TRIES:
            raise DataError(
                f"the download of {file.address} stopped at byte {out.tell():,} ({reason}). "
                "The part so far is kept: run the same command again to continue."
            )


def _fetch_once(file: RemoteFile, out: IO[bytes], report: Progress) -> bool:
    """One request for what is missing; whether the file is complete after it."""
    start = out.tell()
    if file.size is not None and start >= file.size:
        if start > file.size:
            out.truncate(0)
            return False
        return True
    try:
        answer = _open(file.address, start)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            if file.size is None and error.headers.get("Content-Range", "").endswith(f"/{start}"):
                return True  # nothing was missing
            out.truncate(0)
            return False
        raise
    with answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT and start:
            out.truncate(0)  # a server without ranges sends everything again
            start = 0
            out.seek(0)
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length is not None else file.size
        report(file.name, start, total)
        done = start
        while block := _read(answer):
            out.write(block)
            done += len(block)
            report(file.name, done, total)
    return total is None or done >= total


def _read(answer: http.client.HTTPResponse) -> bytes:
    """The next bytes; errors here are network errors, not disk errors."""
    try:
        return answer.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


def _open(address: str, start: int = 0) -> http.client.HTTPResponse:
    request = urllib.request.Request(address, headers={"User-Agent": "hotbed", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT)
    return answer


def _refused(file: RemoteFile, error: urllib.error.HTTPError) -> DataError:
    if error.code in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        return DataError(
            f"{file.address} requires an account (HTTP {error.code}). Sign in with a browser, download it there, "
            f"put it next to the other files as {file.name}, and run the command again to check it."
        )
    return DataError(
        f"{file.address} answered HTTP {error.code} ({error.reason}). The file may have moved, or the server has a problem: "
        "look at the set's page, or try again later."
    )


def _unreachable(address: str, by_hand: str, error: Exception) -> DataError:
    if isinstance(error, urllib.error.HTTPError):
        return DataError(f"{address} answered HTTP {error.code} ({error.reason}). Try again later.")
    reason = getattr(error, "reason", None) or error
    return DataError(
        f"{urlsplit(address).netloc} cannot be reached ({reason}). Check the network, or set https_proxy. "
        f"Without a network, fetch {by_hand} on another machine; or train on criteo-like or adult, which need no download."
    )
