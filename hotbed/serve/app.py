"""HTTP requests in, answers out: the paths of the server, its limits and counters. pool.py does the scoring."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import time
from collections.abc import Callable
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import hotbed
from hotbed.scorer import Scorer
from hotbed.scorer.tensors import inputs_of, outputs_of
from hotbed.serve.access import Access, TokenGuard
from hotbed.serve.infer import PLATFORM, InferRequest, check_version
from hotbed.serve.openapi import ServedModel, document, example_of, features_of
from hotbed.serve.pool import PendingRequest, ScoringPool
from hotbed.serve.request import Answer, Limits, RequestError, RequestForm, ScoreForm
from hotbed.serve.watch import ModelWatch

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
code, pre, textarea { font: 0.875rem/1.4 ui-monospace, monospace; }
textarea { width: 100%; min-height: 14rem; box-sizing: border-box; }
pre { overflow: auto; border: 1px solid; padding: 0.5rem; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 0.25rem 0.5rem; border-bottom: 1px solid; }
button { font: inherit; padding: 0.5rem 1rem; }
"""
_SCRIPT = """
const form = document.querySelector("form"), out = document.querySelector("output");
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  out.textContent = "...";
  try {
    const answer = await fetch("score", { method: "POST", headers: { "content-type": "application/json" },
                                          body: form.elements.body.value });
    out.textContent = answer.status + " " + answer.statusText + "\\n" + await answer.text();
  } catch (error) { out.textContent = String(error); }
});
"""
_RETRY_SECONDS = b"1"
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


class Service:
    """One scorer behind HTTP."""

    def __init__(self, name: str, scorer: Scorer, pool: ScoringPool, watch: ModelWatch, access: Access) -> None:
        self._name, self.scorer, self._watch, self.access = name, scorer, watch, access
        self._limits, self._metrics = pool.limits, pool.metrics
        self._board = pool.metrics.board
        self._stopping = False
        score = _ScoreEndpoint(pool)
        infer = _ScoreEndpoint(pool, self._infer_form)
        app = Starlette(
            routes=[
                Route("/score", score, methods=["POST"]),
                Route("/v2", self._server_metadata),
                Route("/v2/health/live", self._live),
                Route("/v2/health/ready", self._model_ready),
                *(
                    route
                    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
                    for route in (
                        Route(path, self._model_metadata),
                        Route(f"{path}/ready", self._model_ready),
                        Route(f"{path}/infer", infer, methods=["POST"]),
                    )
                ),
                Route("/healthz", self._health),
                Route("/readyz", self._ready),
                Route("/metrics", self._show_metrics),
                Route("/reload", self._reload, methods=["POST"]),
                Route("/openapi.json", self._openapi),
                Route("/", self._page),
            ],
            exception_handlers={404: _http_error, 405: _http_error, RequestError: _refused},
        )
        self.app: ASGIApp = app if access.token is None else TokenGuard(app, access.token, pool.metrics)

    @property
    def closing(self) -> bool:
        """Whether this worker stops, or all of them do."""
        return self._stopping or bool(self._board.server.closing)

    def stop(self) -> None:
        """From now on this worker says that it is not ready."""
        self._stopping = True

    @property
    def _model(self) -> ServedModel:
        live = self.scorer.live
        return ServedModel(self._name, live.schema, live.labels)

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def _ready(self, request: Request) -> Response:
        if self.closing:
            return PlainTextResponse("closing\n", 503)
        age = self._metrics.model_age
        old = "" if age is None else f", written {age:.0f} s ago"
        count = len(self._board.parts)
        workers = "" if count == 1 else f", {self._board.num_ready} of {count} workers"
        return PlainTextResponse(f"ready: {self.scorer.version}{old}{workers}\n")

    async def _server_metadata(self, request: Request) -> Response:
        return JSONResponse({"name": PLATFORM, "version": hotbed.__version__, "extensions": []})

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def _model_ready(self, request: Request) -> Response:
        """Of the server, or of the model that the path names."""
        named = {"name": self._checked_name(request.scope)} if request.path_params else {}
        check_version(request.path_params.get("version"), self.scorer.version)
        return JSONResponse({**named, "ready": not self.closing}, 503 if self.closing else 200)

    async def _model_metadata(self, request: Request) -> Response:
        name, version = self._checked_name(request.scope), self.scorer.version
        check_version(request.path_params.get("version"), version)
        inputs = [one._asdict() for one in inputs_of(self.scorer.live.schema)]
        about = {"name": name, "versions": [version], "platform": PLATFORM}
        outputs = [one._asdict() for one in outputs_of([task.name for task in self.scorer.live.labels])]
        return JSONResponse({**about, "inputs": inputs, "outputs": outputs})

    def _infer_form(self, scope: Scope) -> RequestForm:
        return InferRequest(self._checked_name(scope), scope["path_params"].get("version"))

    def _checked_name(self, scope: Scope) -> str:
        if (name := scope["path_params"]["name"]) != self._name:
            raise RequestError(404, f"there is no model {name[:60]!r} here; there is {self._name!r}")
        return self._name

    async def _show_metrics(self, request: Request) -> Response:
        accept = request.headers.get("accept", "")
        body, kind = await asyncio.to_thread(self._metrics.text, accept)  # the memory of processes takes ms to add up
        return Response(body, headers={"content-type": kind})

    async def _reload(self, request: Request) -> Response:
        if not is_loopback(request.client.host if request.client else ""):
            return JSONResponse({"error": "a reload is only accepted from the machine of the server"}, 403)
        way = await asyncio.to_thread(self._watch.look_everywhere, lambda: self.closing)
        found = {"update": way, "model": self.scorer.version}
        error = self._metrics.last_error or "another worker has refused it; see the log of the server"
        return JSONResponse(found | ({"error": error} if way == "refused" else {}))

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(document(self._model, self._limits, self.access.token is not None))

    async def _page(self, request: Request) -> Response:
        return HTMLResponse(page(self._model, self._limits), headers={"content-security-policy": _PAGE_POLICY})


