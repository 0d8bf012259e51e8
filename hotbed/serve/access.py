"""Who may ask, and whether others can listen: the bearer token and the TLS files of a server.

Everything but the health checks needs the token: a path that is added later is not open by mistake. It is compared in constant
time and appears in no message.
"""

from __future__ import annotations

import hmac
import os
import shlex
import ssl
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from hotbed.errors import ConfigError
from hotbed.serve.metrics import ServerMetrics
from hotbed.serve.openapi import OPEN
from hotbed.serve.request import RequestError

VARIABLE = "HOTBED_TOKEN"
_MOST_BYTES = 8192  # of a token; headers end at 64 KiB


class Access(NamedTuple):
    """The token that requests need, and the files of TLS; None: no token, plain HTTP."""

    token: bytes | None = None
    cert: Path | None = None
    key: Path | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.cert is None else "https"

    @property
    def curl_options(self) -> str:
        """What `curl` needs, for a shell; the token stays in a variable."""
        trusted = "" if self.cert is None else f" --cacert {shlex.quote(str(self.cert))}"
        return trusted if self.token is None else f'{trusted} -H "authorization: Bearer ${VARIABLE}"'

    @property
    def open_to_network(self) -> str:
        """The warning of a server that others can reach; "" if it has both."""
        if self.token is None:
            who = "anyone who can reach this machine can request scores: give --token-file"
            return who if self.cert else f"{who}, and --tls-cert, since there is no encryption either; or use a proxy"
        return "" if self.cert else "the token and all values travel unencrypted: give --tls-cert, or use a proxy"


def read_access(token_file: Path | None, cert: Path | None, key: Path | None) -> Access:
    """The token of the file or of the environment, and files that were checked; all mistakes are ConfigErrors."""
    _check_tls(cert, key)
    return Access(_read_token(token_file), cert, key)


def _read_token(file: Path | None) -> bytes | None:
    given = os.environ.get(VARIABLE)
    found = None if given is None else _checked(given.encode(errors="surrogateescape"), VARIABLE)
    if file is None:
        return found
    with _reading(file, "--token-file") as stream:
        token = _checked(stream.read(_MOST_BYTES + 1), f"--token-file {file}")
    if found is not None and found != token:
        raise ConfigError(f"--token-file {file} and {VARIABLE} hold different tokens. Give one of them.")
    return token


def _checked(text: bytes, where: str) -> bytes:
    token = text.strip()
    if not token:
        raise ConfigError(f"{where} is empty; a token is needed there, such as that of `openssl rand -hex 32`.")
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{where} holds more than {_MOST_BYTES:,} bytes; a token is one word, in one line.")
    if not all(33 <= byte <= 126 for byte in token):
        raise ConfigError(f"{where} holds spaces or bytes that are not ASCII; a token is one word, in one line.")
    return token


def _check_tls(cert: Path | None, key: Path | None) -> None:
    if cert is None and key is None:
        return
    if cert is None or key is None:
        given, absent = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} needs {absent}: TLS takes a certificate and its private key, both as PEM.")
    for option, file in (("--tls-cert", cert), ("--tls-key", key)):
        with _reading(file, option):
            pass
    locked: list[bool] = []

    def no_password() -> str:
        locked.append(True)
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, no_password)
    except (ssl.SSLError, ValueError) as error:
        reason = "the key is encrypted, and a server cannot ask for its password" if locked else _why(error)
        raise ConfigError(
            f"--tls-cert {cert} and --tls-key {key} cannot be used: {reason}. Both are PEM files: the certificate, "
            "followed by those of its issuers, and its private key, not encrypted."
        ) from None


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    return "one of them is not PEM" if reason is None else str(reason).lower().replace("_", " ")


def _reading(file: Path, option: str) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be read: {error.strerror}.") from None


class TokenGuard:
    """An ASGI application in front of another one: requests without the token get 401."""

    def __init__(self, app: ASGIApp, token: bytes, metrics: ServerMetrics) -> None:
        self._app, self._token, self._metrics = app, token, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        answer = RequestError(
            401, "this path needs the header `Authorization: Bearer TOKEN`, with the server's token"
        ).answer
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer.body)).encode())]
        headers += [(b"www-authenticate", b"Bearer"), (b"connection", b"close")]  # the body is not read
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})
        self._metrics.answered(401, time.perf_counter() - began)

    def _is_known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return False
        kind, _, token = given[0].partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)
