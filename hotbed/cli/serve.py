"""`hotbed serve`: an HTTP scorer."""

from __future__ import annotations

from pathlib import Path

import typer

from hotbed.cli.console import report_compiling, waiting
from hotbed.cli.options import Memory, ModelPlace, ReadCache, Workers, local_only
from hotbed.errors import ConfigError
from hotbed.host.extras import how_to_install

_MOST_WORKERS = 256


def serve_command(
    model: ModelPlace,
    host: str = typer.Option(
        "127.0.0.1", help="Address to listen on; any address other than loopback is open to the network."
    ),
    port: int = typer.Option(8000, min=0, max=65535, help="Port; 0: any free port."),
    memory: Memory = None,
    workers: Workers = None,
    threads: int = typer.Option(2, min=1, max=256, help="Threads that score, in each process."),
    scratch: Path | None = typer.Option(
        None, help="Folder on a local disk for rows of checkpoints. Default: the folder of MODEL."
    ),
    mapped: bool = typer.Option(
        False,
        "--map",
        help="Map files of rows into memory: uncached rows are faster, but the page cache counts as memory of the process.",
    ),
    read_cache: ReadCache = None,
    poll: float = typer.Option(2.0, min=0, help="Seconds between checks for a newer model; 0: only on POST /reload."),
    max_body: str = typer.Option("4MiB", help="Largest request body."),
    max_candidates: int = typer.Option(4096, min=1, help="Most candidates per request."),
    max_in_flight: int = typer.Option(
        256, min=1, help="Maximum number of requests at once; further ones get 503 and Retry-After."
    ),
    time_limit: float = typer.Option(5.0, min=0.001, help="Time limit of a request in seconds."),
    model_name: str | None = typer.Option(
        None, metavar="NAME", help="Name of the model in /v2/models/NAME. Default: the name of the folder MODEL."
    ),
    token_file: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Bearer token that all requests need, except health checks. Default: HOTBED_TOKEN, if it is set.",
    ),
    tls_cert: Path | None = typer.Option(
        None, metavar="FILE", help="Serve https with this certificate, and those of its issuers (PEM)."
    ),
    tls_key: Path | None = typer.Option(
        None, metavar="FILE", help="Private key of the certificate (PEM, not encrypted)."
    ),
) -> None:
    r"""Score over HTTP: POST /score, with a page at / that explains it; also the Open Inference Protocol (/v2).

    Rows stay in their files, so tables may be larger than memory; --memory, left out 100MB, is for cached rows and their
    index, and several --workers divide it. New checkpoints of the run are loaded while requests
    are answered. Needs the packages of the extra `serve`: in a clone, `pip install '.\[serve]'`.

    [bold]For example:[/bold]

    hotbed serve runs/demo

    hotbed serve runs/demo --port 9000 --memory 1GB --max-candidates 1000

    hotbed serve runs/demo --workers 4 --memory 400MB

    hotbed serve runs/demo --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem
    """
    try:
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`hotbed serve` needs {error.name}, which is not installed: {how_to_install('serve')}"
        ) from error
    import logging

    with waiting("loading the model"):
        from hotbed.host.memory import parse_bytes
        from hotbed.serve.access import read_access
        from hotbed.serve.request import Limits
        from hotbed.serve.server import Address, ModelStorage, serve

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")  # --log-json has its own already
    logging.getLogger().setLevel(logging.INFO)
    limits = Limits(parse_bytes(max_body, "--max-body"), max_candidates, max_in_flight, time_limit)
    name = model_name or model.name or model.resolve().name
    if "/" in name:
        raise ConfigError(f"--model-name {name} is part of a path, /v2/models/NAME; it must not have a slash")
    if workers is not None and not 1 <= workers <= _MOST_WORKERS:
        raise ConfigError(f"--workers {workers}: there must be 1 to {_MOST_WORKERS} processes")
    local_only(scratch=scratch, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key)
    access = read_access(token_file, tls_cert, tls_key)
    from hotbed.files.settings import set_read_cache
    from hotbed.run.remote_folder import local_copy

    set_read_cache(read_cache)
    with report_compiling():
        storage = ModelStorage(name, memory or "100MB", scratch, threads, poll, mapped, workers or 1)
        serve(local_copy(model), Address(host, port), storage, limits, access)
