"""/: the OpenAPI document as a page that needs no network, with a form to try a request."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from hotbed.data.schema import Schema
from hotbed.serve.limits import Limits
from hotbed.serve.openapi import document, example_of, features_of

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


def page(schema: Schema, limits: Limits) -> str:
    """HTML."""
    paths = document(schema, limits)["paths"]
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
<p>Probabilities of candidates by a trained model. The whole description: <a href="openapi.json">openapi.json</a>.
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
