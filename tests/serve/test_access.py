"""A server with a token and TLS: who gets in, what is said about wrong files, and that the token is in no message."""

import json
import shutil
import ssl
import subprocess
import urllib.request

import pytest

from hotbed.errors import ConfigError
from hotbed.serve.access import Access, read_access
from tests.serve.conftest import GOOD, serving

TOKEN = "5f3c9a11-not-to-be-seen"
KNOWN = {"Authorization": f"Bearer {TOKEN}"}
GUARDED = [
    ("POST", "/score"),
    ("POST", "/reload"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/"),
    ("GET", "/x"),
    ("GET", "/v2"),
    ("GET", "/v2/models/run"),
    ("POST", "/v2/models/run/infer"),
]


def make_pair(folder, name, *more):
    """A certificate of 127.0.0.1 and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
               "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]  # fmt: skip
    subprocess.run([*command, *(more or ["-nodes"])], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    folder = tmp_path_factory.mktemp("tls")
    return {
        "good": make_pair(folder, "good"),
        "other": make_pair(folder, "other"),
        "locked": make_pair(folder, "locked", "-passout", "pass:secret"),
    }


@pytest.fixture(scope="module")
def guarded(run_folder, pairs, tmp_path_factory):
    """With a token and TLS."""
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    cert, key = pairs["good"]
    flags = ("--token-file", file, "--tls-cert", cert, "--tls-key", key, "--time-limit", "60")
    with serving(run_folder, *map(str, flags), tls=ssl.create_default_context(cafile=cert)) as found:
        yield found


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "headers",
    [
        {}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer "}, {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN.upper()}"}, {"Authorization": f"Bearer {TOKEN} {TOKEN}"},
    ],
    ids=["none", "empty", "no token", "blank", "no kind", "other kind", "longer", "shorter", "other case", "two"],
)  # fmt: skip
def test_without_the_token_there_is_nothing(guarded, method, path, headers):
    status, body, answered = guarded.ask(method, path, json.dumps(GOOD).encode() if method == "POST" else None, headers)
    assert (status, answered["www-authenticate"]) == (401, "Bearer")
    assert "Authorization: Bearer TOKEN" in json.loads(body)["error"]
    assert TOKEN not in body.decode()


def test_with_the_token_all_paths_answer(guarded):
    status, body, _ = guarded.ask("POST", "/score", json.dumps(GOOD).encode(), KNOWN)
    assert (status, len(json.loads(body)["scores"])) == (200, 3)
    assert guarded.ask("POST", "/score", json.dumps(GOOD).encode(), {"authorization": f"bearer {TOKEN}"})[0] == 200
    document = json.loads(guarded.ask("GET", "/openapi.json", None, KNOWN)[1])
    assert document["security"] == [{"token": []}]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    for method, path in GUARDED[1:-1]:
        assert guarded.ask(method, path, None, KNOWN)[0] == (404 if path == "/x" else 200)


def test_refusals_are_counted(guarded):
    def count():
        lines = guarded.ask("GET", "/metrics", None, KNOWN)[1].decode().splitlines()
        return sum(
            float(line.split()[1]) for line in lines if line.startswith('hotbed_serve_requests_total{status="401"}')
        )

    before = count()
    assert guarded.ask("POST", "/score", b"{}")[0] == 401
    assert count() == before + 1


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"])
def test_health_needs_no_token(guarded, path):
    assert guarded.ask("GET", path)[0] == 200
    assert guarded.ask("GET", path, None, {"Authorization": "Bearer wrong"})[0] == 200


def test_plain_http_is_not_answered(guarded):
    with pytest.raises(OSError):  # noqa: PT011  the connection ends, one way or another
        urllib.request.urlopen(f"http://127.0.0.1:{guarded.port}/healthz", timeout=30)
    assert guarded.ask("GET", "/healthz")[0] == 200


def test_the_messages_show_the_address_and_never_the_token(run_folder, pairs):
    cert, key = pairs["good"]
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    with serving(
        run_folder, *flags, env={"HOTBED_TOKEN": TOKEN}, tls=ssl.create_default_context(cafile=cert)
    ) as server:
        assert server.ask("POST", "/score", b"{}", {"Authorization": "Bearer nobody-knows"})[0] == 401
        for line in server.program.stdout:
            if "try: curl" in line:
                break
        assert f'--cacert {cert} -H "authorization: Bearer $HOTBED_TOKEN"' in line
        assert f"https://127.0.0.1:{server.port}/score" in line
        if shutil.which("curl"):
            command = line.partition("try: ")[2]
            done = subprocess.run(
                command, check=True, shell=True, env={"HOTBED_TOKEN": TOKEN}, capture_output=True, text=True, timeout=60
            )
            assert len(json.loads(done.stdout)["scores"]) == 2
    said = server.program.ended()
    assert TOKEN not in line + said.stdout + said.stderr
    assert "nobody-knows" not in said.stdout + said.stderr


def test_tokens_that_are_none(tmp_path, monkeypatch):
    file = tmp_path / "token"
    for text, said in ((b" \n", "is empty"), (b"two words", "holds spaces"), (b"\xff" * 20, "not ASCII"),
                       (b"a" * 9000, "more than 8,192 bytes")):  # fmt: skip
        file.write_bytes(text)
        with pytest.raises(ConfigError, match=said) as told:
            read_access(file, None, None)
        assert str(file) in str(told.value)
        assert "words" not in str(told.value)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=f"--token-file {missing} cannot be read"):
            read_access(missing, None, None)
    monkeypatch.setenv("HOTBED_TOKEN", "")
    with pytest.raises(ConfigError, match="HOTBED_TOKEN is empty"):
        read_access(None, None, None)
    monkeypatch.setenv("HOTBED_TOKEN", TOKEN)
    file.write_text("another")
    with pytest.raises(ConfigError, match="different tokens") as told:
        read_access(file, None, None)
    assert TOKEN not in str(told.value)
    file.write_text(f"{TOKEN}\n")
    assert read_access(file, None, None) == read_access(None, None, None) == Access(TOKEN.encode())


def test_certificates_that_cannot_be_used(pairs, tmp_path):
    cert, key = pairs["good"]
    (tmp_path / "text").write_text("not PEM")
    for one, other, said in (
        (cert, None, "--tls-cert needs --tls-key"), (None, key, "--tls-key needs --tls-cert"),
        (tmp_path / "none", key, "--tls-cert .*none cannot be read: No such file"),
        (cert, tmp_path, "--tls-key .* cannot be read"),
        (cert, pairs["other"][1], "the key is not that of the certificate"), (cert, tmp_path / "text", "PEM"),
        (tmp_path / "text", key, "PEM"), (cert, cert, "PEM"), (*pairs["locked"], "the key is encrypted"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            read_access(None, one, other)


def test_an_open_address_is_warned_about():
    token, files = b"t", ("cert", "key")
    assert "--token-file, and --tls-cert" in Access().open_to_network
    assert "--token-file" in Access(None, *files).open_to_network
    assert "travel unencrypted" in Access(token).open_to_network
    assert Access(token, *files).open_to_network == ""