class _ScoreEndpoint:
    """POST /score, or with another form of requests. A plain ASGI application: no Request object is built per call."""

    def __init__(self, pool: ScoringPool, form_of: Callable[[Scope], RequestForm] = lambda _: ScoreForm()) -> None:
        self._limits, self._metrics, self._pool, self._form_of = pool.limits, pool.metrics, pool, form_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        if self._metrics.board.in_flight >= self._limits.in_flight:
            answer = RequestError(503, "too many requests at once", limit=self._limits.in_flight).answer
        else:
            self._metrics.own.in_flight += 1  # by the event loop alone
            try:
                answer = await self._answered(scope, receive)
            finally:
                self._metrics.own.in_flight -= 1
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer.body)).encode())]
        if answer.status == 503:
            headers.append((b"retry-after", _RETRY_SECONDS))
        if answer.status in (408, 411, 413, 503):
            headers.append((b"connection", b"close"))  # the rest of the body is not read
        self._metrics.answered(answer.status, time.perf_counter() - began)
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answered(self, scope: Scope, receive: Receive) -> Answer:
        loop = asyncio.get_running_loop()
        job: PendingRequest | None = None
        try:
            async with asyncio.timeout(self._limits.seconds):
                body, form = await self._read(scope, receive), self._form_of(scope)
                job = PendingRequest(body, loop.create_future(), form)
                self._pool.submit(job)
                return await job.answer
        except RequestError as refused:
            return refused.answer
        except TimeoutError:
            if job is None:
                return RequestError(408, "the body did not arrive in time", limit=self._limits.seconds).answer
            job.give_up()
            return RequestError(503, "the server is overloaded", limit=self._limits.seconds).answer

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The body, up to the limit."""
        most = self._limits.body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length":
                if not value.isdigit():
                    raise RequestError(411, "content-length is not a number")
                if int(value) > most:
                    raise RequestError(413, f"a body of {int(value)} bytes is too long", limit=most)
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "the client has disconnected")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                raise RequestError(413, "the body is too long", limit=most)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)


def is_loopback(host: str) -> bool:
    """Whether an address or name belongs to the loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _http_error(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = (
        "there is no such path; / lists them"
        if status == 404
        else f"{request.method} is not for this path; / lists them"
    )
    return JSONResponse({"error": what, "where": request.url.path}, status, headers=getattr(error, "headers", None))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return Response(error.answer.body, error.status, media_type="application/json")


def page(model: ServedModel, limits: Limits) -> str:
    """The HTML page at /."""
    schema, paths = model.schema, document(model, limits)["paths"]
    ways = "".join(_way(path, verb, one) for path, verbs in paths.items() for verb, one in verbs.items())
    features = "".join(
        f"<tr><th scope='row'><code>{escape(name)}</code></th><td>{escape(_kinds(one))}</td>"
        f"<td>{escape(one['description'])}</td></tr>"
        for name, one in features_of(schema).items()
    )
    example = json.dumps(example_of(schema), indent=1)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>hotbed scorer</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>hotbed scorer</h1>
<p>Click probabilities of candidates from a trained model. Full description: <a href="openapi.json">openapi.json</a>.
At most {limits.body_bytes:,} bytes and {limits.candidates:,} candidates a request, {limits.in_flight:,} requests at once,
{limits.seconds:g} s for each.</p>
<h2>Try it</h2>
<form>
<p><label for="body">Body of <code>POST /score</code></label></p>
<p><textarea id="body" name="body" spellcheck="false">{escape(example)}</textarea></p>
<p><button type="submit">Score</button></p>
<pre><output for="body" aria-live="polite"> </output></pre>
</form>
<h2>Paths</h2>
{ways}
<h2>Features</h2>
<table><thead><tr><th scope="col">Name</th><th scope="col">Value</th><th scope="col">Meaning</th></tr></thead>
<tbody>{features}</tbody></table>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _way(path: str, verb: str, one: dict[str, Any]) -> str:
    answers = "".join(
        f"<li><code>{status}</code> {escape(answer['description'])}</li>" for status, answer in one["responses"].items()
    )
    about = f"<p>{escape(one['description'])}</p>" if "description" in one else ""
    return (
        f"<h3><code>{verb.upper()} {escape(path)}</code></h3><p>{escape(one['summary'])}</p>{about}<ul>{answers}</ul>"
    )


def _kinds(one: dict[str, Any]) -> str:
    if "anyOf" in one:
        return ", ".join(_kinds(each) for each in one["anyOf"])
    if one.get("type") == "array":
        return f"list of {_kinds(one['items'])}"
    kinds = one["type"]
    return kinds if isinstance(kinds, str) else ", ".join(kinds)
