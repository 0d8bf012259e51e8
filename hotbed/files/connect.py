"""A URI in, the file system of pyarrow (or fsspec) that reads its store out, with credentials of the environment or the URI."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from hotbed.errors import ConfigError, RemoteError, reason_of
from hotbed.files.settings import timeout
from hotbed.files.uri import DEFAULT_HOST, HADOOP, PLAIN_OPTIONS, SCHEMES, Uri, hide, options_of

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

NO_SUCH_BUCKET = "There is no such bucket: check its name, or make it first."
_SERVICES = ("blob", "dfs")  # of Azure
_AZURE = (
    "Credentials come from AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, or AZURE_CLIENT_ID, AZURE_TENANT_ID and "
    "AZURE_CLIENT_SECRET."
)
CREDENTIALS = {
    "s3": "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or the machine's role; "
    "the endpoint of another store from AWS_ENDPOINT_URL_S3.",
    "gs": "Credentials come from GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`.",
    "abfs": _AZURE,
    "abfss": _AZURE,
    "hdfs": "Hadoop's libraries are found by HADOOP_HOME, ARROW_LIBHDFS_DIR and CLASSPATH (hadoop classpath --glob).",
}


def connect(uri: Uri) -> tuple[FileSystem, str]:
    """The file system of a URI, and the path of its bucket there."""
    if uri.scheme not in SCHEMES:
        return _from_fsspec(uri)
    from pyarrow import ArrowException
    from pyarrow.fs import HadoopFileSystem

    try:
        if uri.scheme == "s3":
            return _s3(uri), uri.authority
        if uri.scheme in HADOOP:
            host = DEFAULT_HOST if uri.authority == DEFAULT_HOST else f"{uri.scheme}://{uri.authority}"
            return HadoopFileSystem(host), ""
        return _gs(uri) if uri.scheme == "gs" else _azure(uri)
    except (ArrowException, OSError, ImportError) as error:
        if isinstance(error, RemoteError):
            raise
        hint = CREDENTIALS.get(uri.scheme, "")
        raise RemoteError(f"{uri} cannot be opened: {hide(reason_of(error))}. {hint}") from None


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
            raise RemoteError(f"{uri}: {NO_SUCH_BUCKET}") from None
        return ""


def _gs(uri: Uri) -> tuple[FileSystem, str]:
    from pyarrow.fs import GcsFileSystem

    given = options_of(uri)
    user, _, bucket = uri.authority.rpartition("@")
    files = GcsFileSystem(
        anonymous=user == "anonymous",
        scheme=given.get("scheme", "https"),
        endpoint_override=given.get("endpoint_override"),
        retry_time_limit=timedelta(seconds=1),  # store.py waits between its own
    )
    return files, bucket


def _azure(uri: Uri) -> tuple[FileSystem, str]:
    """CONTAINER@ACCOUNT.dfs.core.windows.net, ACCOUNT.blob.core.windows.net/CONTAINER or ACCOUNT@CONTAINER."""
    from pyarrow.fs import AzureFileSystem

    given = options_of(uri)
    container, _, host = uri.authority.rpartition("@")
    account, _, domain = host.partition(".")
    if domain not in ("dfs.core.windows.net", "blob.core.windows.net"):
        account, container = container, host
    if not account:
        raise RemoteError(f"{uri} names no account. Write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER.")
    place = {f"{kind}_storage_scheme": "http" if given.get("enable_tls") == "false" else "https" for kind in _SERVICES}
    place |= {name: given[name] for name in (f"{kind}_storage_authority" for kind in _SERVICES) if name in given}
    signed = urlencode({name: value for name, value in given.items() if name not in (*PLAIN_OPTIONS, "password")})
    secret: dict[str, str] = {}
    if key := given.get("password") or ("" if signed else os.environ.get("AZURE_STORAGE_KEY", "")):
        secret["account_key"] = key
    elif token := signed or os.environ.get("AZURE_STORAGE_SAS_TOKEN", ""):
        secret["sas_token"] = f"?{token.removeprefix('?')}"
    return AzureFileSystem(account, **secret, **place), container


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
