"""A URI in; its scheme, its place, its options and its secrets out, each apart.

    s3://bucket/key    s3://KEY:SECRET@bucket/key?region=eu-west-1    file:///data/day_0.tsv

Credentials belong in the environment. Where a URI has some (a password, or a query with a key or a token), they are kept in
this process only, and every text that hotbed writes or shows has `***` in their place (`hide`). pyarrow.fs is not loaded here.
"""

from __future__ import annotations

import os
import re
import threading
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from hotbed.errors import ConfigError

SCHEMES = ("s3", "gs", "abfs", "abfss", "hdfs", "viewfs")  # what pyarrow.fs reads; others through fsspec
HADOOP = ("hdfs", "viewfs")
_AZURE = ("abfs", "abfss")
DEFAULT_HOST = "default"  # the one that Hadoop's settings name
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "az": "abfs"}
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)(.*)", re.DOTALL)
_OPTION = r"\w+=(?:(?<=[?&]sig=)[^&?*]*|[^&/?*]*)"  # the signature of a token may have slashes
_QUERY = re.compile(rf"\?({_OPTION}(?:&{_OPTION})*)$")  # a ? that is not a wildcard
PLAIN_OPTIONS = (  # those that are not secret
    *("region", "endpoint_override", "scheme"),
    *("blob_storage_authority", "dfs_storage_authority", "enable_tls"),
)
_SIGNED_FIELDS = ("sv", "ss", "srt", "sp", "se", "st", "spr", "sr")  # of a SAS token, all but its signature
_SECRET_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET"),
)
_LEAST_SECRET = 4  # shorter ones would hide ordinary words
_secrets: set[str] = set()
_options: dict[tuple[str, str], dict[str, str]] = {}  # of (scheme, authority), from URIs of this process
_lock = threading.Lock()


class Uri(NamedTuple):
    """A place in a store. The authority is the bucket, the container with its account, or the host."""

    scheme: str
    authority: str
    key: str  # without a slash at either end

    def __str__(self) -> str:
        """The URI without secrets and options."""
        return f"{self.scheme}://{self.authority}/{self.key}".rstrip("/")


def read_uri(text: str) -> Uri | None:
    """The URI that a text is, or None for a local path. `file:///a` counts as local (`local_part`).

    `s3:/bucket`, which pathlib makes of `s3://bucket`, is read as well.
    """
    match = _URI.fullmatch(text)
    if match is None:
        return None
    scheme = _SAME.get(match[1].lower(), match[1].lower())
    if scheme == "file" or (not match[2] and scheme not in SCHEMES):
        return None
    rest, options = _split_query(match[3])
    authority, _, key = rest.lstrip("/").partition("/") if scheme not in HADOOP else rest.partition("/")
    user, at, host = authority.rpartition("@")
    if at and ":" in user:
        name, _, password = user.partition(":")
        options["password"] = unquote(password)
        authority = host
        if scheme not in _AZURE:
            options["user"] = unquote(name)
        elif name:  # the account or the container
            authority = f"{name}@{host}"
    if not authority and scheme in HADOOP:
        authority = DEFAULT_HOST
    if not authority:
        raise ConfigError(f"{hide(text)!r} names no bucket. A URI has the form {scheme}://bucket/folder/file.")
    if options:
        _remember(scheme, authority, options)
    return Uri(scheme, authority, re.sub("/+", "/", key).strip("/"))


def clean_uri(text: str) -> str:
    """A URI without its secrets and options, which this process keeps; any other text as it is."""
    uri = read_uri(text)
    return text if uri is None else str(uri)


def local_part(text: str) -> str:
    """A local path without `file://`; any other text as it is."""
    match = _URI.fullmatch(text)
    if match is None or match[1].lower() != "file":
        return text
    rest = match[3] if match[2] else "/" + match[3]
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost"):
        raise ConfigError(f"{text!r} names a file of the host {host!r}. A local file is file:///folder/file.")
    return unquote(slash + path)


def options_of(uri: Uri) -> dict[str, str]:
    """What URIs of this process said besides bucket and key: region, endpoint_override, scheme, user, password."""
    with _lock:
        return dict(_options.get((uri.scheme, uri.authority), {}))


def hide(text: str) -> str:
    """The text with every known secret replaced by `***`."""
    with _lock:
        known = set(_secrets)
    known.update(value for name in _SECRET_VARIABLES if len(value := os.environ.get(name, "")) >= _LEAST_SECRET)
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, "***")
    text = re.sub(r"\b(sig=)[^&\s]+", r"\1***", text)
    return re.sub(r"(:/+[^\s/@:]*):[^\s/@]+@", r"\1:***@", text)  # pathlib leaves one slash


def _split_query(rest: str) -> tuple[str, dict[str, str]]:
    found = _QUERY.search(rest)
    return (rest, {}) if found is None else (rest[: found.start()], dict(parse_qsl(found[1])))


def _remember(scheme: str, authority: str, options: dict[str, str]) -> None:
    with _lock:
        _options.setdefault((scheme, authority), {}).update(options)
        _secrets.update(
            value
            for name, value in options.items()
            if name not in (*PLAIN_OPTIONS, *_SIGNED_FIELDS) and len(value) >= _LEAST_SECRET
        )
